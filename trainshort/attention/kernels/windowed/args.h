/* The arguments of a kernel call, and functions that read and write rows of its tensors.
 *
 * The file backends/ctypes_call.py mirrors the structs `Tensor` and `Call`. All tensors have the shape (batch, heads,
 * tokens, dim). The last query is aligned with the last key. The inputs may be bfloat16 or float16. All computations
 * use the type `real`, which is float, or double if the library is built with REAL_IS_DOUBLE.
 */
#ifndef TRAINSHORT_ARGS_H
#define TRAINSHORT_ARGS_H

#include "thread_pool.h"
#include "matmul.h"

/* The dtypes of the tensors. NATIVE is `real`. */
enum { NATIVE = 0, BFLOAT16 = 1, FLOAT16 = 2 };

typedef struct {
    char *data;
    /* Strides count elements. The stride of the last dimension is 1. */
    int64_t batch_stride, head_stride, token_stride;
} Tensor;

typedef struct {
    Tensor q, k, v, out, grad_out, grad_q, grad_k, grad_v;

    /* The bias of a call is one of three: slopes, a distance table, or a cumulative log decay. */
    const float *slopes;            /* (heads) */
    const real *table;              /* (heads, padded_table_length) bias by distance, or NULL */
    const real *table_suffix_max;   /* (heads, k_len) largest value of the table at a distance or farther, or NULL */
    const double *cumulative_decay; /* (batch, heads, k_len) the bias is c[i] - c[j] for these values c, or NULL */

    const int32_t *segment_ids;     /* (batch, k_len) segment of each key, or NULL */
    const int32_t *segment_starts;  /* (batch, k_len) first key of the segment of each key, or NULL */

    /* The log-sum-exp is double, because the backward pass computes all attention weights from the log-sum-exp. */
    double *lse;                    /* (batch, heads, q_len) */
    int32_t *first_keys;            /* (batch, heads, query tiles) first key that each query tile reads */
    float *dropped_mass;            /* (batch, heads, query tiles) upper bound on the skipped softmax mass */

    real *grad_out_dot_out;         /* (batch, heads, q_len) dot product of each row of grad_out and out */
    double *grad_table;             /* (batch, heads, k_len) gradient of the table, or NULL */
    double *grad_decay_queries;     /* (batch, heads, q_len) gradient of c as the query's value c[i], or NULL */
    double *grad_decay_keys;        /* (batch, heads, k_len) gradient of c as the key's value c[j], or NULL */

    int64_t batches, heads, kv_heads, q_len, k_len, dim, window;
    double tolerance, scale;
    /* The entry point of the OpenMP runtime that PyTorch has loaded. With NULL, the thread pool uses its own
     * threads. */
    Parallel openmp_parallel;
    int32_t threads, dtype;
} Call;

/* The number of values before distance 0 of a table. A query tile reads the table in blocks. Keys in the future of a
 * query have negative distances and are read from this padding. */
enum { TABLE_PADDING = 96 };

/* The bias of one head. `slope` is used only if both pointers are NULL. */
typedef struct {
    real slope;                     /* bias -slope * distance */
    const real *table;              /* bias table[distance] */
    const double *cumulative_decay; /* bias c[i] - c[j] */
} HeadBias;

/* The length of the table of one head, with the padding before distance 0 and after the last distance. */
INLINE int64_t padded_table_length(const Call *c) { return TABLE_PADDING + c->k_len + QUERY_TILE; }

/* Return the bias of one head of one sequence. */
INLINE HeadBias bias_of_head(const Call *c, int64_t batch, int64_t head) {
    return (HeadBias){
        (real)c->slopes[head],
        c->table ? c->table + head * padded_table_length(c) + TABLE_PADDING : NULL,
        c->cumulative_decay ? c->cumulative_decay + (batch * c->heads + head) * c->k_len : NULL,
    };
}

/* A double as the sum of two reals. The cumulative log decay grows with the text, while only small differences of its
 * values matter. The difference of two split values is as exact as a difference of doubles that is rounded once. */
typedef struct {
    real high, low;
} SplitDouble;

INLINE SplitDouble split_double(double value) {
    const real high = (real)value;
    return (SplitDouble){high, (real)(value - (double)high)};
}

/* The length of a row in scratch memory. */
INLINE int padded_dim(const Call *c) { return (int)(blocks_of(c->dim, DIM_PADDING) * DIM_PADDING); }

INLINE int64_t query_tile_count(const Call *c) { return blocks_of(c->q_len, QUERY_TILE); }

/* The key head of a query head. With grouped-query attention, several query heads share one key head. */
INLINE int64_t kv_head_of(const Call *c, int64_t head) { return head / (c->heads / c->kv_heads); }

/* The key position of a query row. The last query is aligned with the last key. */
INLINE int64_t position_of_row(const Call *c, int64_t row) { return c->k_len - c->q_len + row; }

INLINE size_t element_size(const Call *c) { return c->dtype == NATIVE ? sizeof(real) : 2; }

/* Return the address of one row of a tensor. */
INLINE char *row_address(const Call *c, const Tensor *x, int64_t batch, int64_t head, int64_t token) {
    const int64_t offset = batch * x->batch_stride + head * x->head_stride + token * x->token_stride;
    return x->data + offset * (int64_t)element_size(c);
}

INLINE float float_from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Round a float to the nearest bfloat16 and return its bits. A float in the middle between two bfloat16 numbers is
 * rounded to the number with an even last bit. NaN stays NaN. */
INLINE uint16_t float_to_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const int is_nan = x != x;
    if (is_nan) return (uint16_t)(bits >> 16 | 0x40); /* This bit must be set, or the result could be infinity. */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Read one row of a tensor at the address `source`, convert it to `real` and write it to `target`. */
static void read_row(const Call *c, const char *source, real *target) {
    const uint16_t *half = (const uint16_t *)source;
    switch (c->dtype) {
    case NATIVE: memcpy(target, source, c->dim * sizeof(real)); break;
    case BFLOAT16: for (int t = 0; t < c->dim; t++) target[t] = float_from_bits((uint32_t)half[t] << 16); break;
    default: for (int t = 0; t < c->dim; t++) target[t] = _cvtsh_ss(half[t]); break;
    }
}

/* Convert the row `source` from `real` to the dtype of the tensors and write it to the address `target`. */
static void write_row(const Call *c, char *target, const real *source) {
    uint16_t *half = (uint16_t *)target;
    switch (c->dtype) {
    case NATIVE: memcpy(target, source, c->dim * sizeof(real)); break;
    case BFLOAT16: for (int t = 0; t < c->dim; t++) half[t] = float_to_bfloat16(source[t]); break;
    default: for (int t = 0; t < c->dim; t++) half[t] = _cvtss_sh(source[t], _MM_FROUND_TO_NEAREST_INT); break;
    }
}

/* Return `count` rows of a tensor from the row `start` on, converted to `real`.
 *
 * The rows of the result are padded_dim apart. Padding dimensions and rows from `end` on are filled with zeros. If the
 * tensor has this layout already, the result points into the tensor. Otherwise the rows are copied to `scratch`. */
static const real *read_rows(const Call *c, const Tensor *x, int64_t batch, int64_t head, int64_t start, int64_t count,
                             int64_t end, real *scratch) {
    const int padded = padded_dim(c);
    const int has_row_layout = x->token_stride == padded && c->dim == padded;
    if (c->dtype == NATIVE && has_row_layout && start + count <= end)
        return (const real *)row_address(c, x, batch, head, start);
    for (int64_t i = 0; i < count; i++) {
        real *target = scratch + i * padded;
        const int is_real_row = start + i < end;
        if (is_real_row) read_row(c, row_address(c, x, batch, head, start + i), target);
        /* The remaining dimensions, or all dimensions of a padding row, are filled with zeros. */
        const int64_t dims_read = is_real_row ? c->dim : 0;
        memset(target + dims_read, 0, (padded - dims_read) * sizeof(real));
    }
    return scratch;
}

/* Transpose the rows of a query tile: rows[query][dim] becomes tile[dim][query]. */
static void transpose_to_tile(const real *rows, int padded, real *tile) {
    for (int i = 0; i < QUERY_TILE; i++)
        for (int t = 0; t < padded; t++) tile[t * QUERY_TILE + i] = rows[i * padded + t];
}

#endif
