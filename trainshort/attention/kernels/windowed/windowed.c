/* Entry points. Built on first use by kernels/build.py, called by attention/operator.py (ctypes); no torch headers. */
#include "forward.h"
#include "backward.h"
#include "decode.h"

static void bound_head(void *context, int64_t item, void *scratch) {
    const Forward *forward = context;
    const Call *c = forward->call;
    build_bound(c, item / c->heads, item % c->heads, &forward->bounds[item], scratch);
}

/* All items of one kind; `reals` is the scratch of each thread. 0, or 1 when memory ran out. */
static int run_all(const Call *c, void (*work)(void *, int64_t, void *), void *context, int64_t items, size_t reals) {
    Queue queue = {work, context, items, reals * sizeof(real), 0};
    return run_queue(&queue, c->threads, c->openmp_parallel);
}

static size_t align(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* All heads' bounds in one allocation; NULL when there is no memory. */
static Bound *allocate_bounds(const Call *c) {
    const int64_t heads = c->batches * c->heads, blocks = key_blocks(c);
    const size_t centres = most_centres(c), row = padded_dim(c) * sizeof(real);
    const size_t tail = align((blocks + 1) * centres * 2 * most_query_centres(c) * sizeof(real));
    const size_t products = centres * QUERY_CENTRES * sizeof(real), rows = panels_of(c) * PANEL;
    const size_t keys = centres * (row + sizeof(real)), queries = QUERY_CENTRES * (row + sizeof(real));
    const size_t reach = blocks * KEYS * sizeof(real), nearest = blocks * KEYS;
    const size_t each = align(tail + products + keys + queries + rows * sizeof(real) + reach + nearest + rows + blocks);
    const size_t head = align(heads * sizeof(Bound));
    char *memory = NULL;
    if (posix_memalign((void **)&memory, 64, head + heads * each)) return NULL;
    Bound *bounds = (Bound *)memory;
    for (int64_t i = 0; i < heads; i++) {
        char *own = memory + head + i * each;
        bounds[i].tail = (real *)own;
        bounds[i].products = (real *)(own += tail);
        bounds[i].centres.rows = (real *)(own += products);
        bounds[i].centres.halves = (real *)(own + centres * row);
        bounds[i].queries.rows = (real *)(own += keys);
        bounds[i].queries.halves = (real *)(own + QUERY_CENTRES * row);
        bounds[i].apart = (real *)(own += queries);
        bounds[i].reach = (real *)(own += rows * sizeof(real));
        bounds[i].nearest = (uint8_t *)(own += reach);
        bounds[i].own = (uint8_t *)(own += nearest);
        bounds[i].faulty = (uint8_t *)(own + rows);
    }
    return bounds;
}

static int decode(const Call *c) {
    const size_t padded = padded_dim(c), rows = c->heads / c->kv_heads * c->q_len;
    const size_t scratch = (2 * KEYS + 1) * padded + KEYS + rows * (2 * padded + align(sizeof(Row)) / sizeof(real));
    return run_all(c, decode_group, (void *)c, c->batches * c->kv_heads, scratch);
}

/* 0, or 1 when memory ran out. */
int trainshort_forward(const Call *c) {
    if (c->q_len <= FEW) return decode(c);
    const size_t padded = padded_dim(c);
    Forward forward = {c, allocate_bounds(c)};
    if (!forward.bounds) return 1;
    const size_t scratch = 2 * KEYS * padded + KEYS * PANEL + PANELS * (2 * padded + most_centres(c)) * PANEL;
    const int64_t heads = c->batches * c->heads;
    const int failed = run_all(c, bound_head, &forward, heads, bound_scratch(c)) ||
                       run_all(c, forward_rows, &forward, heads * blocks_of(c->q_len, ROWS), scratch);
    free(forward.bounds);
    return failed;
}

/* 0, or 1 when memory ran out. grad_q and grad_table must come filled with zeros. */
int trainshort_backward(const Call *c) {
    const size_t padded = padded_dim(c), pairs = c->batches * c->kv_heads;
    Backward backward = {c, NULL, blocks_of(c->k_len, SEGMENT)};
    const size_t items = pairs * backward.segments;
    if (!(backward.progress = calloc(items, sizeof(atomic_int)))) return 1;
    const size_t tilts = c->grad_table ? c->heads / c->kv_heads * table_size(c) : 0;
    const size_t scratch = 4 * SEGMENT * padded + 5 * ROWS * padded + 2 * ROWS * KEYS + tilts;
    const int failed = run_all(c, inner_products, &backward, c->batches * c->heads, 2 * padded) ||
                       run_all(c, backward_segment, &backward, items, scratch);
    free(backward.progress);
    return failed;
}

size_t trainshort_call_size(void) { return sizeof(Call); }
