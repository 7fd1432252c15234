/* The three matrix products of attention, on tiles that stay in registers and in the first-level cache.
 *
 * Everything is laid out "queries in lanes": a panel is PANEL query rows side by side, so that a row's maximum, sum and
 * bias are plain vector arithmetic, and keys and values are read as scalars, in place, with no packing. In each product
 *
 *     dots(key, query)    = sum over dim   of key[key][dim]        * queries[dim][query]       panel_dots
 *     out(dim, query)    += sum over keys  of value[key][dim]      * weights[key][query]       panel_add
 *     grad(key, dim)     += sum over query of weights[key][query]  * rows[query][dim]          rows_add
 *
 * the left factor is a broadcast scalar and the right one a vector. 4 x 24 (or 6 x 16) running sums take 12 of AVX2's
 * 16 registers: enough to keep two fused multiply-adds per cycle, four cycles deep, busy. The loops load the vectors
 * first and each scalar where it is used; other orders make gcc spill a sum and run at half the speed.
 */
#ifndef TRAINSHORT_TILE_H
#define TRAINSHORT_TILE_H

#include "simd.h"

enum {
    PANEL = 24, /* query rows in lanes */
    WIDE = PANEL / LANES,
    KEYS = 64, /* keys in a block */
    STEP = 4,  /* keys that a panel reads or leaves out together */
    CHAIN = 32,
    PAD = 16,  /* in scratch, dims are padded with zeros to a multiple of this */
};

/* dots[key][query] for `keys` keys (rounded up to a multiple of four), whose rows are `stride` apart. Sums are cut
 * every CHAIN dims: shorter chains of roundings, a quarter less error. */
static void panel_dots(const real *restrict queries, const real *restrict k, int64_t stride, int dim, int keys,
                       real *restrict dots) {
    for (int j = 0; j < keys; j += 4) {
        const real *k0 = k + j * stride, *k1 = k0 + stride, *k2 = k1 + stride, *k3 = k2 + stride;
        for (int begin = 0; begin < dim; begin += CHAIN) {
            const int end = begin + CHAIN < dim ? begin + CHAIN : dim;
            vec sum[4][WIDE] = {{{0}}};
            for (int t = begin; t < end; t++) {
                vec lanes[WIDE];
                for (int w = 0; w < WIDE; w++) lanes[w] = load(queries + t * PANEL + w * LANES);
                for (int w = 0; w < WIDE; w++) sum[0][w] += spread(k0[t]) * lanes[w];
                for (int w = 0; w < WIDE; w++) sum[1][w] += spread(k1[t]) * lanes[w];
                for (int w = 0; w < WIDE; w++) sum[2][w] += spread(k2[t]) * lanes[w];
                for (int w = 0; w < WIDE; w++) sum[3][w] += spread(k3[t]) * lanes[w];
            }
            for (int r = 0; r < 4; r++)
                for (int w = 0; w < WIDE; w++) {
                    real *at = dots + (j + r) * PANEL + w * LANES;
                    store(at, begin ? load(at) + sum[r][w] : sum[r][w]);
                }
        }
    }
}

/* out[dim][query] += sum over keys of rows[key][dim] * weights[key][query]; dim is a multiple of four. */
static void panel_add(real *restrict out, const real *restrict rows, int64_t stride, int dim, int keys,
                      const real *restrict weights) {
    for (int t = 0; t < dim; t += 4) {
        vec sum[4][WIDE] = {{{0}}};
        for (int j = 0; j < keys; j++) {
            const real *row = rows + j * stride + t;
            vec lanes[WIDE];
            for (int w = 0; w < WIDE; w++) lanes[w] = load(weights + j * PANEL + w * LANES);
            for (int r = 0; r < 4; r++)
                for (int w = 0; w < WIDE; w++) sum[r][w] += spread(row[r]) * lanes[w];
        }
        for (int r = 0; r < 4; r++)
            for (int w = 0; w < WIDE; w++) {
                real *at = out + (t + r) * PANEL + w * LANES;
                store(at, load(at) + sum[r][w]);
            }
    }
}

enum { COLUMNS = 2 }; /* vectors of dims that rows_add holds at once */

/* `height` rows and COLUMNS vectors of `rows_add`; inlined with a constant height, so that the sums are registers. */
INLINE void rows_add_tile(int height, real *restrict grad, const real *restrict rows, int64_t stride,
                          const real *restrict weights) {
    vec sum[6][COLUMNS] = {{{0}}};
    for (int i = 0; i < PANEL; i++) {
        vec lanes[COLUMNS];
        for (int w = 0; w < COLUMNS; w++) lanes[w] = load(rows + i * stride + w * LANES);
        for (int r = 0; r < height; r++)
            for (int w = 0; w < COLUMNS; w++) sum[r][w] += spread(weights[r * PANEL + i]) * lanes[w];
    }
    for (int r = 0; r < height; r++)
        for (int w = 0; w < COLUMNS; w++) {
            real *at = grad + r * stride + w * LANES;
            store(at, load(at) + sum[r][w]);
        }
}

/* grad[key][dim] += sum over a panel's queries of weights[key][query] * rows[query][dim], for an even number of keys.
 * All rows are `stride` apart and `stride` long, a multiple of PAD. */
static void rows_add(real *restrict grad, const real *restrict rows, int64_t stride, int keys,
                     const real *restrict weights) {
    for (int t = 0; t < stride; t += COLUMNS * LANES) {
        int j = 0;
        for (; j + 6 <= keys; j += 6) rows_add_tile(6, grad + j * stride + t, rows + t, stride, weights + j * PANEL);
        for (; j + 4 <= keys; j += 4) rows_add_tile(4, grad + j * stride + t, rows + t, stride, weights + j * PANEL);
        for (; j + 2 <= keys; j += 2) rows_add_tile(2, grad + j * stride + t, rows + t, stride, weights + j * PANEL);
    }
}

#endif
