/* A query tile: the positions and segments of its rows, the bias and the mask of its scores.
 *
 * Scores are stored as scores[key][query]. */
#ifndef TRAINSHORT_QUERY_TILE_H
#define TRAINSHORT_QUERY_TILE_H

#include "args.h"

/* The number of query tiles, and of query rows, that share one pass over the keys. */
enum { TILES_PER_ITEM = 4, ROWS_PER_ITEM = TILES_PER_ITEM * QUERY_TILE };

typedef struct {
    ivec segment_id[TILE_VECTORS];
    int64_t first_position, last_position; /* key positions of the first and the last row */
    int64_t first_visible_key;             /* no row sees a key before this one (sliding window, segments) */
    int row_count;                         /* the remaining rows of the tile are padding */
} QueryTile;

/* Fill in the positions and segments of the query tile that starts at a row. */
static void init_query_tile(const Call *c, int64_t batch, int64_t row, QueryTile *tile) {
    tile->row_count = (int)smaller_of(QUERY_TILE, c->q_len - row);
    tile->first_position = position_of_row(c, row);
    tile->last_position = tile->first_position + tile->row_count - 1;
    tile->first_visible_key = larger_of(0, tile->first_position - c->window + 1);

    /* The earliest start of a segment to which a row of the tile belongs. */
    int64_t earliest_start = tile->last_position;
    const int32_t *segment_ids = c->segment_ids ? c->segment_ids + batch * c->k_len : NULL;
    for (int i = 0; i < QUERY_TILE; i++) {
        /* Padding rows get the segment of the last row. */
        const int64_t position = smaller_of(tile->first_position + i, tile->last_position);
        tile->segment_id[i / LANES][i % LANES] = segment_ids ? segment_ids[position] : 0;
        if (segment_ids) earliest_start = smaller_of(earliest_start, c->segment_starts[batch * c->k_len + position]);
    }
    if (segment_ids) tile->first_visible_key = larger_of(tile->first_visible_key, earliest_start);
}

/* Return the distances of LANES rows of a tile to a key, starting with row `w` * LANES.
 *
 * The positions are subtracted as integers, because a float cannot represent all positions above 2^24. */
INLINE vec distances_to_key(const QueryTile *tile, int64_t key, int w) {
    vec row;
    for (int i = 0; i < LANES; i++) row[i] = (real)(w * LANES + i);
    return (real)(tile->first_position - key) + row;
}

/* Return how many keys of the block that starts at `start` lie at or before the last row of the tile. */
INLINE int count_visible_keys(const QueryTile *tile, int64_t start) {
    return (int)larger_of(0, smaller_of(KEY_BLOCK, tile->last_position - start + 1));
}

/* Replace each dot product in `scores` by the score with a decay bias: scale * dot + c[row] - c[key].
 *
 * c is the cumulative log decay. The keys are the `key_count` keys from `start` on. */
static void add_decay_bias(const QueryTile *tile, real scale, const double *cumulative_decay, int64_t start,
                           int key_count, real *restrict scores) {
    vec high[TILE_VECTORS], low[TILE_VECTORS];
    for (int i = 0; i < QUERY_TILE; i++) {
        const int64_t position = smaller_of(tile->first_position + i, tile->last_position);
        const SplitDouble row = split_double(cumulative_decay[position]);
        high[i / LANES][i % LANES] = row.high;
        low[i / LANES][i % LANES] = row.low;
    }
    for (int j = 0; j < key_count; j++) {
        const SplitDouble key = split_double(cumulative_decay[smaller_of(start + j, tile->last_position)]);
        for (int w = 0; w < TILE_VECTORS; w++) {
            real *score = scores + j * QUERY_TILE + w * LANES;
            store(score, load(score) * scale + ((high[w] - key.high) + (low[w] - key.low)));
        }
    }
}

/* Replace each dot product in `scores` by the score: scale * dot + bias. The keys are the `key_count` keys from `start`
 * on. */
static void add_bias(const QueryTile *tile, real scale, HeadBias bias, int64_t start, int key_count,
                     real *restrict scores) {
    if (bias.cumulative_decay) {
        add_decay_bias(tile, scale, bias.cumulative_decay, start, key_count, scores);
        return;
    }
    if (bias.table) {
        /* The rows of a tile have consecutive distances to a key, so their biases are consecutive in the table. */
        for (int j = 0; j < key_count; j++)
            for (int w = 0; w < TILE_VECTORS; w++) {
                real *score = scores + j * QUERY_TILE + w * LANES;
                const real *row_biases = bias.table + tile->first_position - (start + j) + w * LANES;
                store(score, load(score) * scale + load(row_biases));
            }
        return;
    }
    for (int j = 0; j < key_count; j++)
        for (int w = 0; w < TILE_VECTORS; w++) {
            real *score = scores + j * QUERY_TILE + w * LANES;
            store(score, load(score) * scale - bias.slope * distances_to_key(tile, start + j, w));
        }
}

/* Return whether some row of the tile must not see some of the keys. */
INLINE int needs_mask(const Call *c, const QueryTile *tile, int64_t start, int key_count) {
    const int has_future_keys = start + key_count - 1 > tile->first_position;
    const int has_keys_outside_window = tile->last_position - start >= c->window;
    return c->segment_ids || has_future_keys || has_keys_outside_window;
}

/* Return which of LANES rows of a tile must not see a key, starting with row `w` * LANES. All bits of a hidden row are
 * set in the result. */
INLINE ivec hidden_rows(const Call *c, const QueryTile *tile, int64_t batch, int64_t key, int w) {
    ivec row;
    for (int i = 0; i < LANES; i++) row[i] = w * LANES + i;
    /* A row sees the key if 0 <= first_position + row - key < window. These are the rows from first_row to end_row - 1.
     * Both limits are limited to the rows of the tile, so that they fit into `lane_int`, the integer type of `ivec`. */
    const int64_t first_row = key - tile->first_position;
    const int64_t end_row = first_row + c->window;
    ivec hidden = (row < (lane_int)smaller_of(larger_of(first_row, 0), QUERY_TILE)) |
                  (row >= (lane_int)smaller_of(larger_of(end_row, 0), QUERY_TILE));
    if (c->segment_ids) {
        /* Keys after the last key lie in the future of every row, so their segment has no effect. */
        const int64_t last_key = smaller_of(key, c->k_len - 1);
        hidden |= tile->segment_id[w] != c->segment_ids[batch * c->k_len + last_key];
    }
    return hidden;
}

/* Set the scores of hidden keys to -infinity: keys in the future, outside of the window, or of other segments. */
static void mask_scores(const Call *c, const QueryTile *tile, int64_t batch, int64_t start, int key_count,
                        real *restrict scores) {
    for (int j = 0; j < key_count; j++)
        for (int w = 0; w < TILE_VECTORS; w++) {
            real *score = scores + j * QUERY_TILE + w * LANES;
            const ivec hidden = hidden_rows(c, tile, batch, start + j, w);
            store(score, select_lanes(hidden, broadcast(-INFINITY), load(score)));
        }
}

#endif
