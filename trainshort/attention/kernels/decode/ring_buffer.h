/* One token's attention to rings of past keys; see ring_buffer.c. The structs are mirrored by ring.py. */
#ifndef TRAINSHORT_RING_H
#define TRAINSHORT_RING_H

#include <stdint.h>

typedef struct {
    float *keys, *values; /* [capacity][padded] */
    int64_t capacity, count, next;
    int64_t wanted;   /* set when the ring must grow before it takes the newest key; else 0 */
    double far, peak; /* largest norm of a forgotten key, and of any */
} Ring;

typedef struct {
    double slope, excess, mass; /* excess: the most by which |q| K / sqrt(d) passed the log-sum-exp; mass: certificate */
    int64_t above;              /* queries whose mass was above the tolerance */
    double weight, began;       /* of a clock: log of the sum of e^-reading over forgotten keys; its first reading */
} Head;

typedef struct {
    const float *q, *k, *v; /* [heads or rings][dim], strides below */
    const float *factors;   /* [heads] of the queries, where scores grow with what is seen; or NULL */
    float *out;             /* [heads][dim] */
    int64_t q_stride, k_stride, v_stride;
    Ring *rings;
    Head *heads;
    int64_t head_count, ring_count, dim, length, limit;
    double tolerance, margin, settled, scale;
    float *scratch; /* per ring, scratch_size floats */
    /* A bias clock[i] - clock[j] in place of slopes, or NULL: [heads] rows of `held` readings, oldest first, the newest
     * that of the token before, and room for one more. Each token adds log sigmoid(sign * gate) to the newest. */
    double *clock;
    int64_t clock_stride, held;
    const float *gates; /* [heads] */
    double sign;
    int32_t threads;
} Token;

/* Attends, and puts the token's key and value into each ring whose `wanted` is 0 afterwards. */
void trainshort_token(const Token *token);

#endif
