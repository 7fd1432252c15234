/* How much softmax mass the keys before a block boundary can carry at most, for every boundary, in O(length * dim).
 *
 * For a query q at position i, with any vector c (the mean key serves best), every score is
 *
 *     q.k_j - m(i - j)  =  q.c + q.(k_j - c) - m(i - j)  <=  q.c + |q| |k_j - c| - m(i - j)          (Cauchy-Schwarz)
 *
 * so all keys before boundary B together weigh at most  exp( q.c - m(i - B) + tail(B, |q|) )  with
 *
 *     tail(B, Q) = log sum_{j < B} exp( Q |k_j - c| - m(B - j) )
 *
 * (1/sqrt(d) left out here). This sum over the real norms holds for any slope, and one huge key counts
 * only at its own distance. `tail` obeys a recursion over blocks and is convex in Q, so a chord between two tabulated
 * norms lies above it: LEVELS norms between the smallest and the largest query norm are enough for all queries.
 * A key or value that is not finite makes every later tail infinite: rows that see it never skip it.
 */
#ifndef TRAINSHORT_BOUND_H
#define TRAINSHORT_BOUND_H

#include "call.h"

enum {
    LEVELS = 8,
    WORTH_IT = 3, /* blocks of keys from which on a bound can save more than it costs */
};

typedef struct {
    real lowest, step; /* the tabulated query norms are lowest + level * step */
    real slope;
    real slack;        /* covers the rounding of the bound itself, so that it stays a bound */
    real *tail;        /* (key blocks + 1, LEVELS) */
    real *centre;      /* (padded_dim) */
    uint8_t *faulty;   /* (key blocks) whether a value (or where there is a bound, a key) is not finite */
    int known;         /* whether there is a bound at all; without it nothing is skipped */
} Bound;

INLINE int64_t key_blocks(const Call *c) { return blocks_of(c->k_len, KEYS); }

/* How far a computed norm or product of `dim` terms can be off, relative to the norms. */
INLINE real rounding(int64_t dim) { return (real)((dim + 8) * 2.4e-7); }

INLINE real sum_lanes(vec x) {
    real sum = 0;
    for (int w = 0; w < LANES; w++) sum += x[w];
    return sum;
}

static real squared_distance(const real *x, const real *y, int padded) {
    vec even = {0}, odd = {0};
    for (int t = 0; t < padded; t += 2 * LANES) {
        const vec first = load(x + t) - load(y + t), second = load(x + t + LANES) - load(y + t + LANES);
        even += first * first;
        odd += second * second;
    }
    return sum_lanes(even + odd);
}

static void find_centre(const Call *c, int64_t batch, int64_t head, Bound *bound, real *scratch) {
    const int padded = padded_dim(c);
    memset(bound->centre, 0, padded * sizeof(real));
    for (int64_t start = 0; start < c->k_len; start += KEYS) {
        const real *k = read_rows(c, &c->k, batch, kv_head(c, head), start, KEYS, c->k_len, scratch);
        for (int j = 0; j < KEYS; j++)
            for (int t = 0; t < padded; t += LANES)
                store(bound->centre + t, load(bound->centre + t) + load(k + j * padded + t));
    }
    for (int t = 0; t < padded; t++) {
        bound->centre[t] /= c->k_len;
        if (!isfinite(bound->centre[t])) bound->centre[t] = 0; /* any centre is sound; a finite one spares other rows */
    }
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

/* Exponents of one block's keys at each level, as seen from the boundary behind it. Returns 0, or NaN when a key's norm
 * is not finite. */
static real block_exponents(const Call *c, const Bound *bound, const real *k, const real *origin, real *exponents) {
    const int padded = padded_dim(c);
    const real error = rounding(c->dim), scale = (real)c->scale;
    const real offset = 2 * error * (real)sqrt(squared_distance(bound->centre, origin, padded)); /* rounding of q.c */
    real fault = 0;
    for (int j = 0; j < KEYS; j++) {
        const real distance = (real)sqrt(squared_distance(k + j * padded, bound->centre, padded));
        const real reach = (distance * (1 + error) + offset) * scale;
        fault += reach * 0;
        for (int level = 0; level < LEVELS; level++)
            exponents[j * LEVELS + level] = (bound->lowest + level * bound->step) * reach - bound->slope * (KEYS - j);
    }
    return fault;
}

/* tail(B + KEYS) from tail(B): both shrink by the slope of KEYS tokens, and the block's own keys come in. */
static void advance_tail(const Bound *bound, const real *exponents, const real *before, real *after) {
    for (int level = 0; level < LEVELS; level += LANES) {
        const vec old = load(before + level) - bound->slope * KEYS;
        vec top = old, sum;
        for (int j = 0; j < KEYS; j++) top = larger(load(exponents + j * LEVELS + level), top);
        sum = exp_below_zero(old - top);
        for (int j = 0; j < KEYS; j++) sum += exp_below_zero(load(exponents + j * LEVELS + level) - top);
        for (int w = 0; w < LANES; w++) after[level + w] = top[w] + (real)log(sum[w]);
    }
}

/* Everything a head's queries need to know about its keys. `scratch` holds 2 KEYS rows, a row, and the exponents. */
static void build_bound(const Call *c, int64_t batch, int64_t head, Bound *bound, real *scratch) {
    const int padded = padded_dim(c);
    const int64_t kv = kv_head(c, head), blocks = key_blocks(c);
    real *k_rows = scratch, *v_rows = k_rows + KEYS * padded, *origin = v_rows + KEYS * padded;
    real *exponents = origin + padded;
    memset(origin, 0, padded * sizeof(real));
    memset(bound->centre, 0, padded * sizeof(real));
    bound->slope = (real)c->slopes[head];
    bound->slack = (real)(0.01 + fabs(bound->slope) * c->k_len * 2.4e-7);
    bound->known = c->tolerance > 0 && blocks >= WORTH_IT;
    if (bound->known) {
        find_centre(c, batch, head, bound, k_rows);
        find_levels(c, batch, head, bound, k_rows, origin);
        for (int level = 0; level < LEVELS; level++) bound->tail[level] = (real)-1e30;
    }
    int whole = 1;
    for (int64_t block = 0; block < blocks; block++) {
        const real *v = read_rows(c, &c->v, batch, kv, block * KEYS, KEYS, c->k_len, v_rows);
        real *before = bound->tail + block * LEVELS, *after = before + LEVELS, fault = 0;
        for (int j = 0; j < KEYS; j++) fault += fault_of(v + j * padded, padded);
        if (bound->known) {
            const real *k = read_rows(c, &c->k, batch, kv, block * KEYS, KEYS, c->k_len, k_rows);
            fault += block_exponents(c, bound, k, origin, exponents);
            advance_tail(bound, exponents, before, after);
        }
        bound->faulty[block] = !(fault == 0);
        whole &= fault == 0;
        for (int level = 0; !whole && level < LEVELS; level++) after[level] = INFINITY;
    }
}

/* The tail at a boundary for queries up to a norm: the chord between two levels, which lies above the convex curve. */
INLINE real tail_at(const Bound *bound, int64_t boundary, real norm) {
    const real *tail = bound->tail + boundary * LEVELS;
    if (!(bound->step > 0)) return tail[LEVELS - 1] + norm * 0;
    const real at = (norm - bound->lowest) / bound->step;
    const int level = at >= LEVELS - 2 ? LEVELS - 2 : at > 0 ? (int)at : 0;
    const real share = at - level > 0 ? at - level : 0;
    return tail[level] + share * (tail[level + 1] - tail[level]) + norm * 0; /* a norm that is not finite: NaN */
}

#endif
