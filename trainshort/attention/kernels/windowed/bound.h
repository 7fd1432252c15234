/* An upper bound on the softmax mass of all keys before a block boundary, for every query and every boundary.
 *
 * Every key k_j has a nearest key centroid c(j), one of a few dozen vectors. Every query q has a nearest query
 * centroid u. With r_j = k_j - c(j), the score of a query at position i is bounded by
 *
 *     q.k_j - m(i - j)  =  q.c(j) + u.r_j + (q - u).r_j - m(i - j)
 *                       <=  q.c(j) + u.r_j + |q - u| |r_j| - m(i - j)                                (Cauchy-Schwarz)
 *
 * The factor 1/sqrt(d) is left out in this comment. The sum of exp(score) over all keys before the boundary B is
 * therefore at most
 *
 *     sum over c of exp( q.c - m(i - B) + tail(B, c, u, |q - u|) )        with
 *
 *     tail(B, c, u, D) = log sum_{j < B, c(j) = c} exp( u.r_j + D |r_j| - m(B - j) )
 *
 * - The unknown part of a score, (q - u).r_j, is bounded by the product of two distances within clusters.
 * - The bound is valid for every slope m. A single key with a large norm counts only at its own distance.
 * - The tail at one boundary follows from the tail at the previous boundary, so the cost is O(length * dim).
 * - The tail is convex in D. Let D range from the smallest to the largest |q - u| of all queries. The straight line
 *   between the tails at both ends (the chord) lies above the tail. Two numbers for each B, c and u therefore serve
 *   all queries.
 *
 * With a cumulative log decay, m(i - j) becomes decay[j] - decay[i], and m(B - j) becomes decay[j] - decay[B]. The
 * values may rise and fall. Keys can be skipped where the values fall.
 *
 * A distance table has no recursion from one boundary to the next. Let M(t) be the largest value of the table at
 * distance t or farther. M(i - B + 1) takes the place of -m(i - B), and the tails are the tails for m = 0.
 *
 * A key or value that is infinite or NaN makes all later tails infinite, so no query that sees the key skips the key.
 */
#ifndef TRAINSHORT_BOUND_H
#define TRAINSHORT_BOUND_H

#include "centroids.h"

enum {
    /* The largest number of tails for one boundary and one key centroid: two for each query centroid. */
    MAX_CELLS = 2 * QUERY_CENTROIDS,
    /* With fewer blocks of keys, computing the bound takes longer than the attention of the skipped keys. */
    MIN_BLOCKS_FOR_BOUND = 3,
};

/* The bound of one head, for all its queries. */
typedef struct {
    int exists;                      /* without a bound, no key is skipped */
    int is_steep;                    /* the bias falls so fast that a window can end within the diagonal block */

    /* The bias. `slope` is used only if both pointers are NULL. */
    real slope;
    const double *cumulative_decay;
    const real *table_suffix_max;    /* M(t) above */

    /* The queries. */
    Centroids query_centroids;       /* u above */
    uint8_t *nearest_query_centroid; /* (queries) */
    real *query_distance;            /* (queries) |q - u|, rounded up; NaN if the query is not finite */
    real min_query_distance, max_query_distance;
    real max_query_norm;

    /* The keys. */
    Centroids key_centroids;         /* c above */
    uint8_t *nearest_key_centroid;   /* (key blocks * KEY_BLOCK) */
    real *key_distance;              /* (key blocks * KEY_BLOCK) |r_j| * scale, rounded up */
    real max_key_norm;               /* multiplied by scale */
    uint8_t *is_faulty;              /* (key blocks) whether a value is not finite; with a bound, also for keys */

    real *centroid_products;         /* (key centroids, query centroids) dot products */
    real *tails;                     /* (key blocks + 1, key centroids, cells) */
    real rounding_margin;            /* covers the rounding errors when the bound is evaluated */
} Bound;

INLINE int64_t key_block_count(const Call *c) { return blocks_of(c->k_len, KEY_BLOCK); }

/* The number of tails for one boundary and one key centroid. The first half holds the tails of all query centroids at
 * the smallest D, and the second half holds the tails at the largest D. */
INLINE int cell_count(const Bound *bound) { return 2 * bound->query_centroids.count; }

/* An upper bound on the relative rounding error of a norm or a dot product of `dim` terms. */
INLINE real relative_rounding_error(int64_t dim) { return (real)((dim + 8) * 2.4e-7); }

/* Return the squared distance of two vectors. */
static real squared_distance(const real *x, const real *y, int padded) {
    vec even = {0}, odd = {0};
    for (int t = 0; t < padded; t += 2 * LANES) {
        const vec first = load(x + t) - load(y + t), second = load(x + t + LANES) - load(y + t + LANES);
        even += first * first;
        odd += second * second;
    }
    return sum_lanes(even + odd);
}

/* Find the nearest query centroid of each query, the distances to the centroids, and the largest norm of a query. */
static void assign_queries(const Call *c, int64_t batch, int64_t head, Bound *bound, real *rows, real *scratch) {
    const int padded = padded_dim(c);
    real *tile = scratch;
    real *dots = tile + padded * QUERY_TILE;
    const Centroids *centroids = &bound->query_centroids;
    const int has_centroids = centroids->count == QUERY_CENTROIDS; /* otherwise all centroids are zeros */
    bound->min_query_distance = INFINITY;
    bound->max_query_distance = 0;
    memset(bound->nearest_query_centroid, 0, query_tile_count(c) * QUERY_TILE);
    for (int64_t start = 0; start < c->q_len; start += QUERY_TILE) {
        const real *q = read_rows(c, &c->q, batch, head, start, QUERY_TILE, c->q_len, rows);
        if (has_centroids) {
            transpose_to_tile(q, padded, tile);
            find_nearest_centroids(centroids, tile, padded, dots, bound->nearest_query_centroid + start);
        }
        for (int i = 0; i < QUERY_TILE; i++) {
            const int u = bound->nearest_query_centroid[start + i];
            const real square = squared_distance(q + i * padded, centroids->vectors + u * padded, padded);
            const real distance = (real)sqrt(square) * (1 + relative_rounding_error(c->dim));
            const real norm = distance + (real)sqrt(2 * centroids->half_squared_norms[u]);
            bound->query_distance[start + i] = distance;
            /* Queries that are not finite skip nothing, so they need no bound. */
            if (start + i >= c->q_len || !isfinite(norm)) continue;
            if (norm > bound->max_query_norm) bound->max_query_norm = norm;
            if (distance < bound->min_query_distance) bound->min_query_distance = distance;
            if (distance > bound->max_query_distance) bound->max_query_distance = distance;
        }
    }
    if (bound->min_query_distance > bound->max_query_distance) bound->min_query_distance = bound->max_query_distance;
}

/* Find the query centroids, assign the queries to them, and compute the dot products of key and query centroids.
 *
 * If the queries lie in clusters, the centroid 0 is replaced by zeros, for queries that lie in no cluster. Otherwise
 * all query centroids are zeros. `tile` receives the query centroids as [dim][centroid]. */
static void find_query_centroids(const Call *c, int64_t batch, int64_t head, Bound *bound, real *tile, real *rows,
                                 real *scratch) {
    const int padded = padded_dim(c);
    int are_clustered = 0;
    if (!bound->is_steep && max_query_centroids(c) == QUERY_CENTROIDS) {
        const HeadTokens queries = {&c->q, batch, head, c->q_len};
        const real cluster_spread = find_centroids(c, &queries, QUERY_CENTROIDS, &bound->query_centroids, scratch);
        are_clustered = cluster_spread < (real)MAX_CLUSTER_SPREAD;
    }
    const int count = are_clustered ? QUERY_CENTROIDS : ZERO_QUERY_CENTROIDS;
    const int zero_count = are_clustered ? 1 : count;
    bound->query_centroids.count = count;
    memset(bound->query_centroids.vectors, 0, zero_count * padded * sizeof(real));
    memset(bound->query_centroids.half_squared_norms, 0, zero_count * sizeof(real));
    assign_queries(c, batch, head, bound, rows, scratch);

    memset(tile, 0, padded * QUERY_TILE * sizeof(real));
    for (int u = 0; u < count; u++)
        for (int t = 0; t < padded; t++) tile[t * QUERY_TILE + u] = bound->query_centroids.vectors[u * padded + t];
    compute_dots(tile, bound->key_centroids.vectors, padded, padded, bound->key_centroids.count, scratch);
    for (int n = 0; n < bound->key_centroids.count; n++)
        memcpy(bound->centroid_products + n * count, scratch + n * QUERY_TILE, count * sizeof(real));
}

/* Return 0 if all values of a row are finite, and NaN otherwise. The product of 0 and infinity or NaN is NaN. */
static real nan_if_not_finite(const real *row, int padded) {
    vec zero = {0};
    for (int t = 0; t < padded; t += LANES) zero += load(row + t) * 0;
    return sum_lanes(zero);
}

/* Return the cumulative log decay at the start of a block of keys. After the last block, there is no such key, and the
 * value of the last key is returned. */
INLINE double decay_at_boundary(const Call *c, const Bound *bound, int64_t block) {
    return bound->cumulative_decay[smaller_of(block * KEY_BLOCK, c->k_len - 1)];
}

/* Return by how much the bias of a head falls over a block of keys, on average. */
static double mean_drop_per_block(const Call *c, int64_t batch, int64_t head) {
    const double *decay = bias_of_head(c, batch, head).cumulative_decay;
    if (!decay) return KEY_BLOCK * c->slopes[head];
    const double mean_drop_per_key = (decay[0] - decay[c->k_len - 1]) / (double)c->k_len;
    return KEY_BLOCK * mean_drop_per_key;
}

/* Return the sum of the absolute changes of the bias from each key to the next key. The rounding errors of the tails
 * are proportional to this sum. */
static double total_variation(const Call *c, const Bound *bound) {
    const double *decay = bound->cumulative_decay;
    if (!decay) return fabs((double)bound->slope) * (double)c->k_len;
    double variation = 0;
    for (int64_t t = 1; t < c->k_len; t++) variation += fabs(decay[t] - decay[t - 1]);
    return variation;
}

/* Return whether a table falls so far over half of the keys that the bound can save work.
 *
 * With equal dot products, k_len keys with the largest bias of the distant half would together have at most `tolerance`
 * times the weight of the key with the largest bias. */
static int falls_far_enough(const Call *c, const real *table_suffix_max) {
    const real largest_bias = table_suffix_max[0];
    const real largest_distant_bias = table_suffix_max[c->k_len / 2];
    return largest_distant_bias + log((double)c->k_len) <= largest_bias + log(c->tolerance);
}

/* The keys of one block, seen from the boundary B after the block. */
typedef struct {
    const uint8_t *nearest_centroid;
    real bias[KEY_BLOCK];                    /* -m(B - j) of each key */
    real bias_across;                        /* the bias from B to the boundary before the block */
    real exponents[KEY_BLOCK * MAX_CELLS];   /* the exponent of each key in each cell of its centroid's tail */
} BlockKeys;

/* Fill in the biases of a block of keys: the bias of each key seen from the end of the block, and the bias across the
 * block. */
static void compute_block_bias(const Call *c, const Bound *bound, int64_t block, BlockKeys *keys) {
    if (!bound->cumulative_decay) {
        for (int j = 0; j < KEY_BLOCK; j++) keys->bias[j] = -bound->slope * (real)(KEY_BLOCK - j);
        keys->bias_across = -bound->slope * KEY_BLOCK;
        return;
    }
    const double at_end = decay_at_boundary(c, bound, block + 1);
    for (int j = 0; j < KEY_BLOCK; j++) {
        const int64_t key = smaller_of(block * KEY_BLOCK + j, c->k_len - 1);
        keys->bias[j] = (real)(at_end - bound->cumulative_decay[key]);
    }
    keys->bias_across = (real)(at_end - decay_at_boundary(c, bound, block));
}

/* Compute the distance of a key to its centroid, and the exponents of the key in the tails of its centroid.
 *
 * `dots` are the dot products of the key with the query centroids. The distance and the exponents are increased by the
 * largest possible rounding error of q.c, u.k_j and u.c. Returns 0, or NaN if a number is not finite. */
static real assign_key(const Call *c, Bound *bound, int64_t key, const real *k, real bias, const real *dots,
                       real *exponents) {
    const int padded = padded_dim(c);
    const int n = bound->nearest_key_centroid[key];
    const int count = bound->query_centroids.count;
    const real error = relative_rounding_error(c->dim);
    const real scale = (real)c->scale;
    const real centroid_norm = (real)sqrt(2 * bound->key_centroids.half_squared_norms[n]);
    const real square = squared_distance(k, bound->key_centroids.vectors + n * padded, padded);
    const real distance = (real)sqrt(square) * (1 + error);
    /* |u| and |q| are at most max_query_norm. */
    const real product_error = error * bound->max_query_norm * (3 * centroid_norm + distance) * scale;
    const real scaled_distance = (distance + 2 * error * centroid_norm) * scale;
    const real scaled_norm = (centroid_norm + distance) * scale;
    bound->key_distance[key] = scaled_distance;
    if (scaled_norm > bound->max_key_norm && isfinite(scaled_norm)) bound->max_key_norm = scaled_norm;
    real fault = scaled_distance * 0; /* 0, or NaN if the distance is infinite or NaN */
    for (int u = 0; u < count; u++) {
        const real product = (dots[u] - bound->centroid_products[n * count + u]) * scale; /* u.r_j */
        const real exponent = product + (bias + product_error);
        /* The first half of the cells is for the smallest D, and the second half is for the largest D. */
        exponents[u] = exponent + bound->min_query_distance * scaled_distance;
        exponents[count + u] = exponent + bound->max_query_distance * scaled_distance;
        fault += exponent * 0;
    }
    return fault;
}

/* Find the nearest centroid of each key of a block, and compute all exponents.
 *
 * `query_centroid_tile` holds the query centroids as [dim][centroid]. Returns 0, or NaN if a key is not finite. */
static real assign_keys(const Call *c, Bound *bound, int64_t block, const real *k, const real *query_centroid_tile,
                        BlockKeys *keys, real *scratch) {
    /* Three tiles cover the 64 keys of a block. The last two tiles overlap. */
    static const int tile_starts[] = {0, QUERY_TILE, KEY_BLOCK - QUERY_TILE};
    const int padded = padded_dim(c);
    const int cells = cell_count(bound);
    real *tile = scratch;
    real *dots = tile + padded * QUERY_TILE;
    uint8_t *nearest_centroid = bound->nearest_key_centroid + block * KEY_BLOCK;
    keys->nearest_centroid = nearest_centroid;
    for (int p = 0; p < 3; p++) {
        transpose_to_tile(k + tile_starts[p] * padded, padded, tile);
        find_nearest_centroids(&bound->key_centroids, tile, padded, dots, nearest_centroid + tile_starts[p]);
    }
    /* Without query centroids, all query centroids are zeros, and so are the dot products. */
    if (bound->query_centroids.count == QUERY_CENTROIDS)
        compute_dots(query_centroid_tile, k, padded, padded, KEY_BLOCK, dots);
    else
        memset(dots, 0, KEY_BLOCK * QUERY_TILE * sizeof(real));
    real fault = 0;
    for (int j = 0; j < KEY_BLOCK; j++)
        fault += assign_key(c, bound, block * KEY_BLOCK + j, k + j * padded, keys->bias[j], dots + j * QUERY_TILE,
                            keys->exponents + j * cells);
    return fault;
}

/* Compute the tails at the boundary after a block from the tails at the boundary before the block.
 *
 * A tail is the logarithm of a sum of exponentials over the keys before a boundary. See the top of this
 * file. All tails change by the bias across the block, and the keys of the block are added. Each step is rounded up by
 * more than its rounding error, so that the tails are upper bounds after any number of blocks. */
static void advance_tails(const Bound *bound, const BlockKeys *keys, const real *before, real *after) {
    const int count = bound->key_centroids.count;
    const int cells = cell_count(bound);
    for (int cell = 0; cell < cells; cell += LANES) {
        vec top[MAX_CENTROIDS], sum[MAX_CENTROIDS]; /* the largest exponent, and the sum of exp(exponent - top) */
        uint8_t has_keys[MAX_CENTROIDS] = {0};
        for (int n = 0; n < count; n++) {
            const vec old = load(before + n * cells + cell);
            const vec magnitude = larger(old, -old);
            /* The last term is larger than the rounding errors of this step. 2.4e-7 is two machine epsilons. */
            top[n] = old + keys->bias_across + (magnitude + 32) * (real)2.4e-7;
            store(after + n * cells + cell, top[n]);
        }
        for (int j = 0; j < KEY_BLOCK; j++) {
            const int n = keys->nearest_centroid[j];
            top[n] = larger(load(keys->exponents + j * cells + cell), top[n]);
        }
        for (int j = 0; j < KEY_BLOCK; j++) {
            const int n = keys->nearest_centroid[j];
            /* The sum of a centroid starts with the earlier keys, whose tail was stored in `after` above. */
            if (!has_keys[n]) sum[n] = exp_below_zero(load(after + n * cells + cell) - top[n]);
            sum[n] += exp_below_zero(load(keys->exponents + j * cells + cell) - top[n]);
            has_keys[n] = 1;
        }
        for (int n = 0; n < count; n++)
            if (has_keys[n]) store(after + n * cells + cell, top[n] + log_above_zero(sum[n]));
    }
}

/* The scratch memory of `build_bound`, in numbers of the type `real`.
 *
 * The memory holds the keys and values of a block, and a tile of query centroids. The functions `find_centroids` and
 * `assign_keys` share the remaining memory, because they do not run at the same time. */
INLINE size_t bound_scratch_size(const Call *c) {
    const size_t padded = padded_dim(c);
    const size_t assign_keys_size = (padded + larger_of(key_centroid_count(c), KEY_BLOCK)) * QUERY_TILE;
    const size_t shared_size = larger_of(centroid_scratch_size(c), assign_keys_size);
    return (2 * KEY_BLOCK + QUERY_TILE) * padded + shared_size;
}

/* Compute the bound of one head: find the centroids, and compute the tails at all block boundaries. */
static void build_bound(const Call *c, int64_t batch, int64_t head, Bound *bound, real *scratch) {
    const int padded = padded_dim(c);
    const int64_t kv = kv_head_of(c, head);
    const int64_t blocks = key_block_count(c);

    /* Divide the scratch memory. */
    real *k_rows = scratch;
    real *v_rows = k_rows + KEY_BLOCK * padded;
    real *query_centroid_tile = v_rows + KEY_BLOCK * padded;
    real *shared_scratch = query_centroid_tile + QUERY_TILE * padded;

    bound->slope = (real)c->slopes[head];
    bound->cumulative_decay = bias_of_head(c, batch, head).cumulative_decay;
    bound->table_suffix_max = c->table_suffix_max ? c->table_suffix_max + head * c->k_len : NULL;
    bound->exists = c->tolerance > 0 && blocks >= MIN_BLOCKS_FOR_BOUND &&
                    (!c->table_suffix_max || falls_far_enough(c, bound->table_suffix_max));
    bound->key_centroids.count = 0;
    bound->query_centroids.count = 0;
    bound->max_key_norm = 0;
    bound->max_query_norm = 0;
    if (bound->exists) {
        const HeadTokens key_tokens = {&c->k, batch, kv, c->k_len};
        bound->is_steep = mean_drop_per_block(c, batch, head) > STEEP_BIAS_DROP;
        int count = key_centroid_count(c);
        if (bound->is_steep) count = (int)smaller_of(STEEP_CENTROIDS, count);
        find_centroids(c, &key_tokens, count, &bound->key_centroids, shared_scratch);
        find_query_centroids(c, batch, head, bound, query_centroid_tile, k_rows, shared_scratch);
    }

    /* Before the first key, all sums are empty. -1e30 stands for log(0). */
    const int64_t size = bound->key_centroids.count * cell_count(bound);
    for (int64_t i = 0; i < size; i++) bound->tails[i] = (real)-1e30;

    int all_finite = 1; /* whether all keys and values so far are finite */
    BlockKeys keys;
    for (int64_t block = 0; block < blocks; block++) {
        const real *v = read_rows(c, &c->v, batch, kv, block * KEY_BLOCK, KEY_BLOCK, c->k_len, v_rows);
        real *before = bound->tails + block * size; /* the tails at the boundary before the block */
        real *after = before + size;                /* the tails at the boundary after the block */
        real fault = 0;                             /* NaN if a key or value of the block is not finite */
        for (int j = 0; j < KEY_BLOCK; j++) fault += nan_if_not_finite(v + j * padded, padded);
        if (bound->exists) {
            const real *k = read_rows(c, &c->k, batch, kv, block * KEY_BLOCK, KEY_BLOCK, c->k_len, k_rows);
            compute_block_bias(c, bound, block, &keys);
            fault += assign_keys(c, bound, block, k, query_centroid_tile, &keys,
                                 shared_scratch);
            advance_tails(bound, &keys, before, after);
        }
        const int is_finite = fault == 0;
        bound->is_faulty[block] = !is_finite;
        all_finite &= is_finite;
        /* With infinite tails, no query that sees the faulty key skips keys. */
        for (int64_t i = 0; !all_finite && i < size; i++) after[i] = INFINITY;
    }

    /* The sums of a few scores and biases have rounding errors that are proportional to the largest score and bias.
     * 2.4e-6 is twenty times the machine epsilon of a float. 0.01 is a margin for small scores and biases. */
    const real max_score = bound->max_query_norm * bound->max_key_norm;
    bound->rounding_margin = (real)(0.01 + 2.4e-6 * (max_score + total_variation(c, bound)));
}

/* The nearest query centroid of LANES queries, and the distance D = |q - u| as a fraction between the smallest
 * distance (0) and the largest distance (1). The fraction is NaN for queries that are not finite. */
typedef struct {
    ivec nearest_centroid;
    vec fraction;
} QueryPlacement;

/* Return the placement of LANES queries from the row `row` of the call on. */
static QueryPlacement load_placement(const Bound *bound, int64_t row) {
    const real *distance = bound->query_distance + row;
    QueryPlacement placement;
    const real range = bound->max_query_distance - bound->min_query_distance;
    for (int w = 0; w < LANES; w++) {
        const real fraction = range > 0 ? (distance[w] - bound->min_query_distance) / range : 1;
        const real clamped_fraction = fraction > 0 ? fraction : 0;
        /* Outside of the range, the chord is no upper bound. The condition is also true for NaN. */
        const int is_outside = !(distance[w] <= bound->max_query_distance);
        placement.nearest_centroid[w] = bound->nearest_query_centroid[row + w];
        placement.fraction[w] = is_outside ? NAN : clamped_fraction;
    }
    return placement;
}

/* Return an upper bound on the tail of a key centroid for LANES queries: the value of the chord between the tails at
 * the smallest and at the largest distance. `tails` are the cells of the key centroid. */
INLINE vec interpolate_tail(const Bound *bound, const real *tails, const QueryPlacement *placement) {
    vec low, high;
    if (bound->query_centroids.count == QUERY_CENTROIDS) {
        low = pick_of_sixteen(tails, placement->nearest_centroid);
        high = pick_of_sixteen(tails + QUERY_CENTROIDS, placement->nearest_centroid);
    } else {
        low = pick_of_eight(tails, placement->nearest_centroid);
        high = pick_of_eight(tails, placement->nearest_centroid + ZERO_QUERY_CENTROIDS);
    }
    return low + placement->fraction * (high - low);
}

#endif
