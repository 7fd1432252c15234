/* One token through a linear layer, or through all transformer blocks of a model.
 *
 * A transformer block computes the following, where W stands for the weights of four linear layers. With FoX, a fifth
 * linear layer computes the forget gates from norm(x).
 *
 *     qkv = W norm(x)      y = attention(qkv)      x = x + W y      x = x + W activation(W norm(x))
 *
 * All blocks run in one call, because a call from Python for each linear layer would take about a third of the time.
 *
 * The speed for a single token is limited by the reading of the weights. All cores read the weights here, PyTorch uses a
 * single core in this case. Each output is the sum of one thread in a fixed order, so the results do not depend on the
 * number of threads.
 *
 * generate/fast_decode.py contains the same structs. The fields must be in the same order.
 */
#include "ring_buffer.h"

#include "simd.h"
#include "thread_pool.h"

#include <stddef.h>
#include <stdint.h>

/* A linear layer for a single token: out = activation(weight . norm(x) + bias) + residual. */
typedef struct {
    const float *x;           /* [in_features] */
    const float *weight;      /* [out_features][in_features] */
    const float *bias;        /* [out_features], or NULL */
    const float *norm_weight; /* [in_features], or NULL */
    const float *norm_bias;   /* [in_features], or NULL */
    const float *residual;    /* [out_features], or NULL */
    float *out;               /* [out_features] */
    float *normalized;        /* [in_features] scratch memory for norm(x) */
    int64_t in_features, out_features;
    double eps;          /* the eps of the norm */
    int32_t num_threads; /* 0: the number of threads of the whole decode step */
    int32_t activation;  /* one of the numbers below */
    int32_t has_norm;    /* whether a LayerNorm is applied to x */
} LinearArgs;

enum { NO_ACTIVATION = 0, RELU = 1, GELU = 2, GELU_TANH = 3 };

enum { OUTPUTS_PER_ITEM = 64 };      /* the number of outputs that a thread computes at a time */
enum { FLOATS_PER_CACHE_LINE = 16 }; /* the number of floats that are read from memory at a time */

/* Applies an activation function to a number. */
static float activate(float x, int activation) {
    switch (activation) {
    case RELU: return x > 0 ? x : 0;
    case GELU: return 0.5f * x * (1 + erff(x * 0.70710678f));
    case GELU_TANH: return 0.5f * x * (1 + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
    default: return x;
    }
}

/* Computes LayerNorm(x) and writes the result to `args->normalized`. */
static void normalize(const LinearArgs *args) {
    double sum = 0;
    double squares = 0;
    for (int64_t i = 0; i < args->in_features; i++) sum += args->x[i];
    const double mean = sum / (double)args->in_features;
    for (int64_t i = 0; i < args->in_features; i++) squares += (args->x[i] - mean) * (args->x[i] - mean);
    const double variance = squares / (double)args->in_features;
    const double factor = 1 / sqrt(variance + args->eps);
    for (int64_t i = 0; i < args->in_features; i++) {
        const float value = (float)((args->x[i] - mean) * factor);
        const float norm_weight = args->norm_weight ? args->norm_weight[i] : 1;
        const float norm_bias = args->norm_bias ? args->norm_bias[i] : 0;
        args->normalized[i] = value * norm_weight + norm_bias;
    }
}

/* Computes the dot products of x with four consecutive rows of the weight matrix, and writes them to `dot_products`.
 *
 * The function also prefetches the four rows after these rows. The processor alone does not predict the jump to another
 * row. Prefetching increases the memory throughput by 5 to 8 %. */
static void dot_four_rows(const float *x, const float *weight, int64_t in_features, float *dot_products) {
    const float *rows[4] = {weight, weight + in_features, weight + 2 * in_features, weight + 3 * in_features};
    vec sum_0 = {0};
    vec sum_1 = {0};
    vec sum_2 = {0};
    vec sum_3 = {0};
    int64_t i = 0;
    for (; i + LANES <= in_features; i += LANES) {
        const vec x_block = load(x + i);
        if (i % FLOATS_PER_CACHE_LINE == 0) {
            for (int row = 0; row < 4; row++) {
                const float *next_row = rows[row] + 4 * in_features;
                _mm_prefetch((const char *)(next_row + i), _MM_HINT_T0);
            }
        }
        sum_0 += x_block * load(rows[0] + i);
        sum_1 += x_block * load(rows[1] + i);
        sum_2 += x_block * load(rows[2] + i);
        sum_3 += x_block * load(rows[3] + i);
    }
    dot_products[0] = sum_lanes(sum_0);
    dot_products[1] = sum_lanes(sum_1);
    dot_products[2] = sum_lanes(sum_2);
    dot_products[3] = sum_lanes(sum_3);
    /* The elements after the last complete vector. */
    for (; i < in_features; i++)
        for (int row = 0; row < 4; row++) dot_products[row] += x[i] * rows[row][i];
}

/* Computes OUTPUTS_PER_ITEM outputs of a linear layer. The work queue calls this function for each item.
 *
 * The item with number n contains the outputs from n * OUTPUTS_PER_ITEM on. `context` is the `LinearArgs`. */
static void compute_outputs(void *context, int64_t item, void *unused) {
    (void)unused;
    const LinearArgs *args = context;
    const float *x = args->has_norm ? args->normalized : args->x;
    const int64_t end = smaller_of(args->out_features, (item + 1) * OUTPUTS_PER_ITEM);
    int64_t output = item * OUTPUTS_PER_ITEM;
    while (output < end) {
        /* Compute four outputs together if possible, otherwise a single output. */
        const float *weight = args->weight + output * args->in_features;
        float dot_products[4];
        const int64_t num_rows = end - output >= 4 ? 4 : 1;
        if (num_rows == 4)
            dot_four_rows(x, weight, args->in_features, dot_products);
        else
            dot_products[0] = dot(x, weight, args->in_features);
        for (int64_t row = 0; row < num_rows; row++) {
            const float bias = args->bias ? args->bias[output] : 0;
            const float residual = args->residual ? args->residual[output] : 0;
            args->out[output] = activate(dot_products[row] + bias, args->activation) + residual;
            output++;
        }
    }
}

/* Computes a linear layer for a single token: out = activation(weight . norm(x) + bias) + residual. */
void trainshort_linear(const LinearArgs *args) {
    if (args->has_norm) normalize(args);
    Queue outputs = {compute_outputs, (void *)args, blocks_of(args->out_features, OUTPUTS_PER_ITEM), 0, 0};
    run_queue(&outputs, args->num_threads, NULL);
}

/* Returns the size of `LinearArgs`. Python compares it with the size of its own struct. */
size_t trainshort_linear_args_size(void) { return sizeof(LinearArgs); }

/* The arguments of one transformer block. */
typedef struct {
    const LinearArgs *qkv, *out;  /* the linear layers before and after the attention */
    const LinearArgs *up, *down;  /* the linear layers of the feed-forward network */
    const LinearArgs *decay_gate; /* computes the forget gates of FoX, or NULL */
    const DecodeArgs *attention;
} LayerArgs;

/* Computes a linear layer. If `args` does not set the number of threads, `num_threads` threads are used. */
static void run_linear(const LinearArgs *args, int num_threads) {
    LinearArgs args_with_threads = *args;
    if (args->num_threads == 0) args_with_threads.num_threads = num_threads;
    trainshort_linear(&args_with_threads);
}

/* Returns whether a ring buffer must grow before the key of the token can be stored. */
static int needs_growth(const DecodeArgs *args) {
    for (int64_t kv_head = 0; kv_head < args->num_kv_heads; kv_head++)
        if (args->ring_buffers[kv_head].requested_capacity) return 1;
    return 0;
}

/* Runs the transformer blocks `first` to `count` - 1 for one token. Returns the index of the next block to run.
 *
 * The result is `count` if all blocks were run. If a ring buffer of a block must grow, the function returns after this
 * block. Python then enlarges the ring buffer, and calls the function again for the remaining blocks. */
int64_t trainshort_decode_layers(const LayerArgs *layers, int64_t first, int64_t count, int32_t num_threads) {
    for (int64_t i = first; i < count; i++) {
        const LayerArgs *layer = &layers[i];
        run_linear(layer->qkv, num_threads);
        if (layer->decay_gate) run_linear(layer->decay_gate, num_threads);
        trainshort_decode_attention(layer->attention);
        run_linear(layer->out, num_threads);
        run_linear(layer->up, num_threads);
        run_linear(layer->down, num_threads);
        if (needs_growth(layer->attention)) return i + 1;
    }
    return count;
}

/* Returns the size of `LayerArgs`. Python compares it with the size of its own struct. */
size_t trainshort_layer_args_size(void) { return sizeof(LayerArgs); }
