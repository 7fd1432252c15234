/* The forward pass of attention with skipped keys.
 *
 * Each query tile reads its keys block by block, from the nearest block to the most distant block, with a running
 * softmax. Before a block is read, the bound in bound.h is evaluated for all keys before the block. If these keys may
 * be skipped for every row of the tile, the block is the last one that the tile reads. The condition is
 *
 *     bound on the skipped softmax sum  <=  tolerance * softmax sum of the keys that were read so far
 *
 * The last block is read only in part. Groups of KEY_GROUP keys are skipped, starting with the most distant group, as
 * long as the condition holds for the skipped keys of the block as well. For example, with blocks of 8 keys and the
 * rows 17 to 19:
 *
 *     read 16 ... 19  |  keys 0 ... 7 may be skipped, keys 8 ... 11 may be skipped as well  |  read 12 ... 15, stop
 *
 * In a steep head, the diagonal block is read in two parts, because the condition can hold only after every row has
 * read its own key.
 */
#ifndef TRAINSHORT_FORWARD_H
#define TRAINSHORT_FORWARD_H

#include "bound.h"
#include "query_tile.h"

typedef struct {
    const Call *call;
    Bound *bounds; /* (batch, heads) */
} ForwardContext;

/* The running softmax of one query tile. */
typedef struct {
    QueryTile tile;
    real *queries, *out;                            /* [dim][query] */
    vec max_score[TILE_VECTORS];
    vec weight_sum[TILE_VECTORS];                   /* sum of exp(score - max_score) */
    int64_t first_key;                              /* the first key that was read so far */
    real dropped_mass;
    int is_done;

    /* The following fields are used only if there is a bound. */
    real *centroid_scores;                          /* [centroid][query] q.c in bound.h */
    vec query_norm[TILE_VECTORS];                   /* rounded up */
    QueryPlacement placements[TILE_VECTORS];
    int last_blocking_centroid;                     /* the centroid whose keys could not be skipped the last time */
} TileState;

/* Initialize the running softmax of a query tile. `rows` are the queries as [query][dim].
 *
 * `state->tile` and the pointers of `state` must be set. */
static void begin_tile(const Call *c, const Bound *bound, TileState *state, const real *rows) {
    const int padded = padded_dim(c);
    const int count = bound->key_centroids.count;
    transpose_to_tile(rows, padded, state->queries);
    memset(state->out, 0, padded * QUERY_TILE * sizeof(real));
    for (int w = 0; w < TILE_VECTORS; w++) {
        state->max_score[w] = broadcast(LOWEST);
        state->weight_sum[w] = (vec){0};
    }
    state->first_key = larger_of(state->tile.first_position, 0);
    state->dropped_mass = 0;
    state->is_done = 0;
    state->last_blocking_centroid = 0;
    if (!bound->exists) return;

    const int64_t first_row = state->tile.first_position - position_of_row(c, 0);
    for (int w = 0; w < TILE_VECTORS; w++) {
        vec square = {0};
        for (int t = 0; t < padded; t++) {
            const vec q = load(state->queries + t * QUERY_TILE + w * LANES);
            square += q * q;
        }
        vec norm;
        for (int i = 0; i < LANES; i++) norm[i] = (real)sqrt(square[i]);
        state->query_norm[w] = norm * (1 + relative_rounding_error(c->dim));
        state->placements[w] = load_placement(bound, first_row + w * LANES);
    }
    compute_dots(state->queries, bound->key_centroids.vectors, padded, padded, count, state->centroid_scores);
    /* Padding rows get -infinity, so that they never prevent keys from being skipped. */
    for (int i = 0; i < count * QUERY_TILE; i++) {
        const int is_real_row = i % QUERY_TILE < state->tile.row_count;
        state->centroid_scores[i] = is_real_row ? state->centroid_scores[i] * (real)c->scale : -INFINITY;
    }
}

/* Update the running softmax for `key_count` keys. The scores are replaced by the weights exp(score - max_score).
 *
 * If the largest score of a query changes, the earlier sum of weights and the earlier output are scaled. */
static void update_softmax(TileState *state, int padded, int key_count, real *restrict scores) {
    vec max_score[TILE_VECTORS], sum[TILE_VECTORS];
    ivec has_changed = {0};
    for (int w = 0; w < TILE_VECTORS; w++) {
        max_score[w] = state->max_score[w];
        sum[w] = (vec){0};
    }
    for (int j = 0; j < key_count; j++)
        for (int w = 0; w < TILE_VECTORS; w++)
            max_score[w] = larger(load(scores + j * QUERY_TILE + w * LANES), max_score[w]);
    for (int w = 0; w < TILE_VECTORS; w++) has_changed |= max_score[w] != state->max_score[w];
    if (any(has_changed))
        for (int w = 0; w < TILE_VECTORS; w++) {
            const vec factor = exp_below_zero(state->max_score[w] - max_score[w]);
            state->weight_sum[w] *= factor;
            state->max_score[w] = max_score[w];
            for (int t = 0; t < padded; t++) {
                real *target = state->out + t * QUERY_TILE + w * LANES;
                store(target, load(target) * factor);
            }
        }
    for (int j = 0; j < key_count; j++)
        for (int w = 0; w < TILE_VECTORS; w++) {
            real *target = scores + j * QUERY_TILE + w * LANES;
            const vec weight = exp_below_zero(load(target) - max_score[w]);
            sum[w] += weight;
            store(target, weight);
        }
    for (int w = 0; w < TILE_VECTORS; w++) state->weight_sum[w] += sum[w];
}

/* Add the weighted values of visible keys to the output of a tile.
 *
 * This function replaces `add_weighted_rows` for blocks that contain infinite or NaN values. In these blocks, the
 * product of a hidden value and its weight 0 would be NaN. */
static void add_visible_values(const Call *c, TileState *state, int64_t batch, const real *v, int64_t start,
                               int key_count, const real *weights) {
    const int padded = padded_dim(c);
    for (int j = 0; j < key_count; j++)
        for (int w = 0; w < TILE_VECTORS; w++) {
            const ivec hidden = hidden_rows(c, &state->tile, batch, start + j, w);
            for (int t = 0; t < padded; t++) {
                real *target = state->out + t * QUERY_TILE + w * LANES;
                const vec term = v[j * padded + t] * load(weights + j * QUERY_TILE + w * LANES);
                store(target, load(target) + select_lanes(hidden, broadcast(0), term));
            }
        }
}

/* Add the keys from `start` to `end` - 1 to the running softmax.
 *
 * The keys must lie in one block. `k` and `v` are the rows of the block. `scores` is scratch memory. */
static void process_keys(const Call *c, const Bound *bound, HeadBias bias, TileState *state, int64_t batch,
                         int64_t start, int64_t end, const real *k, const real *v, real *scores) {
    const int padded = padded_dim(c);
    const int key_count = (int)(end - start);
    const int64_t offset = start % KEY_BLOCK * padded; /* the offset of the first key within the block */
    const int is_masked = needs_mask(c, &state->tile, start, key_count);
    compute_dots(state->queries, k + offset, padded, padded, key_count, scores);
    add_bias(&state->tile, (real)c->scale, bias, start, key_count, scores);
    if (is_masked) mask_scores(c, &state->tile, batch, start, key_count, scores);
    update_softmax(state, padded, key_count, scores);
    if (is_masked && bound->is_faulty[start / KEY_BLOCK])
        add_visible_values(c, state, batch, v + offset, start, key_count, scores);
    else
        add_weighted_rows(state->out, v + offset, padded, padded, key_count, scores);
    state->first_key = start;
}

/* Compute the bias from each row i of a tile to a boundary B between two keys: -m(i - B) with the slope m.
 *
 * With a decay bias, the result is c[i] - c[B]. With a table, the result is the largest bias of any key before the
 * boundary. `bias` receives the results. */
static void bias_to_boundary(const Call *c, const Bound *bound, const QueryTile *tile, int64_t boundary, vec *bias) {
    if (bound->table_suffix_max) {
        for (int i = 0; i < QUERY_TILE; i++) {
            const int64_t position = smaller_of(tile->first_position + i, tile->last_position);
            /* No key lies before boundary 0, so the index of the table can be limited to its last distance. */
            const int64_t nearest_distance = position - boundary + 1;
            const int64_t index = smaller_of(larger_of(nearest_distance, 0), c->k_len - 1);
            const real largest_bias = bound->table_suffix_max[index];
            /* Rounding errors of sums with the bias are proportional to the bias. 2.4e-6 is twenty times the machine
             * epsilon of a float. */
            bias[i / LANES][i % LANES] = largest_bias + (real)fabs(largest_bias) * (real)2.4e-6;
        }
        return;
    }
    if (!bound->cumulative_decay) {
        for (int w = 0; w < TILE_VECTORS; w++) bias[w] = -bound->slope * distances_to_key(tile, boundary, w);
        return;
    }
    for (int i = 0; i < QUERY_TILE; i++) {
        const int64_t position = smaller_of(tile->first_position + i, tile->last_position);
        bias[i / LANES][i % LANES] = (real)(bound->cumulative_decay[position] - bound->cumulative_decay[boundary]);
    }
}

/* Return whether every row may skip all keys before a block.
 *
 * `bias` is the bias from each row to the start of the block. If the result is true, `skipped_sum` is an upper bound
 * on the softmax sum of the skipped keys of each row. The test starts with the centroid that failed the last time,
 * because the same centroid often fails again. */
static int can_skip_keys_before(const Call *c, const Bound *bound, TileState *state, int64_t block, const vec *bias,
                                vec *skipped_sum) {
    const int count = bound->key_centroids.count;
    const int cells = cell_count(bound);
    const real *tails = bound->tails + block * count * cells;
    vec offset[TILE_VECTORS];
    for (int w = 0; w < TILE_VECTORS; w++) {
        /* exp_below_zero rounds results below FLT_MIN to 0. The initial value is at least as large as the sum of all
         * results that can be rounded to 0. */
        skipped_sum[w] = broadcast((count + KEY_BLOCK) * (real)FLT_MIN);
        offset[w] = bound->rounding_margin + bias[w] - state->max_score[w];
    }
    for (int i = 0; i < count; i++) {
        const int n = (state->last_blocking_centroid + i) % count;
        for (int w = 0; w < TILE_VECTORS; w++) {
            const vec tail = interpolate_tail(bound, tails + n * cells, &state->placements[w]);
            const vec exponent = tail + load(state->centroid_scores + n * QUERY_TILE + w * LANES) + offset[w];
            skipped_sum[w] += exp_below_zero(exponent);
            /* exp_below_zero is valid only for exponents of at most 0. The comparisons are false for NaN. */
            const ivec is_small =
                (exponent <= 0) & (skipped_sum[w] <= (real)c->tolerance * state->weight_sum[w]);
            if (any(~is_small)) {
                state->last_blocking_centroid = n;
                return 0;
            }
        }
    }
    return 1;
}

/* Return whether every row may also skip the KEY_GROUP keys from `first_key` on.
 *
 * The upper bounds of the softmax terms of these keys are added to `skipped_sum`. `bias` is the bias from each row to
 * the start of the block that contains the keys. */
static int can_skip_key_group(const Call *c, const Bound *bound, const TileState *state, int64_t first_key,
                              const vec *bias, vec *skipped_sum) {
    const int64_t block_start = first_key / KEY_BLOCK * KEY_BLOCK;
    ivec is_small = broadcast(0) == 0; /* true in all lanes */
    for (int64_t key = first_key; key < first_key + KEY_GROUP; key++) {
        const real *centroid_score = state->centroid_scores + bound->nearest_key_centroid[key] * QUERY_TILE;
        /* The bias from the start of the block to the key. */
        const real bias_in_block =
            bound->cumulative_decay
                ? (real)(bound->cumulative_decay[block_start] - bound->cumulative_decay[smaller_of(key, c->k_len - 1)])
                : bound->slope * (real)(key - block_start);
        vec table_bias[TILE_VECTORS];
        if (bound->table_suffix_max) bias_to_boundary(c, bound, &state->tile, key + 1, table_bias);
        for (int w = 0; w < TILE_VECTORS; w++) {
            const vec key_bias = bound->table_suffix_max ? table_bias[w] : bias[w] + bias_in_block;
            const vec score =
                load(centroid_score + w * LANES) + state->query_norm[w] * bound->key_distance[key] + key_bias;
            const vec exponent = score + (bound->rounding_margin - state->max_score[w]);
            skipped_sum[w] += exp_below_zero(exponent);
            is_small &= (exponent <= 0) & (skipped_sum[w] <= (real)c->tolerance * state->weight_sum[w]);
        }
    }
    return !any(~is_small);
}

/* Return the first key of a block that the tile must read. Only keys before `end` are considered.
 *
 * The result is `end` if no key of the block must be read. If the keys before the block cannot be skipped, the result
 * is the start of the block. Otherwise the tile is done, and `state->dropped_mass` is set. */
static int64_t find_first_needed_key(const Call *c, const Bound *bound, TileState *state, int64_t block, int64_t end) {
    const int64_t start = block * KEY_BLOCK;
    if (!bound->exists) return start;

    vec bias[TILE_VECTORS], skipped_sum[TILE_VECTORS];
    bias_to_boundary(c, bound, &state->tile, start, bias);
    if (!can_skip_keys_before(c, bound, state, block, bias, skipped_sum)) return start;

    /* All keys before the block can be skipped. Now skip groups of keys at the start of the block. */
    vec max_skipped_mass = {0};
    int64_t key = start;
    for (int w = 0; w < TILE_VECTORS; w++)
        max_skipped_mass = larger(skipped_sum[w] / state->weight_sum[w], max_skipped_mass);
    while (!bound->is_faulty[block] && key < end && can_skip_key_group(c, bound, state, key, bias, skipped_sum)) {
        for (int w = 0; w < TILE_VECTORS; w++)
            max_skipped_mass = larger(skipped_sum[w] / state->weight_sum[w], max_skipped_mass);
        key += KEY_GROUP;
    }
    state->is_done = 1;
    state->dropped_mass = 0;
    if (key == 0) return key; /* No key is skipped. */

    /* If a key is skipped, the dropped mass must not be 0. */
    state->dropped_mass = (real)FLT_MIN;
    for (int i = 0; i < LANES; i++)
        if (max_skipped_mass[i] > state->dropped_mass) state->dropped_mass = max_skipped_mass[i];
    return key;
}

/* Find the keys of one block that the tile must read, and add them to the running softmax. */
static void process_block(const Call *c, const Bound *bound, HeadBias bias, TileState *state, int64_t batch,
                          int64_t block, const real *k, const real *v, real *scores) {
    const int64_t start = block * KEY_BLOCK;
    /* The group of keys that contains the key of the first row. */
    const int64_t diagonal = larger_of(start, state->tile.first_position / KEY_GROUP * KEY_GROUP);
    int64_t end = start + count_visible_keys(&state->tile, start);
    if (diagonal < end && bound->exists && bound->is_steep) {
        /* In a steep head, the keys on the diagonal are read first. See the top of this file. */
        process_keys(c, bound, bias, state, batch, diagonal, end, k, v, scores);
        end = diagonal;
    }
    const int64_t first_key = end > start ? find_first_needed_key(c, bound, state, block, end) : start;
    if (first_key < end) process_keys(c, bound, bias, state, batch, first_key, end, k, v, scores);
    /* No row sees a key before the first visible key. */
    state->is_done |= start <= state->tile.first_visible_key;
}

/* Write the results of the tile whose first query is `row`. `out_row` is scratch memory for one row. */
static void finish_tile(const Call *c, TileState *state, int64_t batch, int64_t head, int64_t row, real *out_row) {
    const int padded = padded_dim(c);
    const int64_t head_index = batch * c->heads + head;
    const int64_t tile_index = head_index * query_tile_count(c) + row / QUERY_TILE;
    c->first_keys[tile_index] = (int32_t)state->first_key;
    c->dropped_mass[tile_index] = (float)state->dropped_mass;
    for (int i = 0; i < state->tile.row_count; i++) {
        const real sum = state->weight_sum[i / LANES][i % LANES];
        const real max_score = state->max_score[i / LANES][i % LANES];
        for (int t = 0; t < padded; t++) out_row[t] = state->out[t * QUERY_TILE + i] / sum;
        write_row(c, row_address(c, &c->out, batch, head, row + i), out_row);
        c->lse[head_index * c->q_len + row + i] = (double)max_score + log((double)sum);
    }
}

/* Compute one work item of the thread pool: ROWS_PER_ITEM queries of one head. */
static void forward_item(void *context, int64_t item, void *scratch) {
    const ForwardContext *forward = context;
    const Call *c = forward->call;
    const int padded = padded_dim(c);
    const int64_t items_per_head = blocks_of(c->q_len, ROWS_PER_ITEM);
    const int64_t head_index = item / items_per_head; /* the index in (batch, heads) */
    const int64_t batch = head_index / c->heads;
    const int64_t head = head_index % c->heads;
    const int64_t kv = kv_head_of(c, head);
    /* The last queries read the most keys. They come first, so that no thread ends with a long item. */
    const int64_t row = (items_per_head - 1 - item % items_per_head) * ROWS_PER_ITEM;
    const Bound *bound = &forward->bounds[head_index];
    const HeadBias bias = bias_of_head(c, batch, head);

    /* Divide the scratch memory. */
    real *k_rows = scratch;
    real *v_rows = k_rows + KEY_BLOCK * padded;
    real *scores = v_rows + KEY_BLOCK * padded;
    real *tile_memory = scores + KEY_BLOCK * QUERY_TILE;

    TileState states[TILES_PER_ITEM];
    const int64_t tile_size = (2 * padded + key_centroid_count(c)) * QUERY_TILE;
    int count = 0; /* the number of tiles */
    for (; count < TILES_PER_ITEM && row + count * QUERY_TILE < c->q_len; count++) {
        TileState *state = &states[count];
        state->queries = tile_memory + count * tile_size;
        state->out = state->queries + padded * QUERY_TILE;
        state->centroid_scores = state->out + padded * QUERY_TILE;
        const int64_t tile_row = row + count * QUERY_TILE;
        init_query_tile(c, batch, tile_row, &state->tile);
        const real *q = read_rows(c, &c->q, batch, head, tile_row, QUERY_TILE, c->q_len, k_rows);
        begin_tile(c, bound, state, q);
    }

    /* Read the blocks from the nearest block to the most distant block, until all tiles are done. All tiles of the item
     * share the keys and values of a block. */
    int active_tiles = count;
    const int64_t nearest_block = states[count - 1].tile.last_position / KEY_BLOCK;
    for (int64_t block = nearest_block; active_tiles; block--) {
        const real *k = read_rows(c, &c->k, batch, kv, block * KEY_BLOCK, KEY_BLOCK, c->k_len, k_rows);
        const real *v = read_rows(c, &c->v, batch, kv, block * KEY_BLOCK, KEY_BLOCK, c->k_len, v_rows);
        for (int p = 0; p < count; p++) {
            TileState *state = &states[p];
            if (state->is_done || !count_visible_keys(&state->tile, block * KEY_BLOCK)) continue;
            process_block(c, bound, bias, state, batch, block, k, v, scores);
            active_tiles -= state->is_done;
        }
    }
    for (int p = 0; p < count; p++) finish_tile(c, &states[p], batch, head, row + p * QUERY_TILE, scores);
}

#endif
