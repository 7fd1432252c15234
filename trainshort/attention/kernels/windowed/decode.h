/* A few query rows against a long past (decoding): one pass over keys and values, at the speed memory delivers them.
 *
 * Nothing is skipped here. A proof that far keys do not matter needs their norms, and reading a key to find its norm
 * costs as much as scoring it. All rows that share a key head (grouped queries) meet each block while it is in cache.
 */
#ifndef TRAINSHORT_DECODE_H
#define TRAINSHORT_DECODE_H

#include "bound.h"
#include "query_tile.h"

enum { FEW = 4 }; /* up to this many queries are decoded; a panel of more lanes is faster than row by row */

typedef struct {
    real *query, *out; /* [dim] */
    real top, sum;
    int64_t position, reach, head, row;
    int32_t segment_id;
} Row;

/* Scores of one row on one block; -infinity where it may not look. Returns their maximum. */
static real row_scores(const Call *c, const Row *row, int64_t batch, int64_t start, int keys, const real *k,
                       real *scores) {
    const int padded = padded_dim(c);
    const int32_t *segment_ids = c->segment_ids ? c->segment_ids + batch * c->k_len : NULL;
    const HeadBias bias = head_bias(c, batch, row->head);
    real top = -INFINITY;
    for (int j = 0; j < KEYS; j++) {
        const int64_t distance = row->position - (start + j);
        const int outside = j >= keys || distance < 0 || distance >= c->window;
        if (outside || (segment_ids && segment_ids[start + j] != row->segment_id)) {
            scores[j] = -INFINITY;
            continue;
        }
        vec even = {0}, odd = {0};
        for (int t = 0; t < padded; t += 2 * LANES) {
            even += load(row->query + t) * load(k + j * padded + t);
            odd += load(row->query + t + LANES) * load(k + j * padded + t + LANES);
        }
        const real shift = bias.clock   ? (real)(bias.clock[row->position] - bias.clock[start + j])
                           : bias.table ? bias.table[distance]
                                        : -bias.slope * (real)distance;
        scores[j] = sum_lanes(even + odd) * (real)c->scale + shift;
        if (scores[j] > top) top = scores[j];
    }
    return top;
}

/* Takes one block into a row's running softmax. Hidden values are not touched, so a NaN in them stays unseen. */
static void row_add(const Call *c, Row *row, int keys, const real *v, const real *scores, real block_top, real *fresh) {
    const int padded = padded_dim(c);
    const real top = block_top > row->top ? block_top : row->top;
    const real shrink = (real)exp(row->top - top);
    real weights[KEYS], sum = 0;
    for (int j = 0; j < KEYS; j += LANES) store(weights + j, exp_below_zero(load(scores + j) - top));
    memset(fresh, 0, padded * sizeof(real));
    for (int j = 0; j < keys; j++) {
        if (scores[j] == -INFINITY) continue;
        sum += weights[j];
        for (int t = 0; t < padded; t += LANES)
            store(fresh + t, load(fresh + t) + weights[j] * load(v + j * padded + t));
    }
    for (int t = 0; t < padded; t += LANES) store(row->out + t, load(row->out + t) * shrink + load(fresh + t));
    row->sum = row->sum * shrink + sum;
    row->top = top;
}

static void begin_row(const Call *c, int64_t batch, Row *row, real *memory) {
    Panel place;
    const int padded = padded_dim(c);
    place_panel(c, batch, row->row, &place);
    row->query = memory, row->out = memory + padded;
    memset(memory, 0, 2 * padded * sizeof(real));
    read_row(c, row_at(c, &c->q, batch, row->head, row->row), row->query);
    row->top = LOWEST, row->sum = 0;
    row->position = place.lowest;
    row->reach = place.reach;
    row->segment_id = c->segment_ids ? c->segment_ids[batch * c->k_len + row->position] : 0;
}

static void end_row(const Call *c, int64_t batch, Row *row, int64_t first) {
    const int64_t at = batch * c->heads + row->head;
    for (int t = 0; t < c->dim; t++) row->out[t] /= row->sum;
    write_row(c, row_at(c, &c->out, batch, row->head, row->row), row->out);
    c->lse[at * c->q_len + row->row] = (double)row->top + log((double)row->sum);
    c->first_keys[at] = (int32_t)first; /* FEW rows are one panel */
    c->dropped_mass[at] = 0;
}

/* One item: all rows of one key head's group. */
static void decode_group(void *context, int64_t item, void *scratch) {
    const Call *c = context;
    const int padded = padded_dim(c);
    const int64_t batch = item / c->kv_heads, kv = item % c->kv_heads, group = c->heads / c->kv_heads;
    const int64_t count = group * c->q_len;
    real *k_rows = scratch, *v_rows = k_rows + KEYS * padded, *scores = v_rows + KEYS * padded, *fresh = scores + KEYS;
    real *memory = fresh + padded;
    Row *rows = (Row *)(memory + count * 2 * padded);
    int64_t reach = c->k_len - 1;
    for (int64_t i = 0; i < count; i++) {
        rows[i].head = kv * group + i / c->q_len, rows[i].row = i % c->q_len;
        begin_row(c, batch, &rows[i], memory + i * 2 * padded);
        reach = smaller_of(reach, rows[i].reach);
    }
    const int64_t first = reach / KEYS * KEYS;
    for (int64_t start = (c->k_len - 1) / KEYS * KEYS; start >= first; start -= KEYS) {
        const int keys = (int)smaller_of(KEYS, c->k_len - start);
        const real *k = read_rows(c, &c->k, batch, kv, start, KEYS, c->k_len, k_rows);
        const real *v = read_rows(c, &c->v, batch, kv, start, KEYS, c->k_len, v_rows);
        for (int64_t i = 0; i < count; i++) {
            const real top = row_scores(c, &rows[i], batch, start, keys, k, scores);
            row_add(c, &rows[i], keys, v, scores, top, fresh);
        }
    }
    for (int64_t i = 0; i < count; i++) end_row(c, batch, &rows[i], first);
}

#endif
