/* The attention of one new token to the ring buffers of a KV cache, the error bound for evicted keys, and the storing of
 * the newest key. See ring_buffer.h for the arguments, and model/cache/bounded.py for the error bound.
 *
 * The softmax does not depend on the order of the keys, so the slots of a ring buffer are read in their order in memory.
 */
#include "ring_buffer.h"

#include "simd.h"
#include "thread_pool.h"

/* The number of keys that are processed together. Their keys and values fit into the first-level cache. */
enum { KEY_BLOCK = 64 };

/* The state of the running softmax of one query.
 *
 * `out` is the sum of exp(score - max_score) * value over the keys so far, and `sum` is the sum of the weights. */
typedef struct {
    float *query, *out;  /* [padded_dim] */
    const double *decay; /* the cumulative log decay of the new token; decay[-d] is that of distance d; NULL for ALiBi */
    float max_score, sum;
} Row;

/* Returns n, rounded up to a multiple of the number of elements in a vector. */
INLINE int64_t padded_to_lanes(int64_t n) { return blocks_of(n, LANES) * LANES; }

/* Returns the number of query heads that share a key-value head. */
INLINE int64_t heads_per_kv_head(const DecodeArgs *args) { return args->num_heads / args->num_kv_heads; }

/* Returns the number of floats of scratch memory that one key-value head needs.
 *
 * Each of its query heads needs a query, an output and a `Row`. */
static int64_t scratch_length(const DecodeArgs *args) {
    const int64_t query_and_output = 2 * padded_to_lanes(args->dim);
    const int64_t row = (int64_t)(sizeof(Row) / sizeof(float));
    return padded_to_lanes(heads_per_kv_head(args) * (query_and_output + row));
}

/* Returns the Euclidean norm of a vector, computed in double precision. */
static double norm(const float *x, int64_t dim) {
    double sum = 0;
    for (int64_t t = 0; t < dim; t++) sum += (double)x[t] * x[t];
    return sqrt(sum);
}

/* Computes out = out * factor + sum of weights[j] * values[j] over all keys j.
 *
 * `values` has one row of `padded_dim` floats per key. Four vectors of the output are computed together, because they
 * stay in registers while the loop runs over the keys. */
static void add_values(float *out, float factor, const float *weights, const float *values, int num_keys,
                       int64_t padded_dim) {
    int64_t t = 0;
    for (; t + 4 * LANES <= padded_dim; t += 4 * LANES) {
        vec sum_0 = load(out + t) * factor;
        vec sum_1 = load(out + t + LANES) * factor;
        vec sum_2 = load(out + t + 2 * LANES) * factor;
        vec sum_3 = load(out + t + 3 * LANES) * factor;
        for (int j = 0; j < num_keys; j++) {
            const float *value = values + j * padded_dim + t;
            sum_0 += weights[j] * load(value);
            sum_1 += weights[j] * load(value + LANES);
            sum_2 += weights[j] * load(value + 2 * LANES);
            sum_3 += weights[j] * load(value + 3 * LANES);
        }
        store(out + t, sum_0);
        store(out + t + LANES, sum_1);
        store(out + t + 2 * LANES, sum_2);
        store(out + t + 3 * LANES, sum_3);
    }
    for (; t < padded_dim; t += LANES) {
        vec sum = load(out + t) * factor;
        for (int j = 0; j < num_keys; j++) sum += weights[j] * load(values + j * padded_dim + t);
        store(out + t, sum);
    }
}

/* Adds up to KEY_BLOCK keys and values, in consecutive slots of a ring buffer, to the running softmax of one query.
 *
 * `first_distance` is the distance between the query and the first key. Each further key is nearer by 1. */
static void add_keys(const DecodeArgs *args, const HeadState *head, Row *row, const float *keys, const float *values,
                     int num_keys, int64_t first_distance, int64_t padded_dim) {
    float scores[KEY_BLOCK];
    float max_score = row->max_score;
    for (int j = 0; j < KEY_BLOCK; j++) {
        const int64_t distance = first_distance - j;
        scores[j] = -INFINITY;
        if (j >= num_keys || distance >= args->window) continue;
        /* With a decay bias, the bias is the difference of two cumulative log decays. With ALiBi, it is linear. */
        const float bias =
            row->decay ? (float)(row->decay[0] - row->decay[-distance]) : -(float)head->slope * (float)distance;
        scores[j] = dot(row->query, keys + j * padded_dim, padded_dim) * (float)args->softmax_scale + bias;
        if (scores[j] > max_score) max_score = scores[j];
    }

    /* The weights are exp(score - max_score). If the largest score has changed, the previous sums are rescaled. */
    const float rescale = expf(row->max_score - max_score);
    float *weights = scores; /* The weights overwrite the scores. */
    vec lane_sums = {0};
    for (int j = 0; j < KEY_BLOCK; j += LANES) {
        const vec block_weights = exp_below_zero(load(scores + j) - max_score);
        store(weights + j, block_weights);
        lane_sums += block_weights;
    }
    row->sum *= rescale;
    for (int lane = 0; lane < LANES; lane++) row->sum += lane_sums[lane];
    row->max_score = max_score;
    add_values(row->out, rescale, weights, values, num_keys, padded_dim);
}

/* Computes the cumulative log decay of the new token for one query head, and appends it to `cumulative_decay`.
 *
 * The cumulative log decay is the sum of log(sigmoid(gate)) over all tokens so far. Returns the address of the new
 * value. */
static const double *append_decay(const DecodeArgs *args, int64_t head) {
    double *new_decay = args->cumulative_decay + head * args->decay_stride + args->decay_length;
    const double gate = args->gate_sign * (double)args->gates[head];
    /* Both forms of log(sigmoid(gate)) are equal. Each form is accurate for one sign of the gate. */
    const double log_decay = gate < 0 ? gate - log1p(exp(gate)) : -log1p(exp(-gate));
    const double previous_decay = args->decay_length > 0 ? new_decay[-1] : 0;
    *new_decay = previous_decay + log_decay;
    const int is_first_token = args->length == 0;
    if (is_first_token) args->heads[head].initial_decay = *new_decay;
    return new_decay;
}

/* Starts the running softmax of one query. The first key is the key of the new token itself, at distance 0.
 *
 * `memory` has room for the query and the output, 2 * padded_dim floats. */
static void start_row(const DecodeArgs *args, int64_t head, int64_t kv_head, Row *row, float *memory,
                      int64_t padded_dim) {
    row->decay = args->cumulative_decay ? append_decay(args, head) : NULL;
    memset(memory, 0, 2 * padded_dim * sizeof(float));
    row->query = memory;
    row->out = memory + padded_dim;
    memcpy(row->query, args->q + head * args->q_stride, args->dim * sizeof(float));
    if (args->query_scales)
        for (int64_t t = 0; t < args->dim; t++) row->query[t] *= args->query_scales[head];
    const float *new_key = args->k + kv_head * args->k_stride;
    const float *new_value = args->v + kv_head * args->v_stride;
    double dot_product = 0;
    for (int64_t t = 0; t < args->dim; t++) dot_product += (double)row->query[t] * new_key[t];
    /* The weight of the first key relative to the largest score is 1, so `out` is the value itself. */
    row->max_score = (float)(dot_product * args->softmax_scale);
    row->sum = 1;
    memcpy(row->out, new_value, args->dim * sizeof(float));
}

/* Sets *maximum to the larger of *maximum and `value`. NaN counts as larger than all numbers, so that a certificate
 * never hides a NaN. The function is _nan_propagating_max in bounded.py. */
static void update_nan_propagating_max(double *maximum, double value) {
    if (!isnan(*maximum) && !(value <= *maximum)) *maximum = value;
}

/* Sets *maximum to the larger of *maximum and `value`. Values that are not finite are ignored, because a single invalid
 * query or key must not enlarge a ring buffer forever. The function is _finite_max in bounded.py. */
static void update_finite_max(double *maximum, double value) {
    if (isfinite(value) && value > *maximum) *maximum = value;
}

/* Finishes the softmax of one query: writes the output, and updates `certificate` and `max_excess` of the head.
 *
 * The certificate is an upper bound on the softmax mass of evicted keys. The excess is an upper bound on the scores
 * before the bias, minus the log-sum-exp (lse) of all scores. */
static void finish_row(const DecodeArgs *args, const RingBuffer *buffer, int64_t head_index, const Row *row) {
    HeadState *head = &args->heads[head_index];
    float *out = args->out + head_index * args->dim;
    for (int64_t t = 0; t < args->dim; t++) out[t] = row->out[t] / row->sum;

    const double lse = (double)row->max_score + log((double)row->sum);
    const double scaled_norm = norm(row->query, args->dim) * args->softmax_scale;
    const int64_t nearest_evicted_distance = buffer->count + 1;
    const int has_evicted_keys = args->length > buffer->count;
    if (has_evicted_keys && nearest_evicted_distance < args->window) {
        const double excess = scaled_norm * buffer->max_evicted_norm - lse;
        double evicted_mass; /* an upper bound on the softmax mass of the evicted keys */
        if (row->decay)
            evicted_mass = exp(excess + row->decay[0] + head->log_evicted_weight);
        else
            evicted_mass = exp(excess - head->slope * (double)nearest_evicted_distance) / -expm1(-head->slope);
        update_nan_propagating_max(&head->certificate, evicted_mass);
        if (!(evicted_mass <= args->tolerance)) head->rows_above_tolerance++; /* also counts NaN */
    }

    /* How much lower the bias of the first token of the text is than the bias of the new token. */
    const double bias_drop =
        row->decay ? head->initial_decay - row->decay[0] : (double)args->length * head->slope;
    if (bias_drop >= args->min_bias_drop) update_finite_max(&head->max_excess, scaled_norm * buffer->max_norm - lse);
}

/* Returns log(exp(a) + exp(b)). */
static double log_add_exp(double a, double b) {
    const double maximum = a > b ? a : b;
    if (!isfinite(maximum)) return maximum; /* Otherwise a - b could be NaN. */
    return maximum + log1p(exp(-fabs(a - b)));
}

/* Returns the capacity that a full ring buffer needs with a decay bias.
 *
 * `heads` and `rows` belong to the query heads that share the ring buffer. The weight of a key is exp(-c), where c is
 * its cumulative log decay. The oldest key can be evicted if the total weight of all evicted keys stays small enough.
 * Otherwise, all keys are kept, and the capacity grows by a quarter. For one new token, the function computes the same
 * as `BoundedDecayLayer._required_capacity` in bounded_decay.py. */
static int64_t required_capacity_with_decay(const DecodeArgs *args, const RingBuffer *buffer, const HeadState *heads,
                                            const Row *rows, int64_t num_heads) {
    const int64_t max_capacity = args->window - 1;
    int64_t required = buffer->count;
    for (int64_t i = 0; i < num_heads; i++) {
        const double new_decay = rows[i].decay[0];
        const double oldest_decay = rows[i].decay[-buffer->count];
        const double max_log_weight = log(args->tolerance) - heads[i].max_excess - args->capacity_margin - new_decay;
        if (!isfinite(max_log_weight)) return larger_of(1, max_capacity);
        const double log_weight = log_add_exp(heads[i].log_evicted_weight, -oldest_decay);
        const int can_evict_oldest = log_weight <= max_log_weight;
        if (!can_evict_oldest) required = buffer->count + 1;
    }
    if (required > buffer->capacity) required += required / 4;
    return larger_of(1, smaller_of(required, max_capacity));
}

/* Returns the number of keys that a ring buffer must hold with ALiBi. `heads` are the query heads that share it.
 *
 * All farther keys together have at most the softmax mass `tolerance`, also if the excess of a query is larger than
 * `max_excess` by `capacity_margin`. The function computes the same as `required_capacity` in bounded.py. */
static int64_t required_capacity(const DecodeArgs *args, const HeadState *heads, int64_t num_heads) {
    const int64_t max_capacity = larger_of(1, args->window - 1);
    double required = 1;
    for (int64_t i = 0; i < num_heads; i++) {
        const double slope = heads[i].slope;
        const double excess = heads[i].max_excess + args->capacity_margin;
        const double distance = (excess - log(args->tolerance) - log(-expm1(-slope))) / slope;
        if (!(slope > 0) || !isfinite(distance)) return max_capacity;
        if (distance > required) required = distance;
    }
    if (required >= (double)max_capacity) return max_capacity;
    return smaller_of(max_capacity, (int64_t)ceil(required));
}

/* Stores the key and the value of the new token in a ring buffer.
 *
 * If the ring buffer is full, the oldest key is evicted, and the statistics for the error bound are updated. `rows`
 * belong to the query heads that share the ring buffer. */
static void insert(const DecodeArgs *args, RingBuffer *buffer, int64_t kv_head, const Row *rows, int64_t padded_dim) {
    float *key = buffer->keys + buffer->next * padded_dim;
    float *value = buffer->values + buffer->next * padded_dim;
    const int is_full = buffer->count == buffer->capacity;
    if (is_full) {
        update_nan_propagating_max(&buffer->max_evicted_norm, norm(key, args->dim));
        if (args->cumulative_decay) {
            const int64_t num_heads = heads_per_kv_head(args);
            HeadState *heads = args->heads + kv_head * num_heads;
            for (int64_t i = 0; i < num_heads; i++) {
                const double evicted_decay = rows[i].decay[-buffer->count];
                heads[i].log_evicted_weight = log_add_exp(heads[i].log_evicted_weight, -evicted_decay);
            }
        }
    } else {
        buffer->count++;
    }
    memcpy(key, args->k + kv_head * args->k_stride, args->dim * sizeof(float));
    memcpy(value, args->v + kv_head * args->v_stride, args->dim * sizeof(float));
    buffer->next = (buffer->next + 1) % buffer->capacity; /* After the last slot, the first slot follows. */
}

/* Adds all keys of a ring buffer to the running softmax of the query heads that share the buffer. */
static void add_all_keys(const DecodeArgs *args, const RingBuffer *buffer, const HeadState *heads, Row *rows,
                         int64_t num_heads, int64_t padded_dim) {
    int64_t slot = 0;
    while (slot < buffer->count) {
        /* In a full buffer, the keys in the slots from `next` on are older than the keys in the slots before `next`. */
        const int is_older_part = slot >= buffer->next;
        const int64_t part_end = is_older_part ? buffer->count : buffer->next;
        const int64_t distance = is_older_part ? buffer->next + buffer->capacity - slot : buffer->next - slot;
        const int num_keys = (int)smaller_of(KEY_BLOCK, part_end - slot);
        const float *keys = buffer->keys + slot * padded_dim;
        const float *values = buffer->values + slot * padded_dim;
        for (int64_t i = 0; i < num_heads; i++)
            add_keys(args, &heads[i], &rows[i], keys, values, num_keys, distance, padded_dim);
        slot += num_keys;
    }
}

/* Runs the decode step for one key-value head and the query heads that share it.
 *
 * The work queue calls this function for each item. An item is a key-value head. `context` is the `DecodeArgs`. */
static void decode_kv_head(void *context, int64_t item, void *unused) {
    (void)unused;
    const DecodeArgs *args = context;
    /* The last key-value head is processed first. It usually has the smallest slopes and thus the longest buffer. */
    const int64_t kv_head = args->num_kv_heads - 1 - item;
    const int64_t num_heads = heads_per_kv_head(args);
    const int64_t first_head = kv_head * num_heads;
    const int64_t padded_dim = padded_to_lanes(args->dim);
    RingBuffer *buffer = &args->ring_buffers[kv_head];
    HeadState *heads = &args->heads[first_head];

    /* The scratch memory contains the query and the output of each head, and then the `Row` of each head. */
    float *scratch = args->scratch + kv_head * scratch_length(args);
    Row *rows = (Row *)(scratch + num_heads * 2 * padded_dim);

    update_finite_max(&buffer->max_norm, norm(args->k + kv_head * args->k_stride, args->dim));
    for (int64_t i = 0; i < num_heads; i++)
        start_row(args, first_head + i, kv_head, &rows[i], scratch + i * 2 * padded_dim, padded_dim);
    add_all_keys(args, buffer, heads, rows, num_heads, padded_dim);
    for (int64_t i = 0; i < num_heads; i++) finish_row(args, buffer, first_head + i, &rows[i]);

    buffer->requested_capacity = 0;
    const int is_full = buffer->count == buffer->capacity;
    if (is_full) {
        const int64_t required = args->cumulative_decay
                                     ? required_capacity_with_decay(args, buffer, heads, rows, num_heads)
                                     : required_capacity(args, heads, num_heads);
        if (required > buffer->capacity) {
            /* Python enlarges the ring buffer, and then stores the key and the value. */
            buffer->requested_capacity = required;
            return;
        }
    }
    insert(args, buffer, kv_head, rows, padded_dim);
}

/* ring_buffer.h describes this function. */
void trainshort_decode_attention(const DecodeArgs *args) {
    Queue kv_heads = {decode_kv_head, (void *)args, args->num_kv_heads, 0, 0};
    run_queue(&kv_heads, args->num_threads, NULL);
}

/* Returns the number of floats of `DecodeArgs.scratch`. */
int64_t trainshort_decode_scratch_length(const DecodeArgs *args) { return args->num_kv_heads * scratch_length(args); }

/* Returns the size of `DecodeArgs`. Python compares it with the size of its own struct. */
size_t trainshort_decode_args_size(void) { return sizeof(DecodeArgs); }
