/* The decode step: the attention of one new token to the keys in the ring buffers of a KV cache.
 *
 * model/cache/ring_buffer.py contains the same structs. The fields must be in the same order. */
#ifndef TRAINSHORT_RING_BUFFER_H
#define TRAINSHORT_RING_BUFFER_H

#include <stdint.h>

/* The ring buffer of one key-value head. When it is full, a new key replaces the oldest key.
 *
 * The keys in the buffer have the distances 1 to `count` to the new token. An example with capacity 4, after the tokens
 * 0 to 5 were stored:
 *
 *     slot                    0 1 2 3
 *     token                   4 5 2 3
 *     distance to token 6     2 1 4 3        next = 2
 */
typedef struct {
    float *keys, *values;       /* [capacity][padded_dim]; padded_dim is dim, rounded up to a multiple of LANES */
    int64_t capacity;           /* the number of keys that fit into the buffer */
    int64_t count;              /* the number of keys in the buffer */
    int64_t next;               /* the slot of the next key; the oldest key if the buffer is full */
    int64_t requested_capacity; /* not 0 if the buffer must grow before the newest key can be stored */
    double max_evicted_norm;    /* the largest norm of all evicted keys */
    double max_norm;            /* the largest finite norm of all keys, evicted or not */
} RingBuffer;

/* The statistics of one query head. `lse` is the log-sum-exp of the scores of a query, and c is the cumulative log decay
 * (see `cumulative_decay`). */
typedef struct {
    double slope;                 /* the ALiBi slope */
    double max_excess;            /* the largest |q| * max_norm * softmax_scale - lse of all queries so far */
    double certificate;           /* the largest upper bound on the softmax mass of evicted keys, over all queries */
    int64_t rows_above_tolerance; /* the number of queries whose upper bound was above the tolerance */
    double log_evicted_weight;    /* with decay: log of the sum of exp(-c[j]) over all evicted keys j */
    double initial_decay;         /* with decay: c of the first token */
} HeadState;

/* The arguments of the decode step of one layer. */
typedef struct {
    const float *q, *k, *v;               /* the new token: one row of dim floats per head */
    const float *query_scales;            /* [num_heads] factors of the queries, or NULL */
    float *out;                           /* [num_heads][dim] */
    int64_t q_stride, k_stride, v_stride; /* the distances between the rows of two heads, in floats */
    RingBuffer *ring_buffers;             /* [num_kv_heads] */
    HeadState *heads;                     /* [num_heads] */
    int64_t num_heads, num_kv_heads, dim;
    int64_t length;         /* the number of tokens before the new token */
    int64_t window;         /* a query sees the keys at distances smaller than this number */
    double tolerance;       /* the softmax mass that may be dropped from each query by evicting keys */
    double capacity_margin; /* the capacity suffices for queries whose excess is larger by this number */
    double min_bias_drop;   /* only queries whose bias drops by this number over the text update max_excess */
    double softmax_scale;   /* the factor of the product of query and key */
    float *scratch;         /* `trainshort_decode_scratch_length` floats */

    /* [num_heads][decay_stride] the cumulative log decays c, or NULL for ALiBi. The bias of key j is c[new] - c[j].
     * `decay_length` columns are filled, oldest token first. The decode step fills one more column. */
    double *cumulative_decay;
    int64_t decay_stride, decay_length;
    const float *gates; /* [num_heads] the forget gates of the new token before the sigmoid */
    double gate_sign;   /* c[new] = c[previous] + log(sigmoid(gate_sign * gate)) */

    int32_t num_threads;
} DecodeArgs;

/* Computes the attention of the new token to all keys in the ring buffers and to itself.
 *
 * Then stores the new key and value in each ring buffer. If a ring buffer must grow first, its field
 * `requested_capacity` is set instead. */
void trainshort_decode_attention(const DecodeArgs *args);

#endif
