/* Attention of a few query rows, as in text generation: one pass over all keys and values.
 *
 * No keys are skipped. The proof that a key can be skipped needs the norm of the key. Computing the norm takes as long
 * as computing the score. All query rows that share a key head process a block of keys while the block is in the CPU
 * cache.
 */
#ifndef TRAINSHORT_DECODE_H
#define TRAINSHORT_DECODE_H

#include "bound.h"
#include "query_tile.h"

/* Calls with at most this many queries use this file. With more queries, query tiles are faster than single rows. */
enum { MAX_DECODE_QUERIES = 4 };

/* The running softmax of one query row. */
typedef struct {
    real *query, *out;                          /* [dim] */
    real max_score, weight_sum;                 /* weight_sum is the sum of exp(score - max_score) */
    int64_t head, row;                          /* the query head, and the index of the query in the call */
    int64_t position, first_visible_key;
    int32_t segment_id;
} DecodeRow;

/* Compute the scores of one row on one block of keys, and return the largest score. Hidden keys get -infinity. */
static real compute_row_scores(const Call *c, const DecodeRow *row, int64_t batch, int64_t start, int key_count,
                               const real *k, real *scores) {
    const int padded = padded_dim(c);
    const int32_t *segment_ids = c->segment_ids ? c->segment_ids + batch * c->k_len : NULL;
    const HeadBias bias = bias_of_head(c, batch, row->head);
    real max_score = -INFINITY;
    for (int j = 0; j < KEY_BLOCK; j++) {
        const int64_t distance = row->position - (start + j);
        const int is_outside = j >= key_count || distance < 0 || distance >= c->window;
        if (is_outside || (segment_ids && segment_ids[start + j] != row->segment_id)) {
            scores[j] = -INFINITY;
            continue;
        }
        /* Two independent sums, so that the processor can compute them at the same time. */
        vec even = {0}, odd = {0};
        for (int t = 0; t < padded; t += 2 * LANES) {
            even += load(row->query + t) * load(k + j * padded + t);
            odd += load(row->query + t + LANES) * load(k + j * padded + t + LANES);
        }
        real key_bias;
        if (bias.cumulative_decay)
            key_bias = (real)(bias.cumulative_decay[row->position] - bias.cumulative_decay[start + j]);
        else if (bias.table)
            key_bias = bias.table[distance];
        else
            key_bias = -bias.slope * (real)distance;
        scores[j] = sum_lanes(even + odd) * (real)c->scale + key_bias;
        if (scores[j] > max_score) max_score = scores[j];
    }
    return max_score;
}

/* Add one block of keys to the running softmax of a row. Hidden values are not read, because they may be NaN.
 *
 * `block_max` is the largest score of the block. `block_out` is scratch memory for one row. */
static void add_block_to_row(const Call *c, DecodeRow *row, int key_count, const real *v, const real *scores,
                             real block_max, real *block_out) {
    const int padded = padded_dim(c);
    const real max_score = block_max > row->max_score ? block_max : row->max_score;
    const real factor = (real)exp(row->max_score - max_score);
    real weights[KEY_BLOCK], sum = 0;
    for (int j = 0; j < KEY_BLOCK; j += LANES) store(weights + j, exp_below_zero(load(scores + j) - max_score));
    memset(block_out, 0, padded * sizeof(real));
    for (int j = 0; j < key_count; j++) {
        if (scores[j] == -INFINITY) continue;
        sum += weights[j];
        for (int t = 0; t < padded; t += LANES)
            store(block_out + t, load(block_out + t) + weights[j] * load(v + j * padded + t));
    }
    for (int t = 0; t < padded; t += LANES)
        store(row->out + t, load(row->out + t) * factor + load(block_out + t));
    row->weight_sum = row->weight_sum * factor + sum;
    row->max_score = max_score;
}

/* Initialize the running softmax of a row. `row->head` and `row->row` must be set.
 *
 * `memory` is the memory for the query and the output of the row. */
static void begin_row(const Call *c, int64_t batch, DecodeRow *row, real *memory) {
    QueryTile tile;
    const int padded = padded_dim(c);
    init_query_tile(c, batch, row->row, &tile);
    row->query = memory;
    row->out = memory + padded;
    memset(memory, 0, 2 * padded * sizeof(real));
    read_row(c, row_address(c, &c->q, batch, row->head, row->row), row->query);
    row->max_score = LOWEST;
    row->weight_sum = 0;
    row->position = tile.first_position;
    row->first_visible_key = tile.first_visible_key;
    row->segment_id = c->segment_ids ? c->segment_ids[batch * c->k_len + row->position] : 0;
}

/* Write the output and the log-sum-exp of a row. `first_key` is the first key that was read. */
static void finish_row(const Call *c, int64_t batch, DecodeRow *row, int64_t first_key) {
    const int64_t head_index = batch * c->heads + row->head;
    for (int t = 0; t < c->dim; t++) row->out[t] /= row->weight_sum;
    write_row(c, row_address(c, &c->out, batch, row->head, row->row), row->out);
    c->lse[head_index * c->q_len + row->row] = (double)row->max_score + log((double)row->weight_sum);
    /* All queries of the call belong to one query tile. */
    c->first_keys[head_index] = (int32_t)first_key;
    c->dropped_mass[head_index] = 0;
}

/* Compute one work item of the thread pool: all queries of the query heads that share one key head. */
static void decode_item(void *context, int64_t item, void *scratch) {
    const Call *c = context;
    const int padded = padded_dim(c);
    const int64_t batch = item / c->kv_heads;
    const int64_t kv = item % c->kv_heads; /* the key head */
    const int64_t heads_per_kv_head = c->heads / c->kv_heads;
    const int64_t count = heads_per_kv_head * c->q_len; /* the number of query rows */

    /* Divide the scratch memory. */
    real *k_rows = scratch;
    real *v_rows = k_rows + KEY_BLOCK * padded;
    real *scores = v_rows + KEY_BLOCK * padded;
    real *block_out = scores + KEY_BLOCK;
    real *row_memory = block_out + padded;
    DecodeRow *rows = (DecodeRow *)(row_memory + count * 2 * padded);

    int64_t first_visible_key = c->k_len - 1;
    for (int64_t i = 0; i < count; i++) {
        rows[i].head = kv * heads_per_kv_head + i / c->q_len;
        rows[i].row = i % c->q_len;
        begin_row(c, batch, &rows[i], row_memory + i * 2 * padded);
        first_visible_key = smaller_of(first_visible_key, rows[i].first_visible_key);
    }

    /* Read the blocks from the last block to the block with the first visible key. */
    const int64_t first_key = first_visible_key / KEY_BLOCK * KEY_BLOCK;
    const int64_t last_block_start = (c->k_len - 1) / KEY_BLOCK * KEY_BLOCK;
    for (int64_t start = last_block_start; start >= first_key; start -= KEY_BLOCK) {
        const int key_count = (int)smaller_of(KEY_BLOCK, c->k_len - start);
        const real *k = read_rows(c, &c->k, batch, kv, start, KEY_BLOCK, c->k_len, k_rows);
        const real *v = read_rows(c, &c->v, batch, kv, start, KEY_BLOCK, c->k_len, v_rows);
        for (int64_t i = 0; i < count; i++) {
            const real block_max = compute_row_scores(c, &rows[i], batch, start, key_count, k, scores);
            add_block_to_row(c, &rows[i], key_count, v, scores, block_max, block_out);
        }
    }
    for (int64_t i = 0; i < count; i++) finish_row(c, batch, &rows[i], first_key);
}

#endif
