/* Forward: each panel walks its keys from the nearest block outwards, with a running softmax, and stops as soon as the
 * bound on everything further out, against the row's real denominator so far, is within the tolerance for every row.
 *
 * Before a block is read the bound is asked about all keys before it. Where they may be left out, the block is the
 * panel's last, and its own keys are asked one after another, from the far end: only those are read that must be. In a
 * steep head the block of the diagonal is read in two parts, since nothing can be left out before every row has met its
 * own key.
 *
 *     blocks of 4 keys, rows 9 to 10:    read 8 9 10 | 4 5 6 7: before 4 all may go; so may 4 and 5 | read 6 7, stop
 */
#ifndef TRAINSHORT_FORWARD_H
#define TRAINSHORT_FORWARD_H

#include "bound.h"
#include "query_tile.h"

typedef struct {
    const Call *call;
    Bound *bounds; /* (batch, heads) */
} Forward;

typedef struct {
    Panel place;
    vec top[WIDE], sum[WIDE]; /* running maximum and sum of e^(score - top) */
    real *queries, *out;      /* [dim][query] */
    real *shifts;             /* [centre][query] the bound's q.c */
    vec norm[WIDE];           /* the queries' norms, rounded up */
    Places places[WIDE];      /* and where they lie among the bound's centres */
    int hurdle;               /* centre whose keys were too heavy to stop, the last time */
    int64_t first;            /* first key read so far */
    real dropped;
    int done;
} Walk;

static void begin_walk(const Call *c, const Bound *bound, Walk *walk, const real *rows) {
    const int padded = padded_dim(c), count = bound->centres.count;
    to_panel(rows, padded, walk->queries);
    memset(walk->out, 0, padded * PANEL * sizeof(real));
    for (int w = 0; w < WIDE; w++) walk->top[w] = spread(LOWEST), walk->sum[w] = (vec){0};
    walk->first = larger_of(walk->place.lowest, 0);
    walk->dropped = 0;
    walk->done = 0;
    walk->hurdle = 0;
    if (!bound->known) return;
    for (int w = 0; w < WIDE; w++) {
        vec square = {0};
        for (int t = 0; t < padded; t++) {
            const vec q = load(walk->queries + t * PANEL + w * LANES);
            square += q * q;
        }
        for (int i = 0; i < LANES; i++) square[i] = (real)sqrt(square[i]);
        walk->norm[w] = square * (1 + rounding(c->dim));
        walk->places[w] = places_of(bound, walk->place.lowest - position(c, 0) + w * LANES);
    }
    panel_dots(walk->queries, bound->centres.rows, padded, padded, count, walk->shifts);
    for (int i = 0; i < count * PANEL; i++) /* lanes of padding must never hold a panel up */
        walk->shifts[i] = i % PANEL < walk->place.rows ? walk->shifts[i] * (real)c->scale : -INFINITY;
}

/* scores -> weights e^(score - top), with sum and output carried over to the new maximum. */
static void soften(Walk *walk, int padded, int keys, real *restrict scores) {
    vec top[WIDE], sum[WIDE];
    ivec moved = {0};
    for (int w = 0; w < WIDE; w++) top[w] = walk->top[w], sum[w] = (vec){0};
    for (int j = 0; j < keys; j++)
        for (int w = 0; w < WIDE; w++) top[w] = larger(load(scores + j * PANEL + w * LANES), top[w]);
    for (int w = 0; w < WIDE; w++) moved |= top[w] != walk->top[w];
    if (any(moved))
        for (int w = 0; w < WIDE; w++) {
            const vec shrink = exp_below_zero(walk->top[w] - top[w]);
            walk->sum[w] *= shrink;
            walk->top[w] = top[w];
            for (int t = 0; t < padded; t++) {
                real *at = walk->out + t * PANEL + w * LANES;
                store(at, load(at) * shrink);
            }
        }
    for (int j = 0; j < keys; j++)
        for (int w = 0; w < WIDE; w++) {
            real *at = scores + j * PANEL + w * LANES;
            const vec weight = exp_below_zero(load(at) - top[w]);
            sum[w] += weight;
            store(at, weight);
        }
    for (int w = 0; w < WIDE; w++) walk->sum[w] += sum[w];
}

/* panel_add that never touches a hidden value: 0 * NaN would leak the future. For blocks with values that are not
 * finite only, so it may be slow. */
static void add_only_visible(const Call *c, Walk *walk, int64_t batch, const real *v, int64_t start, int keys,
                             const real *weights) {
    const int padded = padded_dim(c);
    for (int j = 0; j < keys; j++)
        for (int w = 0; w < WIDE; w++) {
            const ivec hidden = hidden_lanes(c, &walk->place, batch, start + j, w);
            for (int t = 0; t < padded; t++) {
                real *at = walk->out + t * PANEL + w * LANES;
                const vec term = v[j * padded + t] * load(weights + j * PANEL + w * LANES);
                store(at, load(at) + choose(hidden, spread(0), term));
            }
        }
}

/* Takes the keys from `from` up to `behind`, all of one block, into the running softmax; `k` and `v` are the block's. */
static void walk_keys(const Call *c, const Bound *bound, HeadBias bias, Walk *walk, int64_t batch, int64_t from,
                      int64_t behind, const real *k, const real *v, real *scores) {
    const int padded = padded_dim(c), keys = (int)(behind - from);
    const int64_t offset = from % KEYS * padded;
    const int hiding = needs_hiding(c, &walk->place, from, keys);
    panel_dots(walk->queries, k + offset, padded, padded, keys, scores);
    add_bias(&walk->place, (real)c->scale, bias, from, keys, scores);
    if (hiding) hide(c, &walk->place, batch, from, keys, scores);
    soften(walk, padded, keys, scores);
    if (hiding && bound->faulty[from / KEYS])
        add_only_visible(c, walk, batch, v + offset, from, keys, scores);
    else
        panel_add(walk->out, v + offset, padded, padded, keys, scores);
    walk->first = from;
}

/* The bias of each row on a boundary: the most that a key before it can have, where the bias is a table. */
static void fall_since(const Call *c, const Bound *bound, const Panel *place, int64_t boundary, vec *since) {
    if (bound->ceiling) {
        for (int i = 0; i < PANEL; i++) {
            const int64_t nearest = smaller_of(place->lowest + i, place->highest) - boundary + 1;
            /* No key lies before boundary 0, so the largest distance of the table may stand for the one after it. */
            const real most = bound->ceiling[smaller_of(larger_of(nearest, 0), c->k_len - 1)];
            since[i / LANES][i % LANES] = most + (real)fabs(most) * (real)2.4e-6; /* sums with it are rounded at its size */
        }
        return;
    }
    if (!bound->clock) {
        for (int w = 0; w < WIDE; w++) since[w] = -bound->slope * distances(place, boundary, w);
        return;
    }
    for (int i = 0; i < PANEL; i++)
        since[i / LANES][i % LANES] =
            (real)(bound->clock[smaller_of(place->lowest + i, place->highest)] - bound->clock[boundary]);
}

/* Whether every row may leave out all keys before `block`; then `mass` is the most that each row leaves out. Begins with
 * the centre that was in the way the last time: where it still is, the question costs next to nothing. */
static int may_stop(const Call *c, const Bound *bound, Walk *walk, int64_t block, const vec *since, vec *mass) {
    const int count = bound->centres.count, cells = cells_of(bound);
    const real *tails = bound->tail + block * count * cells;
    vec fall[WIDE];
    for (int w = 0; w < WIDE; w++) {
        mass[w] = spread((count + KEYS) * (real)FLT_MIN); /* what exp_below_zero rounds to 0 is still something */
        fall[w] = bound->slack + since[w] - walk->top[w];
    }
    for (int i = 0; i < count; i++) {
        const int n = (walk->hurdle + i) % count;
        for (int w = 0; w < WIDE; w++) {
            const vec excess = tail_at(bound, tails + n * cells, &walk->places[w]) + load(walk->shifts + n * PANEL + w * LANES) + fall[w];
            mass[w] += exp_below_zero(excess);
            const ivec small = (excess <= 0) & (mass[w] <= (real)c->tolerance * walk->sum[w]);
            if (any(~small)) {
                walk->hurdle = n;
                return 0;
            }
        }
    }
    return 1;
}

/* Adds to `mass` the most that the keys from `from` on can weigh, STEP of them; 0 where that is too much for some row. */
static int may_leave(const Call *c, const Bound *bound, const Walk *walk, int64_t from, const vec *since, vec *mass) {
    const int64_t start = from / KEYS * KEYS;
    ivec small = spread(0) == 0;
    for (int64_t key = from; key < from + STEP; key++) {
        const real *shift = walk->shifts + bound->nearest[key] * PANEL;
        const real rise = bound->clock ? (real)(bound->clock[start] - bound->clock[smaller_of(key, c->k_len - 1)])
                                       : bound->slope * (real)(key - start);
        vec own[WIDE];
        if (bound->ceiling) fall_since(c, bound, &walk->place, key + 1, own);
        for (int w = 0; w < WIDE; w++) {
            const vec bias = bound->ceiling ? own[w] : since[w] + rise;
            const vec score = load(shift + w * LANES) + walk->norm[w] * bound->reach[key] + bias;
            const vec excess = score + (bound->slack - walk->top[w]);
            mass[w] += exp_below_zero(excess);
            small &= (excess <= 0) & (mass[w] <= (real)c->tolerance * walk->sum[w]);
        }
    }
    return !any(~small);
}

/* The first key before `behind` in its block that the panel must read: `behind` itself when there is none, the block's
 * first when the walk goes on. Where it ends, `dropped` is the most that any row leaves out. */
static int64_t first_needed(const Call *c, const Bound *bound, Walk *walk, int64_t block, int64_t behind) {
    vec since[WIDE], mass[WIDE], most = {0};
    const int64_t start = block * KEYS;
    if (!bound->known) return start;
    fall_since(c, bound, &walk->place, start, since);
    if (!may_stop(c, bound, walk, block, since, mass)) return start;
    int64_t key = start;
    for (int w = 0; w < WIDE; w++) most = larger(mass[w] / walk->sum[w], most);
    while (!bound->faulty[block] && key < behind && may_leave(c, bound, walk, key, since, mass)) {
        for (int w = 0; w < WIDE; w++) most = larger(mass[w] / walk->sum[w], most);
        key += STEP;
    }
    walk->dropped = key ? (real)FLT_MIN : 0; /* at least: where something is left out, nobody shall read 0 */
    for (int i = 0; key && i < LANES; i++) walk->dropped = most[i] > walk->dropped ? most[i] : walk->dropped;
    walk->done = 1;
    return key;
}

static void walk_block(const Call *c, const Bound *bound, HeadBias bias, Walk *walk, int64_t batch, int64_t block,
                       const real *k, const real *v, real *scores) {
    const int64_t start = block * KEYS, own = larger_of(start, walk->place.lowest / STEP * STEP);
    int64_t behind = start + visible_keys(&walk->place, start);
    if (own < behind && bound->known && bound->steep) {
        walk_keys(c, bound, bias, walk, batch, own, behind, k, v, scores);
        behind = own;
    }
    const int64_t from = behind > start ? first_needed(c, bound, walk, block, behind) : start;
    if (from < behind) walk_keys(c, bound, bias, walk, batch, from, behind, k, v, scores);
    walk->done |= start <= walk->place.reach;
}

static void end_walk(const Call *c, Walk *walk, int64_t batch, int64_t head, int64_t row, real *line) {
    const int padded = padded_dim(c);
    const int64_t at = batch * c->heads + head, panel = at * panels_of(c) + row / PANEL;
    c->first_keys[panel] = (int32_t)walk->first;
    c->dropped_mass[panel] = (float)walk->dropped;
    for (int i = 0; i < walk->place.rows; i++) {
        const real sum = walk->sum[i / LANES][i % LANES], top = walk->top[i / LANES][i % LANES];
        for (int t = 0; t < padded; t++) line[t] = walk->out[t * PANEL + i] / sum;
        write_row(c, row_at(c, &c->out, batch, head, row + i), line);
        c->lse[at * c->q_len + row + i] = (double)top + log((double)sum);
    }
}

/* One item: ROWS queries of one head. */
static void forward_rows(void *context, int64_t item, void *scratch) {
    const Forward *forward = context;
    const Call *c = forward->call;
    const int padded = padded_dim(c);
    const int64_t blocks = blocks_of(c->q_len, ROWS), at = item / blocks;
    const int64_t batch = at / c->heads, head = at % c->heads, kv = kv_head(c, head);
    const int64_t row = (blocks - 1 - item % blocks) * ROWS; /* the longest first, so that no thread ends on one */
    const Bound *bound = &forward->bounds[at];
    const HeadBias bias = head_bias(c, batch, head);
    real *k_rows = scratch, *v_rows = k_rows + KEYS * padded, *scores = v_rows + KEYS * padded;
    real *panels = scores + KEYS * PANEL;

    Walk walks[PANELS];
    int count = 0;
    for (; count < PANELS && row + count * PANEL < c->q_len; count++) {
        Walk *walk = &walks[count];
        walk->queries = panels + count * (2 * padded + most_centres(c)) * PANEL;
        walk->out = walk->queries + padded * PANEL;
        walk->shifts = walk->out + padded * PANEL;
        place_panel(c, batch, row + count * PANEL, &walk->place);
        begin_walk(c, bound, walk, read_rows(c, &c->q, batch, head, row + count * PANEL, PANEL, c->q_len, k_rows));
    }
    int walking = count;
    for (int64_t block = walks[count - 1].place.highest / KEYS; walking; block--) {
        const real *k = read_rows(c, &c->k, batch, kv, block * KEYS, KEYS, c->k_len, k_rows);
        const real *v = read_rows(c, &c->v, batch, kv, block * KEYS, KEYS, c->k_len, v_rows);
        for (int p = 0; p < count; p++) {
            Walk *walk = &walks[p];
            if (walk->done || !visible_keys(&walk->place, block * KEYS)) continue;
            walk_block(c, bound, bias, walk, batch, block, k, v, scores);
            walking -= walk->done;
        }
    }
    for (int p = 0; p < count; p++) end_walk(c, &walks[p], batch, head, row + p * PANEL, scores);
}

#endif
