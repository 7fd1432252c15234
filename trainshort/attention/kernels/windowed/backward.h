/* The backward pass of attention.
 *
 * The attention weights are recomputed from the log-sum-exp, for the keys that the forward pass read. The products are
 *
 *     dV = P^T dO        dP = dO V^T        dS = P (dP - dO.O)        dK = dS^T Q        dQ = dS K
 *
 * P are the attention weights, and S are the scores. The gradient of a distance table is the sum of dS over each
 * diagonal. The gradient of the cumulative log decay is, for each token, the sum of its row of dS minus the sum of its
 * column. The sums of the rows are zero except for rounding errors. The sums are included, so that the result is
 * exactly the gradient of the computed scores, and rounding errors do not add up over the text.
 *
 * A work item is a range of RANGE_KEYS keys of one key head. The item computes dK and dV of these keys, and processes
 * all queries that read one of the keys. Each item computes a part of dQ. The parts are added in the order of the key
 * ranges: an item waits until all earlier items have added their part for a block of queries. The gradient of a table
 * is added in the same order. The result therefore does not depend on the number of threads or on timing, and all
 * threads add to the same dQ.
 */
#ifndef TRAINSHORT_BACKWARD_H
#define TRAINSHORT_BACKWARD_H

#include <sched.h>

#include "query_tile.h"

enum {
    /* The number of keys in a key range. */
    RANGE_KEYS = 4 * KEY_BLOCK,
    /* The progress of a key range that is complete. */
    FINISHED = INT32_MAX,
};

typedef struct {
    const Call *call;
    /* (batch, kv_heads, key ranges) the number of query blocks that are done, over all query heads of a key head */
    atomic_int *progress;
    int64_t range_count;
} BackwardContext;

/* A block of ROWS_PER_ITEM queries of one head. */
typedef struct {
    QueryTile tiles[TILES_PER_ITEM];
    int tile_count;
    int64_t first_keys[TILES_PER_ITEM];                 /* the first key that each tile read in the forward pass */
    /* The log-sum-exp is the sum of two reals. */
    vec lse_high[TILES_PER_ITEM][TILE_VECTORS], lse_low[TILES_PER_ITEM][TILE_VECTORS];
    vec grad_out_dot_out[TILES_PER_ITEM][TILE_VECTORS];
    const real *q, *grad_out;                           /* [query][dim] */
    real *q_tiles, *grad_out_tiles, *grad_q_tiles;      /* [tile][dim][query] */
    real *weights, *grad_scores;                        /* [tile][key][query] P and dS */
    vec grad_decay[TILES_PER_ITEM][TILE_VECTORS];       /* sums of the rows of dS over the keys of the range */
} QueryBlock;

/* The keys of one work item. */
typedef struct {
    const real *k, *v;      /* [key][dim] */
    real *grad_k, *grad_v;  /* [key][dim] */
    real *grad_table;       /* [query head of the key head][TABLE_PADDING + distance] gradient of the table, or NULL */
    double *grad_decay;     /* [key] sums of the columns of dS of one query head, or NULL */
    int64_t start, key_count;
} KeyRange;

/* Read a block of queries from the row `row` on. `block->tile_count` must be set. */
static void load_query_block(const Call *c, int64_t batch, int64_t head, int64_t row, QueryBlock *block,
                             real *scratch) {
    const int padded = padded_dim(c);
    const int64_t head_start = (batch * c->heads + head) * c->q_len; /* the index of row 0 in (batch, heads, q_len) */
    const int64_t tile_size = padded * QUERY_TILE;

    /* Divide the scratch memory. */
    real *q = scratch;
    real *grad_out = q + TILES_PER_ITEM * tile_size;
    block->q_tiles = grad_out + TILES_PER_ITEM * tile_size;
    block->grad_out_tiles = block->q_tiles + TILES_PER_ITEM * tile_size;
    block->grad_q_tiles = block->grad_out_tiles + TILES_PER_ITEM * tile_size;
    block->weights = block->grad_q_tiles + TILES_PER_ITEM * tile_size;
    block->grad_scores = block->weights + TILES_PER_ITEM * KEY_BLOCK * QUERY_TILE;

    block->q = read_rows(c, &c->q, batch, head, row, ROWS_PER_ITEM, c->q_len, q);
    block->grad_out = read_rows(c, &c->grad_out, batch, head, row, ROWS_PER_ITEM, c->q_len, grad_out);
    memset(block->grad_q_tiles, 0, TILES_PER_ITEM * tile_size * sizeof(real));
    memset(block->grad_decay, 0, sizeof block->grad_decay);
    for (int p = 0; p < block->tile_count; p++) {
        transpose_to_tile(block->q + p * tile_size, padded, block->q_tiles + p * tile_size);
        transpose_to_tile(block->grad_out + p * tile_size, padded, block->grad_out_tiles + p * tile_size);
        for (int i = 0; i < QUERY_TILE; i++) {
            const int64_t tile_row = row + p * QUERY_TILE + i;
            /* The log-sum-exp of padding rows is infinite, so that all their weights are 0. */
            const int is_real_row = tile_row < c->q_len;
            const SplitDouble lse =
                is_real_row ? split_double(c->lse[head_start + tile_row]) : (SplitDouble){INFINITY, 0};
            const real grad_out_dot_out = is_real_row ? c->grad_out_dot_out[head_start + tile_row] : 0;
            block->lse_high[p][i / LANES][i % LANES] = lse.high;
            block->lse_low[p][i / LANES][i % LANES] = lse.low;
            block->grad_out_dot_out[p][i / LANES][i % LANES] = grad_out_dot_out;
        }
    }
}

/* Return how many keys of a block a tile read in the forward pass, counted from `first_key` on.
 *
 * The block of keys starts at `start`. The number is rounded up to a multiple of four, because `compute_dots` computes
 * four keys at a time. */
INLINE int count_keys_read(const QueryBlock *block, int p, int64_t start, int64_t first_key) {
    const int64_t end = start + count_visible_keys(&block->tiles[p], start);
    return (int)blocks_of(larger_of(0, end - first_key), 4) * 4;
}

/* Compute the weights P and the score gradients dS of tile `p` for the keys from `start` on. */
static void compute_grad_scores(const Call *c, int64_t batch, HeadBias bias, const QueryBlock *block, int p,
                                const real *k, const real *v, int64_t start, int key_count) {
    const int padded = padded_dim(c);
    const QueryTile *tile = &block->tiles[p];
    real *weights = block->weights + p * KEY_BLOCK * QUERY_TILE;
    real *grad_scores = block->grad_scores + p * KEY_BLOCK * QUERY_TILE;
    compute_dots(block->q_tiles + p * padded * QUERY_TILE, k, padded, padded, key_count, weights);
    compute_dots(block->grad_out_tiles + p * padded * QUERY_TILE, v, padded, padded, key_count, grad_scores);
    add_bias(tile, (real)c->scale, bias, start, key_count, weights);
    if (needs_mask(c, tile, start, key_count)) mask_scores(c, tile, batch, start, key_count, weights);
    for (int j = 0; j < key_count; j++)
        for (int w = 0; w < TILE_VECTORS; w++) {
            const int64_t index = j * QUERY_TILE + w * LANES;
            const vec weight = exp_below_zero((load(weights + index) - block->lse_high[p][w]) - block->lse_low[p][w]);
            const vec grad_score = weight * (load(grad_scores + index) - block->grad_out_dot_out[p][w]);
            store(weights + index, weight);
            /* The gradient is 0 if the weight is 0, also if the value of the key is NaN. */
            store(grad_scores + index, (vec)((ivec)grad_score & (weight != 0)));
        }
}

/* Add the score gradients of a tile to the gradient of a distance table. The score gradients of hidden keys are 0. */
static void add_table_gradient(const QueryTile *tile, int64_t start, int key_count, const real *grad_scores,
                               real *grad_table) {
    for (int j = 0; j < key_count; j++)
        for (int w = 0; w < TILE_VECTORS; w++) {
            real *target = grad_table + TABLE_PADDING + tile->first_position - (start + j) + w * LANES;
            store(target, load(target) + load(grad_scores + j * QUERY_TILE + w * LANES));
        }
}

/* Add the score gradients of a tile to the sums over the keys (`row_sums`) and the sums over the queries
 * (`column_sums`). The gradient of the cumulative log decay is computed from these sums. */
static void add_decay_gradient(int key_count, const real *grad_scores, vec *row_sums, double *column_sums) {
    for (int j = 0; j < key_count; j++) {
        vec column = {0};
        for (int w = 0; w < TILE_VECTORS; w++) {
            const vec grad_score = load(grad_scores + j * QUERY_TILE + w * LANES);
            row_sums[w] += grad_score;
            column += grad_score;
        }
        column_sums[j] += sum_lanes(column);
    }
}

/* Compute the gradients of a block of queries and the block of keys that starts at `start`. */
static void process_key_block(const Call *c, int64_t batch, int64_t head, QueryBlock *block, const KeyRange *range,
                              int64_t start) {
    const int padded = padded_dim(c);
    const int64_t tile_size = padded * QUERY_TILE;
    const int64_t head_in_group = head % (c->heads / c->kv_heads); /* the index among the heads of the key head */
    real *grad_table = range->grad_table ? range->grad_table + head_in_group * padded_table_length(c) : NULL;
    for (int p = 0; p < block->tile_count; p++) {
        const int64_t first_key = larger_of(start, block->first_keys[p]);
        const int64_t offset = (first_key - range->start) * padded;
        const int key_count = count_keys_read(block, p, start, first_key);
        if (!key_count) continue;
        const real *k = range->k + offset;
        const real *v = range->v + offset;
        const real *weights = block->weights + p * KEY_BLOCK * QUERY_TILE;
        const real *grad_scores = block->grad_scores + p * KEY_BLOCK * QUERY_TILE;
        compute_grad_scores(c, batch, bias_of_head(c, batch, head), block, p, k, v, first_key, key_count);
        if (grad_table) add_table_gradient(&block->tiles[p], first_key, key_count, grad_scores, grad_table);
        if (range->grad_decay)
            add_decay_gradient(key_count, grad_scores, block->grad_decay[p],
                               range->grad_decay + (first_key - range->start));
        add_weighted_rows(block->grad_q_tiles + p * tile_size, k, padded, padded, key_count, grad_scores);
        add_key_gradients(range->grad_v + offset, block->grad_out + p * tile_size, padded, key_count, weights);
        add_key_gradients(range->grad_k + offset, block->q + p * tile_size, padded, key_count, grad_scores);
    }
}

/* Add the query gradients that a key range contributes to the results of the call.
 *
 * The results are dQ and, with a decay bias, the gradient of the decay of the queries. The tensor grad_q has the type
 * `real` for every dtype of the inputs. */
static void store_query_gradients(const Call *c, int64_t batch, int64_t head, int64_t row, const QueryBlock *block) {
    const int padded = padded_dim(c);
    for (int p = 0; p < block->tile_count; p++)
        for (int i = 0; i < block->tiles[p].row_count; i++) {
            const Tensor *grad_q = &c->grad_q;
            const int64_t token = row + p * QUERY_TILE + i;
            const int64_t offset =
                batch * grad_q->batch_stride + head * grad_q->head_stride + token * grad_q->token_stride;
            real *target = (real *)grad_q->data + offset;
            const real *source = block->grad_q_tiles + p * padded * QUERY_TILE + i;
            for (int t = 0; t < c->dim; t++) target[t] += (real)c->scale * source[t * QUERY_TILE];
            if (c->cumulative_decay) {
                const int64_t query = (batch * c->heads + head) * c->q_len + token;
                c->grad_decay_queries[query] += block->grad_decay[p][i / LANES][i % LANES];
            }
        }
}

/* Initialize the tiles of a block of queries. Return whether some tile read a key of the range in the forward pass. */
static int init_tiles(const Call *c, int64_t batch, int64_t head, int64_t row, const KeyRange *range,
                      QueryBlock *block) {
    int reads_range = 0;
    block->tile_count = 0;
    for (int64_t tile_row = row; tile_row < smaller_of(row + ROWS_PER_ITEM, c->q_len); tile_row += QUERY_TILE) {
        const int p = block->tile_count++;
        init_query_tile(c, batch, tile_row, &block->tiles[p]);
        const int64_t tile_index = (batch * c->heads + head) * query_tile_count(c) + tile_row / QUERY_TILE;
        block->first_keys[p] = c->first_keys[tile_index];
        const int starts_before_end = block->first_keys[p] < range->start + range->key_count;
        const int ends_after_start = block->tiles[p].last_position >= range->start;
        reads_range |= starts_before_end && ends_after_start;
    }
    return reads_range;
}

/* Add the table gradients that a key range contributes to the results of the call, for all query heads of a key head.
 *
 * `first_head` is the first of these query heads. */
static void store_table_gradients(const Call *c, int64_t batch, int64_t first_head, const KeyRange *range) {
    for (int64_t g = 0; g < c->heads / c->kv_heads; g++) {
        double *target = c->grad_table + (batch * c->heads + first_head + g) * c->k_len;
        const real *source = range->grad_table + g * padded_table_length(c) + TABLE_PADDING;
        for (int64_t distance = 0; distance < c->k_len - range->start; distance++) target[distance] += source[distance];
    }
}

/* Wait until the progress of all earlier key ranges is larger than `step`.
 *
 * `progress` holds the number of steps that each key range has done. `range_index` is the index of this key range. */
static void wait_for_earlier_ranges(atomic_int *progress, int64_t range_index, int step) {
    for (int64_t earlier = range_index - 1; earlier >= 0; earlier--)
        while (atomic_load_explicit(&progress[earlier], memory_order_acquire) <= step) sched_yield();
}

/* Compute one work item of the thread pool: a range of keys of one key head, with all query heads that share the key
 * head.
 *
 * An item waits only for items with a smaller number. The thread pool starts the items in the order of their
 * numbers. */
static void backward_item(void *context, int64_t item, void *memory) {
    const BackwardContext *backward = context;
    real *scratch = memory;
    const Call *c = backward->call;
    const int padded = padded_dim(c);
    const int64_t pairs = c->batches * c->kv_heads; /* pairs of a batch entry and a key head */
    const int64_t pair = item % pairs;
    const int64_t range_index = item / pairs;
    const int64_t batch = pair / c->kv_heads;
    const int64_t kv = pair % c->kv_heads;
    const int64_t heads_per_kv_head = c->heads / c->kv_heads;
    const int64_t blocks_per_head = blocks_of(c->q_len, ROWS_PER_ITEM);
    atomic_int *progress = backward->progress + pair * backward->range_count;

    KeyRange range = {.start = range_index * RANGE_KEYS, .grad_k = scratch, .grad_v = scratch + RANGE_KEYS * padded};
    range.key_count = smaller_of(RANGE_KEYS, c->k_len - range.start);
    real *k = range.grad_v + RANGE_KEYS * padded;
    real *v = k + RANGE_KEYS * padded;
    real *query_scratch = v + RANGE_KEYS * padded;
    range.k = read_rows(c, &c->k, batch, kv, range.start, RANGE_KEYS, c->k_len, k);
    range.v = read_rows(c, &c->v, batch, kv, range.start, RANGE_KEYS, c->k_len, v);
    memset(range.grad_k, 0, 2 * RANGE_KEYS * padded * sizeof(real)); /* grad_v follows grad_k in memory */
    if (c->grad_table) {
        range.grad_table = query_scratch;
        query_scratch += heads_per_kv_head * padded_table_length(c);
        memset(range.grad_table, 0, heads_per_kv_head * padded_table_length(c) * sizeof(real));
    }

    QueryBlock query_block;
    double grad_decay[RANGE_KEYS];
    range.grad_decay = c->cumulative_decay ? grad_decay : NULL;
    /* Queries before this block see no key of the range. */
    const int64_t first_block = larger_of(0, range.start - position_of_row(c, 0)) / ROWS_PER_ITEM;
    for (int64_t g = 0; g < heads_per_kv_head; g++) {
        const int64_t head = kv * heads_per_kv_head + g;
        memset(grad_decay, 0, sizeof grad_decay);
        for (int64_t block = first_block; block < blocks_per_head; block++) {
            const int64_t row = block * ROWS_PER_ITEM;
            const int64_t step = g * blocks_per_head + block;
            if (!init_tiles(c, batch, head, row, &range, &query_block)) continue;
            load_query_block(c, batch, head, row, &query_block, query_scratch);
            for (int64_t start = range.start; start < range.start + range.key_count; start += KEY_BLOCK)
                process_key_block(c, batch, head, &query_block, &range, start);
            /* The earlier key ranges must add their part of dQ first. */
            wait_for_earlier_ranges(progress, range_index, (int)step);
            store_query_gradients(c, batch, head, row, &query_block);
            atomic_store_explicit(&progress[range_index], (int)step + 1, memory_order_release);
        }
        for (int64_t j = 0; c->cumulative_decay && j < range.key_count; j++)
            c->grad_decay_keys[(batch * c->heads + head) * c->k_len + range.start + j] = -grad_decay[j];
    }
    if (c->grad_table) {
        wait_for_earlier_ranges(progress, range_index, FINISHED - 1);
        store_table_gradients(c, batch, kv * heads_per_kv_head, &range);
    }
    atomic_store_explicit(&progress[range_index], FINISHED, memory_order_release);
    for (int64_t j = 0; j < range.key_count; j++) {
        for (int t = 0; t < c->dim; t++) range.grad_k[j * padded + t] *= (real)c->scale;
        write_row(c, row_address(c, &c->grad_k, batch, kv, range.start + j), range.grad_k + j * padded);
        write_row(c, row_address(c, &c->grad_v, batch, kv, range.start + j), range.grad_v + j * padded);
    }
}

/* Compute the dot product of each row of grad_out and out, for one head. This is one work item of the thread pool. */
static void grad_out_dot_out_item(void *context, int64_t item, void *memory) {
    const Call *c = ((const BackwardContext *)context)->call;
    const int64_t batch = item / c->heads;
    const int64_t head = item % c->heads;
    real *out = memory;
    real *grad_out = out + padded_dim(c);
    for (int64_t i = 0; i < c->q_len; i++) {
        read_row(c, row_address(c, &c->out, batch, head, i), out);
        read_row(c, row_address(c, &c->grad_out, batch, head, i), grad_out);
        /* The backward pass subtracts this dot product from a similar number if an attention weight is near 1. The dot
         * product is therefore computed in double precision. */
        double sum[4] = {0}; /* independent sums, so that the processor can compute them at the same time */
        for (int t = 0; t < c->dim; t++) sum[t % 4] += (double)out[t] * grad_out[t];
        c->grad_out_dot_out[item * c->q_len + i] = (real)((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
}

#endif
