/* How much softmax mass the keys before a block boundary can carry at most, for every boundary, in O(length * dim).
 *
 * Every key k_j has a nearest centre c(j), one of a few dozen vectors. For a query q at position i every score is
 *
 *     q.k_j - m(i - j)  =  q.c(j) + q.(k_j - c(j)) - m(i - j)
 *                       <=  q.c(j) + |q| |k_j - c(j)| - m(i - j)                                     (Cauchy-Schwarz)
 *
 * so the keys before boundary B together weigh at most  sum over c of exp( q.c - m(i - B) + tail(B, c, |q|) )  with
 *
 *     tail(B, c, Q) = log sum_{j < B, c(j) = c} exp( Q |k_j - c| - m(B - j) )
 *
 * (1/sqrt(d) left out here). This sum over the real norms holds for any slope, and one huge key counts
 * only at its own distance. `tail` obeys a recursion over blocks and is convex in Q, so a chord between two tabulated
 * norms lies above it: LEVELS norms between the smallest and the largest query norm are enough for all queries.
 * A clock takes the place of the slope: m(i - j) becomes clock[j] - clock[i], m(B - j) becomes clock[j] - clock[B]. It may
 * rise as well as fall; one that falls lets more be skipped.
 * A table by distance has no such recursion, since its bias from a key to a boundary says nothing about a row. There every
 * key before B counts with the largest value of the table that lies as far away or farther, ceiling[i - B + 1] in place of
 * -m(i - B), and the tails are those of m = 0. The table itself may rise and fall; its value at the boundary would be no
 * bound.
 * A key or value that is not finite makes every later tail infinite: rows that see it never skip it.
 */
#ifndef TRAINSHORT_BOUND_H
#define TRAINSHORT_BOUND_H

#include "centres.h"

enum {
    LEVELS = 8,
    WORTH_IT = 3, /* blocks of keys from which on a bound can save more than it costs */
};

typedef struct {
    real lowest, step; /* the tabulated query norms are lowest + level * step */
    real slope;
    const double *clock; /* in place of the slope, or NULL */
    const real *ceiling; /* likewise, of a table */
    real slack;        /* covers the rounding of the bound itself, so that it stays a bound */
    real largest;      /* of the key norms, times scale */
    real *tail;        /* (key blocks + 1, centres, LEVELS) */
    Centres centres;
    uint8_t *faulty;   /* (key blocks) whether a value (or where there is a bound, a key) is not finite */
    int known;         /* whether there is a bound at all; without it nothing is skipped */
} Bound;

INLINE int64_t key_blocks(const Call *c) { return blocks_of(c->k_len, KEYS); }

/* How far a computed norm or product of `dim` terms can be off, relative to the norms. */
INLINE real rounding(int64_t dim) { return (real)((dim + 8) * 2.4e-7); }

static real squared_distance(const real *x, const real *y, int padded) {
    vec even = {0}, odd = {0};
    for (int t = 0; t < padded; t += 2 * LANES) {
        const vec first = load(x + t) - load(y + t), second = load(x + t + LANES) - load(y + t + LANES);
        even += first * first;
        odd += second * second;
    }
    return sum_lanes(even + odd);
}

static void find_levels(const Call *c, int64_t batch, int64_t head, Bound *bound, real *scratch, const real *origin) {
    real lowest = INFINITY, highest = 0;
    const int padded = padded_dim(c);
    for (int64_t start = 0; start < c->q_len; start += KEYS) {
        const real *q = read_rows(c, &c->q, batch, head, start, KEYS, c->q_len, scratch);
        for (int i = 0; i < smaller_of(KEYS, c->q_len - start); i++) {
            const real square = squared_distance(q + i * padded, origin, padded);
            if (!isfinite(square)) continue; /* such a row will find no level and skip nothing */
            if (square < lowest) lowest = square;
            if (square > highest) highest = square;
        }
    }
    const real top = (real)sqrt(highest) * (1 + 3 * rounding(c->dim));
    bound->lowest = lowest <= highest ? (real)sqrt(lowest) : top;
    bound->step = (top - bound->lowest) / (LEVELS - 1);
}

/* 0 where a value is finite, NaN where one is not. */
static real fault_of(const real *row, int padded) {
    vec zero = {0};
    for (int t = 0; t < padded; t += LANES) zero += load(row + t) * 0;
    return sum_lanes(zero);
}

/* What the clock shows at a boundary between blocks of keys; there is no key behind the last one. */
INLINE double clock_at(const Call *c, const Bound *bound, int64_t block) {
    return bound->clock[smaller_of(block * KEYS, c->k_len - 1)];
}

/* Nats that a head loses over a block of keys, on average. */
static double typical_fall(const Call *c, int64_t batch, int64_t head) {
    const double *clock = head_bias(c, batch, head).clock;
    return KEYS * (clock ? (clock[0] - clock[c->k_len - 1]) / (double)c->k_len : c->slopes[head]);
}

/* How far the bias goes up and down in all: sums of it are rounded at this size. */
static double whole_way(const Call *c, const Bound *bound) {
    if (!bound->clock) return fabs((double)bound->slope) * (double)c->k_len;
    double way = 0;
    for (int64_t t = 1; t < c->k_len; t++) way += fabs(bound->clock[t] - bound->clock[t - 1]);
    return way;
}

/* Whether a table falls so far over half of the keys that the bound is worth finding: no question of soundness. */
static int falls_enough(const Call *c, const real *ceiling) {
    return ceiling[c->k_len / 2] + log((double)c->k_len) <= ceiling[0] + log(c->tolerance);
}

/* What the bound knows of one block's keys: the nearest centre, the bias of a query that stands on the boundary behind
 * the block, and with it the exponent at each level; and the bias from that boundary to the one before. */
typedef struct {
    int nearest[KEYS];
    real bias[KEYS], across;
    real exponents[KEYS * LEVELS];
} BlockKeys;

static void bias_of_block(const Call *c, const Bound *bound, int64_t block, BlockKeys *keys) {
    if (!bound->clock) {
        for (int j = 0; j < KEYS; j++) keys->bias[j] = -bound->slope * (real)(KEYS - j);
        keys->across = -bound->slope * KEYS;
        return;
    }
    const double behind = clock_at(c, bound, block + 1);
    for (int j = 0; j < KEYS; j++)
        keys->bias[j] = (real)(behind - bound->clock[smaller_of(block * KEYS + j, c->k_len - 1)]);
    keys->across = (real)(behind - clock_at(c, bound, block));
}

/* Returns 0, or NaN when a key's norm is not finite. */
static real place_keys(const Call *c, Bound *bound, const real *k, BlockKeys *keys, real *scratch) {
    static const int starts[] = {0, PANEL, KEYS - PANEL}; /* panels that cover a block; the last two overlap */
    const int padded = padded_dim(c);
    const real error = rounding(c->dim), scale = (real)c->scale;
    for (int p = 0; p < 3; p++) {
        to_panel(k + starts[p] * padded, padded, scratch);
        nearest_centres(&bound->centres, scratch, padded, scratch + padded * PANEL, keys->nearest + starts[p]);
    }
    real fault = 0;
    for (int j = 0; j < KEYS; j++) {
        const real *centre = bound->centres.rows + keys->nearest[j] * padded;
        const real from_origin = (real)sqrt(2 * bound->centres.halves[keys->nearest[j]]);
        const real offset = 2 * error * from_origin; /* rounding of q.c */
        const real distance = (real)sqrt(squared_distance(k + j * padded, centre, padded));
        const real reach = (distance * (1 + error) + offset) * scale;
        fault += reach * 0;
        const real size = (from_origin + distance) * scale;
        if (size > bound->largest && isfinite(size)) bound->largest = size;
        for (int level = 0; level < LEVELS; level++)
            keys->exponents[j * LEVELS + level] = (bound->lowest + level * bound->step) * reach + keys->bias[j];
    }
    return fault;
}

/* tail(B + KEYS) from tail(B): all change by the bias of KEYS tokens, and the block's own keys come in. Each step is
 * rounded up by more than it can be off, so that the bound stays one over any number of blocks. */
static void advance_tail(const Bound *bound, const BlockKeys *keys, const real *before, real *after) {
    const int count = bound->centres.count;
    for (int level = 0; level < LEVELS; level += LANES) {
        vec top[MOST_CENTRES], sum[MOST_CENTRES];
        uint8_t gains[MOST_CENTRES] = {0};
        for (int n = 0; n < count; n++) {
            const vec old = load(before + n * LEVELS + level);
            const vec size = larger(old, -old);
            top[n] = old + keys->across + (size + 4) * (real)2.4e-7;
            store(after + n * LEVELS + level, top[n]);
        }
        for (int j = 0; j < KEYS; j++) {
            const int n = keys->nearest[j];
            top[n] = larger(load(keys->exponents + j * LEVELS + level), top[n]);
        }
        for (int j = 0; j < KEYS; j++) {
            const int n = keys->nearest[j];
            if (!gains[n]) sum[n] = exp_below_zero(load(after + n * LEVELS + level) - top[n]);
            sum[n] += exp_below_zero(load(keys->exponents + j * LEVELS + level) - top[n]);
            gains[n] = 1;
        }
        for (int n = 0; n < count; n++)
            for (int w = 0; gains[n] && w < LANES; w++)
                after[n * LEVELS + level + w] = top[n][w] + (real)log(sum[n][w]);
    }
}

/* Reals of scratch that `build_bound` needs: keys and values of a block, a row, and whichever needs more of finding the
 * centres and finding the nearest one. */
INLINE size_t bound_scratch(const Call *c) {
    const size_t padded = padded_dim(c), nearest = (padded + most_centres(c)) * PANEL;
    return (2 * KEYS + 1) * padded + larger_of(centres_scratch(c), nearest);
}

/* Everything a head's queries need to know about its keys. */
static void build_bound(const Call *c, int64_t batch, int64_t head, Bound *bound, real *scratch) {
    const int padded = padded_dim(c);
    const int64_t kv = kv_head(c, head), blocks = key_blocks(c);
    real *k_rows = scratch, *v_rows = k_rows + KEYS * padded, *origin = v_rows + KEYS * padded;
    real *rest = origin + padded;
    memset(origin, 0, padded * sizeof(real));
    bound->slope = (real)c->slopes[head];
    bound->clock = head_bias(c, batch, head).clock;
    bound->ceiling = c->ceiling ? c->ceiling + head * c->k_len : NULL;
    bound->known = c->tolerance > 0 && blocks >= WORTH_IT && (!c->ceiling || falls_enough(c, bound->ceiling));
    bound->centres.count = 0;
    bound->largest = 0;
    if (bound->known) {
        find_centres(c, batch, head, typical_fall(c, batch, head), &bound->centres, rest);
        find_levels(c, batch, head, bound, k_rows, origin);
    }
    const int64_t size = bound->centres.count * LEVELS;
    for (int64_t i = 0; i < size; i++) bound->tail[i] = (real)-1e30;
    int whole = 1;
    BlockKeys keys;
    for (int64_t block = 0; block < blocks; block++) {
        const real *v = read_rows(c, &c->v, batch, kv, block * KEYS, KEYS, c->k_len, v_rows);
        real *before = bound->tail + block * size, *after = before + size, fault = 0;
        for (int j = 0; j < KEYS; j++) fault += fault_of(v + j * padded, padded);
        if (bound->known) {
            const real *k = read_rows(c, &c->k, batch, kv, block * KEYS, KEYS, c->k_len, k_rows);
            bias_of_block(c, bound, block, &keys);
            fault += place_keys(c, bound, k, &keys, rest);
            advance_tail(bound, &keys, before, after);
        }
        bound->faulty[block] = !(fault == 0);
        whole &= fault == 0;
        for (int64_t i = 0; !whole && i < size; i++) after[i] = INFINITY;
    }
    /* Sums of a few scores and falls are rounded at the size of the largest of them. */
    const real norm = bound->known ? bound->lowest + (LEVELS - 1) * bound->step : 0;
    bound->slack = (real)(0.01 + 2.4e-6 * (norm * bound->largest + whole_way(c, bound)));
}

/* Where the norms of some queries lie between the tabulated ones. */
typedef struct {
    ivec level;
    vec share; /* of the way to the next level; NaN for a norm that is not finite */
} Levels;

static Levels levels_of(const Bound *bound, vec norm) {
    Levels found = {{0}, {0}};
    for (int w = 0; w < LANES; w++) {
        const real at = bound->step > 0 ? (norm[w] - bound->lowest) / bound->step : LEVELS - 1;
        const int level = at >= LEVELS - 2 ? LEVELS - 2 : at > 0 ? (int)at : 0;
        found.level[w] = level;
        found.share[w] = (at - level > 0 ? at - level : 0) + norm[w] * 0;
    }
    return found;
}

/* A tail for queries of these norms: the chord between two levels, which lies above the convex curve. */
INLINE vec tail_at(const real *tail, const Levels *at) {
    const vec low = pick_of_eight(tail, at->level), high = pick_of_eight(tail, at->level + 1);
    return low + at->share * (high - low);
}

#endif
