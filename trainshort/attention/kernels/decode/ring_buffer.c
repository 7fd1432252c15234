/* One token against rings of past keys, a ring per key head, each of its own length: attention, what was forgotten, and
 * the newest key put in its place. Called through ctypes by ring.py, whose structs mirror these.
 *
 * A ring holds the keys at distances 1 to count. The order in it does not matter to a softmax:
 *
 *     capacity 4, tokens 0 to 5 read, next = 2:   slot      0 1 2 3
 *                                                 token     4 5 2 3
 *                                                 distance  2 1 4 3     of the token 6 that comes now
 *
 * A key's bias is -slope * distance, or under a clock what it has gone since: clock[now] - clock[key]. Readings of a clock
 * lie in the order of the text, so that of the key at some distance stands that far before the newest.
 */
#include "ring_buffer.h"

#include "thread_pool.h"
#include "simd.h"

enum { RUN = 64 }; /* keys scored before their values are added up: both stay in the first-level cache */

typedef struct {
    float *query, *out;  /* [padded] */
    const double *clock; /* readings; that of the key at a distance is clock[-distance], the token's own clock[0]; or NULL */
    float top, sum;
} Row;

INLINE int64_t padded_to_lanes(int64_t dim) { return blocks_of(dim, LANES) * LANES; }

/* Floats that one ring's rows need: query and output of each, and the rows themselves. */
static int64_t scratch_size(const Token *token) {
    const int64_t group = token->head_count / token->ring_count;
    return padded_to_lanes(group * (2 * padded_to_lanes(token->dim) + (int64_t)(sizeof(Row) / sizeof(float))));
}

static double norm(const float *x, int64_t dim) {
    double sum = 0;
    for (int64_t t = 0; t < dim; t++) sum += (double)x[t] * x[t];
    return sqrt(sum);
}

/* out = out * shrink + weights . values, 32 columns at a time in registers. */
static void add_values(float *out, float shrink, const float *weights, const float *values, int keys, int64_t padded) {
    int64_t t = 0;
    for (; t + 4 * LANES <= padded; t += 4 * LANES) {
        vec a = load(out + t) * shrink, b = load(out + t + LANES) * shrink;
        vec c = load(out + t + 2 * LANES) * shrink, d = load(out + t + 3 * LANES) * shrink;
        for (int j = 0; j < keys; j++) {
            const float *v = values + j * padded + t;
            a += weights[j] * load(v), b += weights[j] * load(v + LANES);
            c += weights[j] * load(v + 2 * LANES), d += weights[j] * load(v + 3 * LANES);
        }
        store(out + t, a), store(out + t + LANES, b), store(out + t + 2 * LANES, c), store(out + t + 3 * LANES, d);
    }
    for (; t < padded; t += LANES) {
        vec a = load(out + t) * shrink;
        for (int j = 0; j < keys; j++) a += weights[j] * load(values + j * padded + t);
        store(out + t, a);
    }
}

/* Takes up to RUN neighbouring slots into a row's running softmax; `distance` is that of the first, the oldest. */
static void add_keys(const Token *token, const Head *head, Row *row, const float *keys, const float *values, int count,
                     int64_t distance, int64_t padded) {
    float scores[RUN];
    float top = row->top;
    for (int j = 0; j < RUN; j++) {
        scores[j] = -INFINITY;
        if (j >= count || distance - j >= token->limit) continue;
        const float bias = row->clock ? (float)(row->clock[0] - row->clock[j - distance])
                                      : -(float)head->slope * (float)(distance - j);
        scores[j] = dot(row->query, keys + j * padded, padded) * (float)token->scale + bias;
        if (scores[j] > top) top = scores[j];
    }
    const float shrink = expf(row->top - top);
    vec sum = {0};
    for (int j = 0; j < RUN; j += LANES) {
        const vec weights = exp_below_zero(load(scores + j) - top);
        store(scores + j, weights);
        sum += weights;
    }
    row->sum *= shrink;
    for (int i = 0; i < LANES; i++) row->sum += sum[i];
    row->top = top;
    add_values(row->out, shrink, scores, values, count, padded);
}

/* Moves a head's clock on by its gate; returns where the new reading stands. */
static const double *tick(const Token *token, int64_t head) {
    double *now = token->clock + head * token->clock_stride + token->held;
    const double gate = token->sign * (double)token->gates[head];
    const double fall = gate < 0 ? gate - log1p(exp(gate)) : -log1p(exp(-gate)); /* log sigmoid */
    *now = (token->held ? now[-1] : 0) + fall;
    if (!token->length) token->heads[head].began = *now;
    return now;
}

static void begin_row(const Token *token, int64_t head, int64_t ring, Row *row, float *memory, int64_t padded) {
    row->clock = token->clock ? tick(token, head) : NULL;
    memset(memory, 0, 2 * padded * sizeof(float));
    row->query = memory, row->out = memory + padded;
    memcpy(row->query, token->q + head * token->q_stride, token->dim * sizeof(float));
    for (int64_t t = 0; token->factors && t < token->dim; t++) row->query[t] *= token->factors[head];
    memcpy(row->out, token->v + ring * token->v_stride, token->dim * sizeof(float));
    const float *own = token->k + ring * token->k_stride;
    double score = 0;
    for (int64_t t = 0; t < token->dim; t++) score += (double)row->query[t] * own[t];
    row->top = (float)(score * token->scale), row->sum = 1; /* the token's own key, at distance 0 */
}

/* Two ways to keep the larger, as in bounded.py: for the promise NaN counts as larger than anything and stays; for the
 * length of rings what is not finite says nothing about the queries to come. */
static void raise_promise(double *promised, double value) {
    if (!isnan(*promised) && !(value <= *promised)) *promised = value;
}

static void raise_finite(double *measured, double value) {
    if (isfinite(value) && value > *measured) *measured = value;
}

/* Writes the output; what the forgotten keys can have weighed in this row; how far this query reaches. */
static void end_row(const Token *token, const Ring *ring, int64_t index, const Row *row) {
    Head *head = &token->heads[index];
    float *out = token->out + index * token->dim;
    for (int64_t t = 0; t < token->dim; t++) out[t] = row->out[t] / row->sum;
    const double lse = (double)row->top + log((double)row->sum), reach = norm(row->query, token->dim) * token->scale;
    if (token->length > ring->count && ring->count + 1 < token->limit) {
        const double excess = reach * ring->far - lse;
        const double mass = row->clock ? exp(excess + row->clock[0] + head->weight)
                                       : exp(excess - head->slope * (double)(ring->count + 1)) / -expm1(-head->slope);
        raise_promise(&head->mass, mass);
        if (!(mass <= token->tolerance)) head->above++;
    }
    const double fallen = row->clock ? head->began - row->clock[0] : (double)token->length * head->slope;
    if (fallen >= token->settled) raise_finite(&head->excess, reach * ring->peak - lse);
}

static double log_of_sum(double a, double b) {
    const double top = a > b ? a : b;
    return isfinite(top) ? top + log1p(exp(-fabs(a - b))) : top;
}

/* The same under a clock, as `_wanted` in clocked.py: where the oldest key of a full ring cannot be forgotten, all are
 * kept, and a quarter more. */
static int64_t wanted_by_clock(const Token *token, const Ring *ring, const Head *heads, const Row *rows, int64_t group) {
    const int64_t limit = token->limit - 1;
    int64_t most = ring->count;
    for (int64_t i = 0; i < group; i++) {
        const double room = log(token->tolerance) - heads[i].excess - token->margin - rows[i].clock[0];
        if (!isfinite(room)) return larger_of(1, limit);
        if (!(log_of_sum(heads[i].weight, -rows[i].clock[-ring->count]) <= room)) most = ring->count + 1;
    }
    if (most > ring->capacity) most += most / 4;
    return larger_of(1, smaller_of(most, limit));
}

/* Keys that the heads of one ring need to keep; the same rule as `wanted` in bounded.py. */
static int64_t wanted(const Token *token, const Head *heads, int64_t group) {
    const int64_t all = larger_of(1, token->limit - 1);
    double most = 1;
    for (int64_t i = 0; i < group; i++) {
        const double m = heads[i].slope, excess = heads[i].excess;
        const double need = (excess + token->margin - log(token->tolerance) - log(-expm1(-m))) / m;
        if (!(m > 0) || !isfinite(need)) return all;
        if (need > most) most = need;
    }
    return most < (double)all ? smaller_of(all, (int64_t)ceil(most)) : all;
}

static void insert(const Token *token, Ring *ring, int64_t index, const Row *rows, int64_t padded) {
    float *key = ring->keys + ring->next * padded, *value = ring->values + ring->next * padded;
    if (ring->count == ring->capacity) {
        const int64_t group = token->head_count / token->ring_count;
        Head *heads = token->heads + index * group;
        raise_promise(&ring->far, norm(key, token->dim));
        for (int64_t i = 0; token->clock && i < group; i++)
            heads[i].weight = log_of_sum(heads[i].weight, -rows[i].clock[-ring->count]);
    } else {
        ring->count++;
    }
    memcpy(key, token->k + index * token->k_stride, token->dim * sizeof(float));
    memcpy(value, token->v + index * token->v_stride, token->dim * sizeof(float));
    if (++ring->next == ring->capacity) ring->next = 0;
}

/* One item: a ring and all query heads that share it. Later heads have flatter slopes and longer rings: they go first. */
static void read_ring(void *context, int64_t item, void *unused) {
    (void)unused;
    const Token *token = context;
    const int64_t index = token->ring_count - 1 - item, group = token->head_count / token->ring_count;
    float *scratch = token->scratch + index * scratch_size(token);
    const int64_t padded = padded_to_lanes(token->dim), first = index * group;
    Ring *ring = &token->rings[index];
    Row *rows = (Row *)(scratch + group * 2 * padded);
    raise_finite(&ring->peak, norm(token->k + index * token->k_stride, token->dim));
    for (int64_t i = 0; i < group; i++) begin_row(token, first + i, index, &rows[i], scratch + i * 2 * padded, padded);
    for (int64_t slot = 0; slot < ring->count;) {
        const int older = slot >= ring->next; /* than slot 0: written before the ring came round */
        const int64_t end = older ? ring->count : ring->next, distance = ring->next - slot + (older ? ring->capacity : 0);
        const int keys = (int)smaller_of(RUN, end - slot);
        for (int64_t i = 0; i < group; i++)
            add_keys(token, &token->heads[first + i], &rows[i], ring->keys + slot * padded,
                     ring->values + slot * padded, keys, distance, padded);
        slot += keys;
    }
    for (int64_t i = 0; i < group; i++) end_row(token, ring, first + i, &rows[i]);
    ring->wanted = 0;
    if (ring->count == ring->capacity) {
        const int64_t most = token->clock ? wanted_by_clock(token, ring, token->heads + first, rows, group)
                                          : wanted(token, token->heads + first, group);
        if (most > ring->capacity) {
            ring->wanted = most;
            return;
        }
    }
    insert(token, ring, index, rows, padded);
}

void trainshort_token(const Token *token) {
    Queue rings = {read_ring, (void *)token, token->ring_count, 0, 0};
    run_queue(&rings, token->threads, NULL);
}

int64_t trainshort_token_scratch(const Token *token) { return token->ring_count * scratch_size(token); }

size_t trainshort_token_size(void) { return sizeof(Token); }
