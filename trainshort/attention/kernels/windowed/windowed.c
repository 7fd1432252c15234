/* The functions of the compiled attention library.
 *
 * kernels/build.py compiles this file on first use. backends/ctypes_call.py calls the functions. The library does not
 * use the C++ headers of PyTorch. */
#include "forward.h"
#include "backward.h"
#include "decode.h"

/* Compute one work item of the thread pool: the bound of one head. */
static void bound_item(void *context, int64_t item, void *scratch) {
    const ForwardContext *forward = context;
    const Call *c = forward->call;
    build_bound(c, item / c->heads, item % c->heads, &forward->bounds[item], scratch);
}

/* Run all work items of one kind on the thread pool. `scratch_reals` is the scratch memory of each thread, in reals.
 *
 * Returns 0, or 1 if the memory cannot be allocated. */
static int run_items(const Call *c, void (*work)(void *, int64_t, void *), void *context, int64_t items,
                     size_t scratch_reals) {
    Queue queue = {work, context, items, scratch_reals * sizeof(real), 0};
    return run_queue(&queue, c->threads, c->openmp_parallel);
}

/* Round a size up to a multiple of a cache line. */
static size_t align_to_cache_line(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* Allocate the bounds of all heads in one block of memory. Returns NULL if the memory cannot be allocated. */
static Bound *allocate_bounds(const Call *c) {
    const int64_t heads = c->batches * c->heads, blocks = key_block_count(c);
    const size_t centroids = key_centroid_count(c), row = padded_dim(c) * sizeof(real);
    const size_t queries = query_tile_count(c) * QUERY_TILE, keys = blocks * KEY_BLOCK;

    /* The sizes of the arrays of one head in bytes, in the order of the memory. */
    const size_t tails =
        align_to_cache_line((blocks + 1) * centroids * 2 * max_query_centroids(c) * sizeof(real));
    const size_t centroid_products = centroids * QUERY_CENTROIDS * sizeof(real);
    const size_t key_centroids = centroids * (row + sizeof(real));
    const size_t query_centroids = QUERY_CENTROIDS * (row + sizeof(real));
    const size_t query_distance = queries * sizeof(real), key_distance = keys * sizeof(real);
    const size_t nearest_key_centroid = keys, nearest_query_centroid = queries, is_faulty = blocks;
    const size_t head_size = align_to_cache_line(tails + centroid_products + key_centroids + query_centroids +
                                                 query_distance + key_distance + nearest_key_centroid +
                                                 nearest_query_centroid + is_faulty);

    const size_t bounds_size = align_to_cache_line(heads * sizeof(Bound));
    char *memory = NULL;
    if (posix_memalign((void **)&memory, 64, bounds_size + heads * head_size)) return NULL;
    Bound *bounds = (Bound *)memory;
    for (int64_t i = 0; i < heads; i++) {
        char *next = memory + bounds_size + i * head_size;
        bounds[i].tails = (real *)next;
        bounds[i].centroid_products = (real *)(next += tails);
        bounds[i].key_centroids.vectors = (real *)(next += centroid_products);
        bounds[i].key_centroids.half_squared_norms = (real *)(next + centroids * row);
        bounds[i].query_centroids.vectors = (real *)(next += key_centroids);
        bounds[i].query_centroids.half_squared_norms = (real *)(next + QUERY_CENTROIDS * row);
        bounds[i].query_distance = (real *)(next += query_centroids);
        bounds[i].key_distance = (real *)(next += query_distance);
        bounds[i].nearest_key_centroid = (uint8_t *)(next += key_distance);
        bounds[i].nearest_query_centroid = (uint8_t *)(next += nearest_key_centroid);
        bounds[i].is_faulty = (uint8_t *)(next + nearest_query_centroid);
    }
    return bounds;
}

/* The forward pass of a call with few queries. Returns 0, or 1 if the memory cannot be allocated. */
static int decode(const Call *c) {
    const size_t padded = padded_dim(c), rows = c->heads / c->kv_heads * c->q_len;
    const size_t row_size = 2 * padded + align_to_cache_line(sizeof(DecodeRow)) / sizeof(real);
    const size_t scratch = (2 * KEY_BLOCK + 1) * padded + KEY_BLOCK + rows * row_size;
    return run_items(c, decode_item, (void *)c, c->batches * c->kv_heads, scratch);
}

/* The forward pass. Returns 0, or 1 if the memory cannot be allocated. */
int trainshort_forward(const Call *c) {
    if (c->q_len <= MAX_DECODE_QUERIES) return decode(c);
    const size_t padded = padded_dim(c);
    ForwardContext forward = {c, allocate_bounds(c)};
    if (!forward.bounds) return 1;
    const size_t tile_size = (2 * padded + key_centroid_count(c)) * QUERY_TILE;
    const size_t scratch = 2 * KEY_BLOCK * padded + KEY_BLOCK * QUERY_TILE + TILES_PER_ITEM * tile_size;
    const int64_t heads = c->batches * c->heads;
    const int has_failed =
        run_items(c, bound_item, &forward, heads, bound_scratch_size(c)) ||
        run_items(c, forward_item, &forward, heads * blocks_of(c->q_len, ROWS_PER_ITEM), scratch);
    free(forward.bounds);
    return has_failed;
}

/* The backward pass. `grad_q`, `grad_table` and the gradients of the decay must be filled with zeros before the call.
 *
 * Returns 0, or 1 if the memory cannot be allocated. */
int trainshort_backward(const Call *c) {
    const size_t padded = padded_dim(c), pairs = c->batches * c->kv_heads;
    BackwardContext backward = {c, NULL, blocks_of(c->k_len, RANGE_KEYS)};
    const size_t items = pairs * backward.range_count;
    if (!(backward.progress = calloc(items, sizeof(atomic_int)))) return 1;
    const size_t table_size = c->grad_table ? c->heads / c->kv_heads * padded_table_length(c) : 0;
    const size_t key_range_size = 4 * RANGE_KEYS * padded;
    const size_t query_block_size = 5 * ROWS_PER_ITEM * padded + 2 * ROWS_PER_ITEM * KEY_BLOCK;
    const size_t scratch = key_range_size + query_block_size + table_size;
    const int has_failed = run_items(c, grad_out_dot_out_item, &backward, c->batches * c->heads, 2 * padded) ||
                           run_items(c, backward_item, &backward, items, scratch);
    free(backward.progress);
    return has_failed;
}

/* The size of the struct `Call`. ctypes_call.py compares the size with its own struct. */
size_t trainshort_call_size(void) { return sizeof(Call); }
