/* The functions of the compiled attention library.
 *
 * kernels/build.py compiles this file on first use. backends/ctypes_call.py calls the functions. The library does not
 * use the C++ headers of PyTorch. */
#include "forward.h"
#include "backward.h"
#include "decode.h"

/* Compute one work item of the thread pool: the bound of one head (an upper bound on the softmax mass of its keys).
 *
 * The item is the index of the head in (batch, heads). */
static void bound_item(void *context, int64_t item, void *scratch) {
    const ForwardContext *forward = context;
    const Call *c = forward->call;
    const int64_t batch = item / c->heads;
    const int64_t head = item % c->heads;
    build_bound(c, batch, head, &forward->bounds[item], scratch);
}

/* Call `work(context, item, scratch)` for each item from 0 to `items` - 1 on the thread pool.
 *
 * `scratch_reals` is the size of the scratch memory of each thread, in numbers of the type `real`. Returns 0, or 1 if
 * the scratch memory cannot be allocated. */
static int run_items(const Call *c, void (*work)(void *, int64_t, void *), void *context, int64_t items,
                     size_t scratch_reals) {
    Queue queue = {work, context, items, scratch_reals * sizeof(real), 0};
    return run_queue(&queue, c->threads, c->openmp_parallel);
}

/* Round a size up to a multiple of 64 bytes, which is the size of a cache line. */
static size_t align_to_cache_line(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* Allocate the bounds of all heads in one block of memory, and set the pointers of each bound to its arrays.
 *
 * The caller must free the result. Returns NULL if the memory cannot be allocated. */
static Bound *allocate_bounds(const Call *c) {
    const int64_t heads = c->batches * c->heads;
    const int64_t blocks = key_block_count(c);
    const size_t centroids = key_centroid_count(c);
    const size_t row = padded_dim(c) * sizeof(real); /* the size of one centroid in bytes */
    const size_t queries = query_tile_count(c) * QUERY_TILE;
    const size_t keys = blocks * KEY_BLOCK;

    /* The sizes of the arrays of one head in bytes, in the order of the memory. There are two tails for each boundary,
     * key centroid and query centroid. `Centroids` has one vector and one norm for each centroid. */
    const size_t tails =
        align_to_cache_line((blocks + 1) * centroids * 2 * max_query_centroids(c) * sizeof(real));
    const size_t centroid_products = centroids * QUERY_CENTROIDS * sizeof(real);
    const size_t key_centroids = centroids * (row + sizeof(real));
    const size_t query_centroids = QUERY_CENTROIDS * (row + sizeof(real));
    const size_t query_distance = queries * sizeof(real);
    const size_t key_distance = keys * sizeof(real);
    /* The following arrays have one byte for each element. */
    const size_t nearest_key_centroid = keys;
    const size_t nearest_query_centroid = queries;
    const size_t is_faulty = blocks;
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
    const size_t padded = padded_dim(c);
    const size_t rows = c->heads / c->kv_heads * c->q_len; /* the query rows of one work item */

    /* The sizes of the scratch memory in reals. Each row has a query, an output and a `DecodeRow`. A block has keys,
     * values, an output row and scores. */
    const size_t row_size = 2 * padded + align_to_cache_line(sizeof(DecodeRow)) / sizeof(real);
    const size_t block_size = (2 * KEY_BLOCK + 1) * padded + KEY_BLOCK;
    const size_t scratch = block_size + rows * row_size;
    return run_items(c, decode_item, (void *)c, c->batches * c->kv_heads, scratch);
}

/* The forward pass: compute the bounds of all heads, and then the attention. ctypes_call.py calls this function.
 *
 * Returns 0, or 1 if the memory cannot be allocated. */
int trainshort_forward(const Call *c) {
    if (c->q_len <= MAX_DECODE_QUERIES) return decode(c);
    ForwardContext forward = {c, allocate_bounds(c)};
    if (!forward.bounds) return 1;

    /* The sizes of the scratch memory of `forward_item` in reals. A block has keys, values and scores. A query tile has
     * queries, outputs and centroid scores. */
    const size_t padded = padded_dim(c);
    const size_t block_size = 2 * KEY_BLOCK * padded + KEY_BLOCK * QUERY_TILE;
    const size_t tile_size = (2 * padded + key_centroid_count(c)) * QUERY_TILE;
    const size_t scratch = block_size + TILES_PER_ITEM * tile_size;

    const int64_t heads = c->batches * c->heads;
    const int64_t forward_items = heads * blocks_of(c->q_len, ROWS_PER_ITEM);
    /* The second call is not made if the first call has failed. */
    const int has_failed = run_items(c, bound_item, &forward, heads, bound_scratch_size(c)) ||
                           run_items(c, forward_item, &forward, forward_items, scratch);
    free(forward.bounds);
    return has_failed;
}

/* The backward pass. `grad_q`, `grad_table` and the gradients of the decay must be filled with zeros before the call.
 *
 * Returns 0, or 1 if the memory cannot be allocated. */
int trainshort_backward(const Call *c) {
    /* A work item is a range of keys of one key head. */
    BackwardContext backward = {.call = c, .range_count = blocks_of(c->k_len, RANGE_KEYS)};
    const size_t items = c->batches * c->kv_heads * backward.range_count;
    backward.progress = calloc(items, sizeof(atomic_int));
    if (!backward.progress) return 1;

    /* The sizes of the scratch memory of `backward_item` in reals. A key range has keys, values and their gradients. A
     * query block has five arrays of rows (see `load_query_block`), weights and score gradients. */
    const size_t padded = padded_dim(c);
    const size_t table_size = c->grad_table ? c->heads / c->kv_heads * padded_table_length(c) : 0;
    const size_t key_range_size = 4 * RANGE_KEYS * padded;
    const size_t query_block_size = 5 * ROWS_PER_ITEM * padded + 2 * ROWS_PER_ITEM * KEY_BLOCK;
    const size_t scratch = key_range_size + query_block_size + table_size;

    /* The second call is not made if the first call has failed. */
    const int has_failed = run_items(c, grad_out_dot_out_item, &backward, c->batches * c->heads, 2 * padded) ||
                           run_items(c, backward_item, &backward, items, scratch);
    free(backward.progress);
    return has_failed;
}

/* The size of the struct `Call`. ctypes_call.py compares the size with its own struct. */
size_t trainshort_call_size(void) { return sizeof(Call); }
