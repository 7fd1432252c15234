/* One token through a model's layers, without a way back to Python in between: thirty small calls from there would cost
 * as much as a third of the work, and let the helpers fall asleep each time.
 *
 * All rows live in buffers that the structs point to; x is rewritten in place by every layer:
 *
 *     qkv = W norm(x)      y = attend(qkv)      x += W y      x += W act(W norm(x))
 *
 * and where the bias is a clock, gates = W norm(x) say how far it goes on.
 *
 * First one row through one linear layer, with what stands before and after it:
 *
 *     out = activation(weight . norm(x) + bias) + residual
 *
 * A single row is read once per weight, so this runs at the speed of memory if all cores read; torch's own product of a
 * row and a matrix uses one. Each output is summed by one thread in one order, so results do not depend on how many
 * there are. Called through ctypes by generate/one_row.py, whose structs mirror these.
 */
#include "ring_buffer.h"

#include "thread_pool.h"
#include "simd.h"

#include <stddef.h>
#include <stdint.h>

typedef struct {
    const float *x, *weight, *bias, *gain, *shift, *residual; /* all but x and weight may be NULL */
    float *out, *scratch;                                      /* scratch: inputs floats, for the normalised row */
    int64_t inputs, outputs;
    double eps;
    int32_t threads, activation, normed;
} Linear;

enum { NO_ACTIVATION = 0, RELU = 1, GELU = 2, GELU_TANH = 3 };
enum { SHARE = 64, LINE = 16 }; /* outputs that a thread takes at a time; floats that memory sends at a time */

static float activate(float x, int kind) {
    switch (kind) {
    case RELU: return x > 0 ? x : 0;
    case GELU: return 0.5f * x * (1 + erff(x * 0.70710678f));
    case GELU_TANH: return 0.5f * x * (1 + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
    default: return x;
    }
}

static void normalise(const Linear *l) {
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < l->inputs; i++) sum += l->x[i];
    const double mean = sum / (double)l->inputs;
    for (int64_t i = 0; i < l->inputs; i++) squares += (l->x[i] - mean) * (l->x[i] - mean);
    const double factor = 1 / sqrt(squares / (double)l->inputs + l->eps);
    for (int64_t i = 0; i < l->inputs; i++) {
        const float value = (float)((l->x[i] - mean) * factor);
        l->scratch[i] = value * (l->gain ? l->gain[i] : 1) + (l->shift ? l->shift[i] : 0);
    }
}

/* Four outputs together: the row is loaded once for all of them. The next four rows are asked for meanwhile, since the
 * processor foresees no jump from row to row (measured: 5 to 8 % more of the memory's speed). */
static void four(const float *x, const float *weight, int64_t inputs, float *sums) {
    vec a = {0}, b = {0}, c = {0}, d = {0};
    const float *w[4] = {weight, weight + inputs, weight + 2 * inputs, weight + 3 * inputs};
    int64_t t = 0;
    for (; t + LANES <= inputs; t += LANES) {
        const vec here = load(x + t);
        if (t % LINE == 0)
            for (int i = 0; i < 4; i++) _mm_prefetch((const char *)(w[i] + 4 * inputs + t), _MM_HINT_T0);
        a += here * load(w[0] + t), b += here * load(w[1] + t);
        c += here * load(w[2] + t), d += here * load(w[3] + t);
    }
    sums[0] = sum_lanes(a), sums[1] = sum_lanes(b), sums[2] = sum_lanes(c), sums[3] = sum_lanes(d);
    for (; t < inputs; t++)
        for (int i = 0; i < 4; i++) sums[i] += x[t] * w[i][t];
}

static void some_outputs(void *context, int64_t item, void *unused) {
    (void)unused;
    const Linear *l = context;
    const float *x = l->normed ? l->scratch : l->x;
    const int64_t end = smaller_of(l->outputs, (item + 1) * SHARE);
    for (int64_t o = item * SHARE; o < end;) {
        float sums[4];
        const int64_t count = end - o >= 4 ? 4 : 1;
        if (count == 4)
            four(x, l->weight + o * l->inputs, l->inputs, sums);
        else
            sums[0] = dot(x, l->weight + o * l->inputs, l->inputs);
        for (int64_t i = 0; i < count; i++, o++) {
            const float value = activate(sums[i] + (l->bias ? l->bias[o] : 0), l->activation);
            l->out[o] = value + (l->residual ? l->residual[o] : 0);
        }
    }
}

void trainshort_linear(const Linear *l) {
    if (l->normed) normalise(l);
    Queue outputs = {some_outputs, (void *)l, blocks_of(l->outputs, SHARE), 0, 0};
    run_queue(&outputs, l->threads, NULL);
}

size_t trainshort_linear_size(void) { return sizeof(Linear); }

typedef struct {
    const Linear *qkv, *out, *wide, *narrow; /* threads 0: as many as the token takes */
    const Linear *gate;                      /* of a clock, or NULL */
    const Token *token;
} Layer;

static void linear(const Linear *layer, int threads) {
    Linear call = *layer;
    if (!call.threads) call.threads = threads;
    trainshort_linear(&call);
}

static int wants_room(const Token *token) {
    for (int64_t i = 0; i < token->ring_count; i++)
        if (token->rings[i].wanted) return 1;
    return 0;
}

/* Runs layers from `first` on; returns the number after the last one done, which is smaller than `count` where a ring of
 * that layer must grow before anything else happens. */
int64_t trainshort_layers(const Layer *layers, int64_t first, int64_t count, int32_t threads) {
    for (int64_t i = first; i < count; i++) {
        const Layer *layer = &layers[i];
        linear(layer->qkv, threads);
        if (layer->gate) linear(layer->gate, threads);
        trainshort_token(layer->token);
        linear(layer->out, threads);
        linear(layer->wide, threads);
        linear(layer->narrow, threads);
        if (wants_room(layer->token)) return i + 1;
    }
    return count;
}

size_t trainshort_layer_size(void) { return sizeof(Layer); }
