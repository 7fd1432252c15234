/* Backward: the weights are recomputed from the forward's log-sum-exp, over exactly the blocks the forward read.
 *
 *     dV = P^T dO        dP = dO V^T        dS = P (dP - dO.O)        dK = dS^T Q        dQ = dS K
 *
 * A bias by distance has the gradient  sum of dS over each diagonal; a clock, at each token, the sum of its row minus
 * that of its column. (The sums of rows are zero but for rounding. Taken along, the gradient is exactly that of the dS
 * that were computed, so that nothing piles up where a method adds it up over the text.)
 *
 * An item is a stretch of SEGMENT keys of one key head: it owns its part of dK and dV and meets all queries that read
 * it. The parts of dQ that come from different stretches are added up in the order of the keys: a stretch waits until
 * all earlier ones are past a block of queries before it adds its share, and likewise for the gradient of the bias, which
 * is added in the end. So the result does not depend on the number of threads or on timing, and no thread needs a copy of
 * dQ.
 */
#ifndef TRAINSHORT_BACKWARD_H
#define TRAINSHORT_BACKWARD_H

#include <sched.h>

#include "query_tile.h"

enum { SEGMENT = 4 * KEYS, FINISHED = INT32_MAX };

typedef struct {
    const Call *call;
    atomic_int *progress; /* (batch, kv_heads, segments) query blocks (over the head group) that are done */
    int64_t segments;
} Backward;

/* One block of ROWS queries as the products need it: rows, and panels with queries in lanes. */
typedef struct {
    Panel place[PANELS];
    int count;
    int64_t first[PANELS];
    vec lse[PANELS][WIDE], rest[PANELS][WIDE]; /* the log-sum-exp, and what is lost of it in a real */
    vec inner[PANELS][WIDE];
    const real *q, *grad;                     /* [query][dim] */
    real *queries, *grads, *grad_q;           /* [panel][dim][query] */
    real *weights, *slants;                   /* [panel][key][query]: P and dS */
    vec ticks[PANELS][WIDE];                  /* sums of dS over the segment's keys */
} Rows;

typedef struct {
    const real *k, *v;      /* [key][dim] */
    real *grad_k, *grad_v;  /* [key][dim] */
    real *tilts;            /* [head of the group][MARGIN + distance] gradient of the bias, or NULL */
    double *ticks;          /* [key] gradient of the clock of the head at hand, where it stands for keys, or NULL */
    int64_t start, keys;
    real *scratch;
} Segment;

static void take_rows(const Call *c, int64_t batch, int64_t head, int64_t row, Rows *rows, real *scratch) {
    const int padded = padded_dim(c);
    const int64_t at = (batch * c->heads + head) * c->q_len, size = padded * PANEL;
    real *q = scratch, *grad = q + PANELS * size;
    rows->queries = grad + PANELS * size, rows->grads = rows->queries + PANELS * size;
    rows->grad_q = rows->grads + PANELS * size, rows->weights = rows->grad_q + PANELS * size;
    rows->slants = rows->weights + PANELS * KEYS * PANEL;
    rows->q = read_rows(c, &c->q, batch, head, row, ROWS, c->q_len, q);
    rows->grad = read_rows(c, &c->grad_out, batch, head, row, ROWS, c->q_len, grad);
    memset(rows->grad_q, 0, PANELS * size * sizeof(real));
    memset(rows->ticks, 0, sizeof rows->ticks);
    for (int p = 0; p < rows->count; p++) {
        to_panel(rows->q + p * size, padded, rows->queries + p * size);
        to_panel(rows->grad + p * size, padded, rows->grads + p * size);
        for (int i = 0; i < PANEL; i++) {
            const int64_t at_row = row + p * PANEL + i;
            const int inside = at_row < c->q_len; /* padding lanes get weight 0 */
            const double lse = inside ? c->lse[at + at_row] : INFINITY;
            rows->lse[p][i / LANES][i % LANES] = (real)lse;
            rows->rest[p][i / LANES][i % LANES] = inside ? (real)(lse - (double)(real)lse) : 0;
            rows->inner[p][i / LANES][i % LANES] = inside ? c->grad_out_dot_out[at + at_row] : 0;
        }
    }
}

/* How many keys of a block, from `from` on, a panel met in the forward, rounded up to a multiple of four. */
INLINE int keys_met(const Rows *rows, int p, int64_t start, int64_t from) {
    return (int)blocks_of(larger_of(0, start + visible_keys(&rows->place[p], start) - from), 4) * 4;
}

/* Weights P and score gradients dS of one panel on one block of keys. */
static void panel_slants(const Call *c, int64_t batch, HeadBias bias, const Rows *rows, int p, const real *k,
                         const real *v, int64_t start, int keys) {
    const int padded = padded_dim(c);
    real *weights = rows->weights + p * KEYS * PANEL, *slants = rows->slants + p * KEYS * PANEL;
    panel_dots(rows->queries + p * padded * PANEL, k, padded, padded, keys, weights);
    panel_dots(rows->grads + p * padded * PANEL, v, padded, padded, keys, slants);
    add_bias(&rows->place[p], (real)c->scale, bias, start, keys, weights);
    if (needs_hiding(c, &rows->place[p], start, keys)) hide(c, &rows->place[p], batch, start, keys, weights);
    for (int j = 0; j < keys; j++)
        for (int w = 0; w < WIDE; w++) {
            const int64_t at = j * PANEL + w * LANES;
            const vec weight = exp_below_zero((load(weights + at) - rows->lse[p][w]) - rows->rest[p][w]);
            const vec slant = weight * (load(slants + at) - rows->inner[p][w]);
            store(weights + at, weight);
            store(slants + at, (vec)((ivec)slant & (weight != 0))); /* a hidden value's NaN stays hidden */
        }
}

/* Adds a panel's score gradients up by distance; those that are hidden are zero. */
static void add_tilts(const Panel *place, int64_t start, int keys, const real *slants, real *tilts) {
    for (int j = 0; j < keys; j++)
        for (int w = 0; w < WIDE; w++) {
            real *at = tilts + MARGIN + place->lowest - (start + j) + w * LANES;
            store(at, load(at) + load(slants + j * PANEL + w * LANES));
        }
}

/* Adds a panel's score gradients up by row and by key. */
static void add_ticks(int keys, const real *slants, vec *rows, double *columns) {
    for (int j = 0; j < keys; j++) {
        vec column = {0};
        for (int w = 0; w < WIDE; w++) {
            const vec slant = load(slants + j * PANEL + w * LANES);
            rows[w] += slant;
            column += slant;
        }
        columns[j] += sum_lanes(column);
    }
}

static void rows_meet_block(const Call *c, int64_t batch, int64_t head, Rows *rows, const Segment *own, int64_t start) {
    const int padded = padded_dim(c);
    const int64_t size = padded * PANEL;
    real *tilts = own->tilts ? own->tilts + head % (c->heads / c->kv_heads) * table_size(c) : NULL;
    for (int p = 0; p < rows->count; p++) {
        const int64_t from = larger_of(start, rows->first[p]), offset = (from - own->start) * padded;
        const int keys = keys_met(rows, p, start, from);
        if (!keys) continue;
        const real *k = own->k + offset, *v = own->v + offset;
        const real *weights = rows->weights + p * KEYS * PANEL, *slants = rows->slants + p * KEYS * PANEL;
        panel_slants(c, batch, head_bias(c, batch, head), rows, p, k, v, from, keys);
        if (tilts) add_tilts(&rows->place[p], from, keys, slants, tilts);
        if (own->ticks) add_ticks(keys, slants, rows->ticks[p], own->ticks + (from - own->start));
        panel_add(rows->grad_q + p * size, k, padded, padded, keys, slants);
        rows_add(own->grad_v + offset, rows->grad + p * size, padded, keys, weights);
        rows_add(own->grad_k + offset, rows->q + p * size, padded, keys, slants);
    }
}

/* grad_q is a plain tensor of reals: it is read and added to. */
static void give_rows(const Call *c, int64_t batch, int64_t head, int64_t row, const Rows *rows) {
    const int padded = padded_dim(c);
    for (int p = 0; p < rows->count; p++)
        for (int i = 0; i < rows->place[p].rows; i++) {
            const Tensor *grad = &c->grad_q;
            const int64_t token = row + p * PANEL + i;
            real *to = (real *)grad->data + batch * grad->batch_stride + head * grad->head_stride + token * grad->token_stride;
            const real *from = rows->grad_q + p * padded * PANEL + i;
            for (int t = 0; t < c->dim; t++) to[t] += (real)c->scale * from[t * PANEL];
            if (c->cumulative_decay)
                c->grad_decay_queries[(batch * c->heads + head) * c->q_len + token] += rows->ticks[p][i / LANES][i % LANES];
        }
}

/* Which of a block's panels read the segment, in the forward; 0 when none did. */
static int find_panels(const Call *c, int64_t batch, int64_t head, int64_t row, const Segment *own, Rows *rows) {
    int found = 0;
    rows->count = 0;
    for (int64_t at = row; at < smaller_of(row + ROWS, c->q_len); at += PANEL) {
        const int p = rows->count++;
        place_panel(c, batch, at, &rows->place[p]);
        rows->first[p] = c->first_keys[(batch * c->heads + head) * panels_of(c) + at / PANEL];
        found |= rows->first[p] < own->start + own->keys && rows->place[p].highest >= own->start;
    }
    return found;
}

/* The segment's share in the gradient of its heads' bias. */
static void give_tilts(const Call *c, int64_t batch, int64_t first_head, const Segment *own) {
    for (int64_t g = 0; g < c->heads / c->kv_heads; g++) {
        double *to = c->grad_table + (batch * c->heads + first_head + g) * c->k_len;
        const real *from = own->tilts + g * table_size(c) + MARGIN;
        for (int64_t distance = 0; distance < c->k_len - own->start; distance++) to[distance] += from[distance];
    }
}

static void wait_for_earlier(atomic_int *progress, int64_t segment, int step) {
    for (int64_t s = segment - 1; s >= 0; s--)
        while (atomic_load_explicit(&progress[s], memory_order_acquire) <= step) sched_yield();
}

/* One item: a stretch of keys of one key head, with all heads of its group. */
static void backward_segment(void *context, int64_t item, void *memory) {
    const Backward *backward = context;
    real *scratch = memory;
    const Call *c = backward->call;
    const int padded = padded_dim(c);
    const int64_t pairs = c->batches * c->kv_heads, pair = item % pairs, segment = item / pairs;
    const int64_t batch = pair / c->kv_heads, kv = pair % c->kv_heads, group = c->heads / c->kv_heads;
    const int64_t blocks = blocks_of(c->q_len, ROWS);
    atomic_int *progress = backward->progress + pair * backward->segments;

    Segment own = {.start = segment * SEGMENT, .grad_k = scratch, .grad_v = scratch + SEGMENT * padded};
    own.keys = smaller_of(SEGMENT, c->k_len - own.start);
    real *k = own.grad_v + SEGMENT * padded, *v = k + SEGMENT * padded, *rest = v + SEGMENT * padded;
    own.k = read_rows(c, &c->k, batch, kv, own.start, SEGMENT, c->k_len, k);
    own.v = read_rows(c, &c->v, batch, kv, own.start, SEGMENT, c->k_len, v);
    memset(own.grad_k, 0, 2 * SEGMENT * padded * sizeof(real));
    if (c->grad_table) {
        own.tilts = rest;
        rest += group * table_size(c);
        memset(own.tilts, 0, group * table_size(c) * sizeof(real));
    }

    Rows rows;
    double ticks[SEGMENT];
    own.ticks = c->cumulative_decay ? ticks : NULL;
    for (int64_t g = 0; g < group; g++) {
        memset(ticks, 0, sizeof ticks);
        for (int64_t block = larger_of(0, own.start - position(c, 0)) / ROWS; block < blocks; block++) {
            const int64_t head = kv * group + g, row = block * ROWS, step = g * blocks + block;
            if (!find_panels(c, batch, head, row, &own, &rows)) continue;
            take_rows(c, batch, head, row, &rows, rest);
            for (int64_t start = own.start; start < own.start + own.keys; start += KEYS)
                rows_meet_block(c, batch, head, &rows, &own, start);
            wait_for_earlier(progress, segment, (int)step);
            give_rows(c, batch, head, row, &rows);
            atomic_store_explicit(&progress[segment], (int)step + 1, memory_order_release);
        }
        for (int64_t j = 0; c->cumulative_decay && j < own.keys; j++)
            c->grad_decay_keys[(batch * c->heads + kv * group + g) * c->k_len + own.start + j] = -ticks[j];
    }
    if (c->grad_table) {
        wait_for_earlier(progress, segment, FINISHED - 1);
        give_tilts(c, batch, kv * group, &own);
    }
    atomic_store_explicit(&progress[segment], FINISHED, memory_order_release);
    for (int64_t j = 0; j < own.keys; j++) {
        for (int t = 0; t < c->dim; t++) own.grad_k[j * padded + t] *= (real)c->scale;
        write_row(c, row_at(c, &c->grad_k, batch, kv, own.start + j), own.grad_k + j * padded);
        write_row(c, row_at(c, &c->grad_v, batch, kv, own.start + j), own.grad_v + j * padded);
    }
}

/* inner = grad_out . out, a row at a time. */
static void inner_products(void *context, int64_t item, void *memory) {
    const Call *c = ((const Backward *)context)->call;
    real *out = memory, *grad = out + padded_dim(c);
    for (int64_t i = 0; i < c->q_len; i++) {
        read_row(c, row_at(c, &c->out, item / c->heads, item % c->heads, i), out);
        read_row(c, row_at(c, &c->grad_out, item / c->heads, item % c->heads, i), grad);
        double sum[4] = {0}; /* dP - inner cancels where one weight is near 1, so this one's rounding counts */
        for (int t = 0; t < c->dim; t++) sum[t % 4] += (double)out[t] * grad[t];
        c->grad_out_dot_out[item * c->q_len + i] = (real)((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
}

#endif
