/* The three matrix products of attention.
 *
 * A query tile is a group of QUERY_TILE query rows that are processed together. The data of a tile is stored with the
 * queries side by side: [dim][query] or [key][query]. One vector therefore holds the same number of several queries,
 * so that the maximum, the sum and the bias of each query are plain vector arithmetic. Keys and values stay in their
 * memory layout [key][dim]. The three products are
 *
 *     scores[key][query]  = sum over dim     of  key[key][dim]        * query[dim][query]      compute_dots
 *     out[dim][query]    += sum over keys    of  value[key][dim]      * weights[key][query]    add_weighted_rows
 *     grad[key][dim]     += sum over queries of  weights[key][query]  * rows[query][dim]       add_key_gradients
 *
 * In each product, a scalar of the left factor is multiplied by a vector of the right factor. The running sums take 12
 * of the 16 registers of AVX2. The loops load the vectors first, and each scalar directly before it is used. With
 * another order, gcc stores some sums in memory and the code takes twice as long.
 */
#ifndef TRAINSHORT_MATMUL_H
#define TRAINSHORT_MATMUL_H

#include "simd.h"

enum {
    /* The number of query rows in a query tile. windowed_torch.py has the same constant. */
    QUERY_TILE = 24,
    /* The number of vectors that hold one number of each query in a tile. */
    TILE_VECTORS = QUERY_TILE / LANES,
    /* The number of keys in a block. The kernel reads keys block by block. */
    KEY_BLOCK = 64,
    /* The number of keys that a query tile reads or skips together. */
    KEY_GROUP = 4,
    /* A dot product is the sum of partial sums over this many dimensions. Shorter sums have smaller rounding errors. */
    DOT_CHUNK = 32,
    /* In scratch memory, rows are padded with zeros to a multiple of this many dimensions. */
    DIM_PADDING = 16,
};

/* Compute dots[key][query], the dot product of each key with each query of a tile.
 *
 * `queries` holds the tile as [dim][query]. The rows of `k` are `stride` numbers apart. The number of keys is rounded
 * up to a multiple of four, because each step computes four keys. */
static void compute_dots(const real *restrict queries, const real *restrict k, int64_t stride, int dim, int key_count,
                         real *restrict dots) {
    for (int j = 0; j < key_count; j += 4) {
        const real *k0 = k + j * stride, *k1 = k0 + stride, *k2 = k1 + stride, *k3 = k2 + stride;
        for (int begin = 0; begin < dim; begin += DOT_CHUNK) {
            const int end = begin + DOT_CHUNK < dim ? begin + DOT_CHUNK : dim;
            vec sum[4][TILE_VECTORS] = {{{0}}};
            for (int t = begin; t < end; t++) {
                vec query[TILE_VECTORS];
                for (int w = 0; w < TILE_VECTORS; w++) query[w] = load(queries + t * QUERY_TILE + w * LANES);
                for (int w = 0; w < TILE_VECTORS; w++) sum[0][w] += broadcast(k0[t]) * query[w];
                for (int w = 0; w < TILE_VECTORS; w++) sum[1][w] += broadcast(k1[t]) * query[w];
                for (int w = 0; w < TILE_VECTORS; w++) sum[2][w] += broadcast(k2[t]) * query[w];
                for (int w = 0; w < TILE_VECTORS; w++) sum[3][w] += broadcast(k3[t]) * query[w];
            }
            for (int r = 0; r < 4; r++)
                for (int w = 0; w < TILE_VECTORS; w++) {
                    real *target = dots + (j + r) * QUERY_TILE + w * LANES;
                    /* The first partial sum is stored. All later partial sums are added. */
                    store(target, begin ? load(target) + sum[r][w] : sum[r][w]);
                }
        }
    }
}

/* Add the sum over keys of rows[key][dim] * weights[key][query] to out[dim][query].
 *
 * `rows` are the values (or the keys) of `key_count` keys, which are `stride` numbers apart. `dim` must be a multiple
 * of four, because each step computes four dimensions. */
static void add_weighted_rows(real *restrict out, const real *restrict rows, int64_t stride, int dim, int key_count,
                              const real *restrict weights) {
    for (int t = 0; t < dim; t += 4) {
        vec sum[4][TILE_VECTORS] = {{{0}}};
        for (int j = 0; j < key_count; j++) {
            const real *row = rows + j * stride + t;
            vec weight[TILE_VECTORS];
            for (int w = 0; w < TILE_VECTORS; w++) weight[w] = load(weights + j * QUERY_TILE + w * LANES);
            for (int r = 0; r < 4; r++)
                for (int w = 0; w < TILE_VECTORS; w++) sum[r][w] += broadcast(row[r]) * weight[w];
        }
        for (int r = 0; r < 4; r++)
            for (int w = 0; w < TILE_VECTORS; w++) {
                real *target = out + (t + r) * QUERY_TILE + w * LANES;
                store(target, load(target) + sum[r][w]);
            }
    }
}

/* The number of vectors of dimensions that `add_key_gradients` sums at a time. */
enum { GRADIENT_VECTORS = 2 };

/* Compute a part of `add_key_gradients`, for at most six keys and GRADIENT_VECTORS * LANES dimensions.
 *
 * The compiler inlines the function with a constant `key_count`, so that all sums are kept in registers. */
INLINE void add_key_gradients_part(int key_count, real *restrict grad, const real *restrict rows, int64_t stride,
                                   const real *restrict weights) {
    vec sum[6][GRADIENT_VECTORS] = {{{0}}};
    for (int i = 0; i < QUERY_TILE; i++) {
        vec row[GRADIENT_VECTORS];
        for (int w = 0; w < GRADIENT_VECTORS; w++) row[w] = load(rows + i * stride + w * LANES);
        for (int r = 0; r < key_count; r++)
            for (int w = 0; w < GRADIENT_VECTORS; w++) sum[r][w] += broadcast(weights[r * QUERY_TILE + i]) * row[w];
    }
    for (int r = 0; r < key_count; r++)
        for (int w = 0; w < GRADIENT_VECTORS; w++) {
            real *target = grad + r * stride + w * LANES;
            store(target, load(target) + sum[r][w]);
        }
}

/* Add the sum over the queries of a tile of weights[key][query] * rows[query][dim] to grad[key][dim].
 *
 * The number of keys must be even. All rows are `stride` long, which must be a multiple of DIM_PADDING. */
static void add_key_gradients(real *restrict grad, const real *restrict rows, int64_t stride, int key_count,
                              const real *restrict weights) {
    for (int t = 0; t < stride; t += GRADIENT_VECTORS * LANES) {
        int j = 0;
        for (; j + 6 <= key_count; j += 6)
            add_key_gradients_part(6, grad + j * stride + t, rows + t, stride, weights + j * QUERY_TILE);
        for (; j + 4 <= key_count; j += 4)
            add_key_gradients_part(4, grad + j * stride + t, rows + t, stride, weights + j * QUERY_TILE);
        for (; j + 2 <= key_count; j += 2)
            add_key_gradients_part(2, grad + j * stride + t, rows + t, stride, weights + j * QUERY_TILE);
    }
}

#endif
