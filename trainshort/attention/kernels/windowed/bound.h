/* How much softmax mass the keys before a block boundary can carry at most, for every boundary, in O(length * dim).
 *
 * Every key k_j has a nearest centre c(j), one of a few dozen vectors, and every query q a nearest one u of its own. With
 * r_j = k_j - c(j), for a query at position i every score is
 *
 *     q.k_j - m(i - j)  =  q.c(j) + u.r_j + (q - u).r_j - m(i - j)
 *                       <=  q.c(j) + u.r_j + |q - u| |r_j| - m(i - j)                                (Cauchy-Schwarz)
 *
 * so the keys before boundary B together weigh at most  sum over c of exp( q.c - m(i - B) + tail(B, c, u, |q - u|) )  with
 *
 *     tail(B, c, u, D) = log sum_{j < B, c(j) = c} exp( u.r_j + D |r_j| - m(B - j) )
 *
 * (1/sqrt(d) left out here). What is not known of a score is the product of two clusters' sizes. This sum over the real
 * norms holds for any slope, and one huge key counts only at its own distance. `tail` obeys a recursion over blocks and is
 * convex in D, so the chord between its values at the smallest and at the largest D of all queries lies above it: two
 * numbers a boundary, key centre and query centre serve every query.
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

#include "centroids.h"

enum {
    MOST_CELLS = 2 * QUERY_CENTRES,
    WORTH_IT = 3, /* blocks of keys from which on a bound can save more than it costs */
};

typedef struct {
    real nearest_query, furthest_query; /* the smallest and the largest distance of a query from its centre */
    real longest;      /* of the query norms */
    real slope;
    const double *clock; /* in place of the slope, or NULL */
    const real *ceiling; /* likewise, of a table */
    real slack;        /* covers the rounding of the bound itself, so that it stays a bound */
    real largest;      /* of the key norms, times scale */
    real *tail;        /* (key blocks + 1, centres, cells) */
    Centres centres;   /* of the keys */
    Centres queries;
    real *products;    /* (centres, query centres) of the two */
    uint8_t *own;      /* (queries) each query's nearest centre */
    real *apart;       /* (queries) and its distance from it, rounded up; NaN where it is not finite */
    uint8_t *nearest;  /* (key blocks * KEYS) each key's nearest centre */
    real *reach;       /* (key blocks * KEYS) and its distance from it, times scale, rounded up */
    uint8_t *faulty;   /* (key blocks) whether a value (or where there is a bound, a key) is not finite */
    int steep;         /* whether the window is so short that parts of a block count */
    int known;         /* whether there is a bound at all; without it nothing is skipped */
} Bound;

INLINE int64_t key_blocks(const Call *c) { return blocks_of(c->k_len, KEYS); }

/* Tails of one boundary and one centre of the keys: for each centre of the queries at the smallest D, then at the largest. */
INLINE int cells_of(const Bound *bound) { return 2 * bound->queries.count; }

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

/* Each query's nearest centre and its distance from it; the smallest and the largest of these, and the longest query. */
static void place_queries(const Call *c, int64_t batch, int64_t head, Bound *bound, real *rows, real *scratch) {
    const int padded = padded_dim(c);
    real *panel = scratch, *dots = panel + padded * PANEL;
    const int clustered = bound->queries.count == QUERY_CENTRES;
    bound->nearest_query = INFINITY, bound->furthest_query = 0;
    memset(bound->own, 0, panels_of(c) * PANEL);
    for (int64_t start = 0; start < c->q_len; start += PANEL) {
        const real *q = read_rows(c, &c->q, batch, head, start, PANEL, c->q_len, rows);
        if (clustered) {
            to_panel(q, padded, panel);
            nearest_centres(&bound->queries, panel, padded, dots, bound->own + start);
        }
        for (int i = 0; i < PANEL; i++) {
            const int u = bound->own[start + i];
            const real square = squared_distance(q + i * padded, bound->queries.rows + u * padded, padded);
            const real apart = (real)sqrt(square) * (1 + rounding(c->dim)), norm = apart + (real)sqrt(2 * bound->queries.halves[u]);
            bound->apart[start + i] = apart;
            if (start + i >= c->q_len || !isfinite(norm)) continue; /* a row that is not finite skips nothing */
            if (norm > bound->longest) bound->longest = norm;
            if (apart < bound->nearest_query) bound->nearest_query = apart;
            if (apart > bound->furthest_query) bound->furthest_query = apart;
        }
    }
    if (bound->nearest_query > bound->furthest_query) bound->nearest_query = bound->furthest_query;
}

/* Centres of the queries where these lie in clusters, side by side in a panel too; the first one is zero, the nearest of
 * queries in no clusters. Elsewhere there are zeros only. */
static void find_queries(const Call *c, int64_t batch, int64_t head, Bound *bound, real *panel, real *rows, real *scratch) {
    const int padded = padded_dim(c), most = most_query_centres(c);
    const Crowd crowd = {&c->q, batch, head, c->q_len};
    const int clustered =
        !bound->steep && most == QUERY_CENTRES && find_centres(c, &crowd, most, &bound->queries, scratch) < (real)CLUSTERED;
    const int count = clustered ? most : NO_QUERY_CENTRES, zeros = clustered ? 1 : count;
    bound->queries.count = count;
    memset(bound->queries.rows, 0, zeros * padded * sizeof(real));
    memset(bound->queries.halves, 0, zeros * sizeof(real));
    place_queries(c, batch, head, bound, rows, scratch);
    memset(panel, 0, padded * PANEL * sizeof(real));
    for (int u = 0; u < count; u++)
        for (int t = 0; t < padded; t++) panel[t * PANEL + u] = bound->queries.rows[u * padded + t];
    panel_dots(panel, bound->centres.rows, padded, padded, bound->centres.count, scratch);
    for (int n = 0; n < bound->centres.count; n++)
        memcpy(bound->products + n * count, scratch + n * PANEL, count * sizeof(real));
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

/* One block's keys as seen from the boundary behind it: the bias of a query that stands there, and with it the exponents
 * of each tail; and the bias from that boundary to the one before. */
typedef struct {
    const uint8_t *nearest;
    real bias[KEYS], across;
    real exponents[KEYS * MOST_CELLS];
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

/* Notes a key's distance from its centre, and its exponent in each of that centre's tails. `dots` are its products with the
 * queries' centres. Every product is rounded, by no more than `error` of the norms: q.c, u.k_j and u.c in a score, with |u|
 * and |q| at most `longest`. Returns 0, or NaN when something is not finite. */
static real place_key(const Call *c, Bound *bound, int64_t key, const real *k, real bias, const real *dots,
                      real *exponents) {
    const int padded = padded_dim(c), n = bound->nearest[key], count = bound->queries.count;
    const real error = rounding(c->dim), scale = (real)c->scale;
    const real from_origin = (real)sqrt(2 * bound->centres.halves[n]);
    const real distance = (real)sqrt(squared_distance(k, bound->centres.rows + n * padded, padded)) * (1 + error);
    const real doubt = error * bound->longest * (3 * from_origin + distance) * scale;
    const real reach = (distance + 2 * error * from_origin) * scale, size = (from_origin + distance) * scale;
    bound->reach[key] = reach;
    if (size > bound->largest && isfinite(size)) bound->largest = size;
    real fault = reach * 0;
    for (int u = 0; u < count; u++) {
        const real inner = (dots[u] - bound->products[n * count + u]) * scale + (bias + doubt);
        exponents[u] = inner + bound->nearest_query * reach;
        exponents[count + u] = inner + bound->furthest_query * reach;
        fault += inner * 0;
    }
    return fault;
}

/* `panel` holds the queries' centres. Returns 0, or NaN when something about the block's keys is not finite. */
static real place_keys(const Call *c, Bound *bound, int64_t block, const real *k, const real *panel, BlockKeys *keys,
                       real *scratch) {
    static const int starts[] = {0, PANEL, KEYS - PANEL}; /* panels that cover a block; the last two overlap */
    const int padded = padded_dim(c), cells = cells_of(bound);
    real *dots = scratch + padded * PANEL, fault = 0;
    keys->nearest = bound->nearest + block * KEYS;
    for (int p = 0; p < 3; p++) {
        to_panel(k + starts[p] * padded, padded, scratch);
        nearest_centres(&bound->centres, scratch, padded, dots, bound->nearest + block * KEYS + starts[p]);
    }
    if (bound->queries.count == QUERY_CENTRES)
        panel_dots(panel, k, padded, padded, KEYS, dots);
    else
        memset(dots, 0, KEYS * PANEL * sizeof(real));
    for (int j = 0; j < KEYS; j++)
        fault += place_key(c, bound, block * KEYS + j, k + j * padded, keys->bias[j], dots + j * PANEL,
                           keys->exponents + j * cells);
    return fault;
}

/* tail(B + KEYS) from tail(B): all change by the bias of KEYS tokens, and the block's own keys come in. Each step is
 * rounded up by more than it can be off, so that the bound stays one over any number of blocks. */
static void advance_tail(const Bound *bound, const BlockKeys *keys, const real *before, real *after) {
    const int count = bound->centres.count, cells = cells_of(bound);
    for (int cell = 0; cell < cells; cell += LANES) {
        vec top[MOST_CENTRES], sum[MOST_CENTRES];
        uint8_t gains[MOST_CENTRES] = {0};
        for (int n = 0; n < count; n++) {
            const vec old = load(before + n * cells + cell);
            const vec size = larger(old, -old);
            top[n] = old + keys->across + (size + 32) * (real)2.4e-7;
            store(after + n * cells + cell, top[n]);
        }
        for (int j = 0; j < KEYS; j++) {
            const int n = keys->nearest[j];
            top[n] = larger(load(keys->exponents + j * cells + cell), top[n]);
        }
        for (int j = 0; j < KEYS; j++) {
            const int n = keys->nearest[j];
            if (!gains[n]) sum[n] = exp_below_zero(load(after + n * cells + cell) - top[n]);
            sum[n] += exp_below_zero(load(keys->exponents + j * cells + cell) - top[n]);
            gains[n] = 1;
        }
        for (int n = 0; n < count; n++)
            if (gains[n]) store(after + n * cells + cell, top[n] + log_above_zero(sum[n]));
    }
}

/* Reals of scratch that `build_bound` needs: keys and values of a block, a panel of centres, and whichever needs more of
 * finding the centres and finding the nearest one. */
INLINE size_t bound_scratch(const Call *c) {
    const size_t padded = padded_dim(c), nearest = (padded + larger_of(most_centres(c), KEYS)) * PANEL;
    return (2 * KEYS + PANEL) * padded + larger_of(centres_scratch(c), nearest);
}

/* Everything a head's queries need to know about its keys. */
static void build_bound(const Call *c, int64_t batch, int64_t head, Bound *bound, real *scratch) {
    const int padded = padded_dim(c);
    const int64_t kv = kv_head(c, head), blocks = key_blocks(c);
    real *k_rows = scratch, *v_rows = k_rows + KEYS * padded, *panel = v_rows + KEYS * padded;
    real *rest = panel + PANEL * padded;
    bound->slope = (real)c->slopes[head];
    bound->clock = head_bias(c, batch, head).clock;
    bound->ceiling = c->table_suffix_max ? c->table_suffix_max + head * c->k_len : NULL;
    bound->known = c->tolerance > 0 && blocks >= WORTH_IT && (!c->table_suffix_max || falls_enough(c, bound->ceiling));
    bound->centres.count = bound->queries.count = 0;
    bound->largest = bound->longest = 0;
    if (bound->known) {
        const Crowd crowd = {&c->k, batch, kv, c->k_len};
        const int most = most_centres(c), few = (int)smaller_of(FEW_CENTRES, most);
        bound->steep = typical_fall(c, batch, head) > ENOUGH_FALL;
        find_centres(c, &crowd, bound->steep ? few : most, &bound->centres, rest);
        find_queries(c, batch, head, bound, panel, k_rows, rest);
    }
    const int64_t size = bound->centres.count * cells_of(bound);
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
            fault += place_keys(c, bound, block, k, panel, &keys, rest);
            advance_tail(bound, &keys, before, after);
        }
        bound->faulty[block] = !(fault == 0);
        whole &= fault == 0;
        for (int64_t i = 0; !whole && i < size; i++) after[i] = INFINITY;
    }
    /* Sums of a few scores and falls are rounded at the size of the largest of them. */
    bound->slack = (real)(0.01 + 2.4e-6 * (bound->longest * bound->largest + whole_way(c, bound)));
}

/* Where some queries lie among the bound's centres. */
typedef struct {
    ivec nearest;
    vec share; /* of the way from the smallest distance to the largest; NaN for one that is not finite */
} Places;

static Places places_of(const Bound *bound, int64_t row) {
    const real *apart = bound->apart + row;
    Places found;
    const real way = bound->furthest_query - bound->nearest_query;
    for (int w = 0; w < LANES; w++) {
        const real share = way > 0 ? (apart[w] - bound->nearest_query) / way : 1;
        const int outside = !(apart[w] <= bound->furthest_query); /* beyond its ends a chord is no bound */
        found.nearest[w] = bound->own[row + w];
        found.share[w] = outside ? NAN : share > 0 ? share : 0;
    }
    return found;
}

/* A centre's tail for these queries: the chord between two distances, which lies above the convex curve. */
INLINE vec tail_at(const Bound *bound, const real *tail, const Places *at) {
    vec low, high;
    if (bound->queries.count == QUERY_CENTRES) {
        low = pick_of_sixteen(tail, at->nearest), high = pick_of_sixteen(tail + QUERY_CENTRES, at->nearest);
    } else {
        low = pick_of_eight(tail, at->nearest), high = pick_of_eight(tail, at->nearest + NO_QUERY_CENTRES);
    }
    return low + at->share * (high - low);
}

#endif
