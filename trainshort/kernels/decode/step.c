/* One token through a model's layers, without a way back to Python in between: thirty small calls from there would cost
 * as much as a third of the work, and let the helpers fall asleep each time.
 *
 * All rows live in buffers that the structs point to; x is rewritten in place by every layer:
 *
 *     qkv = W norm(x)      y = attend(qkv)      x += W y      x += W act(W norm(x))
 *
 * and where the bias is a clock, gates = W norm(x) say how far it goes on.
 */
#include "ring.h"
#include "row.h"

#include <stddef.h>

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
