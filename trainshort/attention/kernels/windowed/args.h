/* What one call is given, as ctypes fills it in (attention/operator.py mirrors this struct), and how rows come in and
 * go out.
 *
 * Inputs may be the library's own element type, bfloat16 or float16, with any strides but dim's; all arithmetic is in
 * `real`. Shapes are (batch, heads, tokens, dim); the last query stands on the last key.
 */
#ifndef TRAINSHORT_CALL_H
#define TRAINSHORT_CALL_H

#include "thread_pool.h"
#include "matmul.h"

enum { NATIVE = 0, BFLOAT16 = 1, FLOAT16 = 2 };

typedef struct {
    char *data;
    int64_t batch_stride, head_stride, token_stride; /* strides in elements; dim's is 1 */
} Tensor;

typedef struct {
    Tensor q, k, v, out, grad_out, grad_q, grad_k, grad_v;
    const float *slopes;
    const real *table;        /* (heads, MARGIN + k_len + PANEL) bias by distance, in place of slopes, or NULL */
    const real *table_suffix_max;      /* (heads, k_len) the table's largest value at each distance or farther, or NULL */
    const double *cumulative_decay; /* (batch, heads, k_len) bias clock[i] - clock[j], in place of slopes, or NULL */
    const int32_t *segment_ids; /* (batch, k_len) segment of each key, or NULL */
    const int32_t *segment_starts;     /* (batch, k_len) first key of the same segment, or NULL */
    double *lse;              /* (batch, heads, q_len); a float would round every weight that backward makes of it */
    int32_t *first_keys;           /* (batch, heads, panels) first key a panel of queries read */
    float *dropped_mass;           /* (batch, heads, panels) softmax mass that may lie before it */
    real *grad_out_dot_out;              /* (batch, heads, q_len) grad_out . out */
    double *grad_table;       /* (batch, heads, k_len) gradient of the table, or NULL */
    double *grad_decay_queries;        /* (batch, heads, q_len) gradient of the clock where it stands for queries, or NULL */
    double *grad_decay_keys;        /* (batch, heads, k_len) and where it stands for keys */
    int64_t batches, heads, kv_heads, q_len, k_len, dim, window;
    double tolerance, scale;
    Parallel openmp_parallel; /* the OpenMP runtime torch has loaded, or NULL for helpers of our own */
    int32_t threads, dtype;
} Call;

/* Distances are read and written a panel at a time; those in the future of a row's keys fall into this margin. */
enum { MARGIN = 96 };

/* What a head adds to the score of a key. */
typedef struct {
    real slope;          /* -slope * distance, where neither of the others is given */
    const real *table;   /* by distance, or NULL */
    const double *clock; /* clock[i] - clock[j], or NULL */
} HeadBias;

INLINE int64_t table_size(const Call *c) { return MARGIN + c->k_len + PANEL; }

INLINE HeadBias head_bias(const Call *c, int64_t batch, int64_t head) {
    return (HeadBias){
        (real)c->slopes[head],
        c->table ? c->table + head * table_size(c) + MARGIN : NULL,
        c->cumulative_decay ? c->cumulative_decay + (batch * c->heads + head) * c->k_len : NULL,
    };
}

/* A clock grows with the text, and what counts are small differences of it: two floats hold one of its readings, and
 * the difference of two such pairs is as exact as if it had been taken in double precision and rounded once. */
typedef struct {
    real high, low;
} Reading;

INLINE Reading reading(double clock) {
    const real high = (real)clock;
    return (Reading){high, (real)(clock - (double)high)};
}

INLINE int padded_dim(const Call *c) { return (int)(blocks_of(c->dim, PAD) * PAD); }
INLINE int64_t panels_of(const Call *c) { return blocks_of(c->q_len, PANEL); }
INLINE int64_t kv_head(const Call *c, int64_t head) { return head / (c->heads / c->kv_heads); }
INLINE int64_t position(const Call *c, int64_t row) { return c->k_len - c->q_len + row; }

INLINE size_t element_size(const Call *c) { return c->dtype == NATIVE ? sizeof(real) : 2; }

INLINE char *row_at(const Call *c, const Tensor *x, int64_t batch, int64_t head, int64_t token) {
    return x->data + (batch * x->batch_stride + head * x->head_stride + token * x->token_stride) * (int64_t)element_size(c);
}

INLINE float float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Rounds to the nearest, ties to even; NaN keeps a mantissa bit. */
INLINE uint16_t to_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void read_row(const Call *c, const char *from, real *to) {
    const uint16_t *half = (const uint16_t *)from;
    switch (c->dtype) {
    case NATIVE: memcpy(to, from, c->dim * sizeof(real)); break;
    case BFLOAT16: for (int t = 0; t < c->dim; t++) to[t] = float_of_bits((uint32_t)half[t] << 16); break;
    default: for (int t = 0; t < c->dim; t++) to[t] = _cvtsh_ss(half[t]); break;
    }
}

static void write_row(const Call *c, char *to, const real *from) {
    uint16_t *half = (uint16_t *)to;
    switch (c->dtype) {
    case NATIVE: memcpy(to, from, c->dim * sizeof(real)); break;
    case BFLOAT16: for (int t = 0; t < c->dim; t++) half[t] = to_bfloat16(from[t]); break;
    default: for (int t = 0; t < c->dim; t++) half[t] = _cvtss_sh(from[t], _MM_FROUND_TO_NEAREST_INT); break;
    }
}

/* `count` rows from `start` in `real`, padded_dim apart, zeros past the end. Where they lie like that already, the
 * caller gets them in place and nothing is copied. */
static const real *read_rows(const Call *c, const Tensor *x, int64_t batch, int64_t head, int64_t start, int64_t count,
                             int64_t end, real *scratch) {
    const int padded = padded_dim(c);
    if (c->dtype == NATIVE && x->token_stride == padded && c->dim == padded && start + count <= end)
        return (const real *)row_at(c, x, batch, head, start);
    for (int64_t i = 0; i < count; i++) {
        real *to = scratch + i * padded;
        if (start + i < end) read_row(c, row_at(c, x, batch, head, start + i), to);
        const int64_t filled = start + i < end ? c->dim : 0;
        memset(to + filled, 0, (padded - filled) * sizeof(real));
    }
    return scratch;
}

/* rows[query][dim] -> panel[dim][query] */
static void to_panel(const real *rows, int padded, real *panel) {
    for (int i = 0; i < PANEL; i++)
        for (int t = 0; t < padded; t++) panel[t * PANEL + i] = rows[i * padded + t];
}

#endif
