/* A panel of query rows: which positions and segments its lanes stand for, and its scores on a block of keys. */
#ifndef TRAINSHORT_PANEL_H
#define TRAINSHORT_PANEL_H

#include "args.h"

enum { PANELS = 4, ROWS = PANELS * PANEL }; /* query rows that share one pass over the keys */

typedef struct {
    ivec segment_id[WIDE];
    int64_t lowest, highest; /* positions of the first and the last real row */
    int64_t reach;           /* no row sees a key before this one (sliding window, segments) */
    int rows;                /* real rows; the lanes after them are padding */
} Panel;

static void place_panel(const Call *c, int64_t batch, int64_t row, Panel *panel) {
    panel->rows = (int)smaller_of(PANEL, c->q_len - row);
    panel->lowest = position(c, row);
    panel->highest = panel->lowest + panel->rows - 1;
    panel->reach = larger_of(0, panel->lowest - c->window + 1);
    const int32_t *segment_ids = c->segment_ids ? c->segment_ids + batch * c->k_len : NULL;
    int64_t earliest = panel->highest;
    for (int i = 0; i < PANEL; i++) {
        const int64_t at = panel->lowest + i, real_at = smaller_of(at, panel->highest);
        panel->segment_id[i / LANES][i % LANES] = segment_ids ? segment_ids[real_at] : 0;
        if (segment_ids) earliest = smaller_of(earliest, c->segment_starts[batch * c->k_len + real_at]);
    }
    if (segment_ids) panel->reach = larger_of(panel->reach, earliest);
}

/* How far each of some lanes lies behind or before a key. Rows and keys are told apart as whole numbers: a float has no
 * room for positions past 2^24, but every distance near zero is exact in it. */
INLINE vec distances(const Panel *panel, int64_t key, int w) {
    vec lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = (real)(w * LANES + i);
    return (real)(panel->lowest - key) + lanes;
}

/* Keys of a block that some row of the panel can see; 0 when the block lies in the panel's future. */
INLINE int visible_keys(const Panel *panel, int64_t start) {
    return (int)larger_of(0, smaller_of(KEYS, panel->highest - start + 1));
}

/* dots -> scores: scale * dot + clock[row] - clock[key]. */
static void add_clock(const Panel *panel, real scale, const double *clock, int64_t start, int keys,
                      real *restrict scores) {
    vec high[WIDE], low[WIDE];
    for (int i = 0; i < PANEL; i++) {
        const Reading row = reading(clock[smaller_of(panel->lowest + i, panel->highest)]);
        high[i / LANES][i % LANES] = row.high, low[i / LANES][i % LANES] = row.low;
    }
    for (int j = 0; j < keys; j++) {
        const Reading key = reading(clock[smaller_of(start + j, panel->highest)]);
        for (int w = 0; w < WIDE; w++) {
            real *at = scores + j * PANEL + w * LANES;
            store(at, load(at) * scale + ((high[w] - key.high) + (low[w] - key.low)));
        }
    }
}

/* dots -> scores: scale * dot - slope * distance, from exact distances, or scale * dot + table[distance]: the lanes of a
 * panel stand side by side in the table. */
static void add_bias(const Panel *panel, real scale, HeadBias bias, int64_t start, int keys, real *restrict scores) {
    if (bias.clock) {
        add_clock(panel, scale, bias.clock, start, keys, scores);
        return;
    }
    if (bias.table) {
        for (int j = 0; j < keys; j++)
            for (int w = 0; w < WIDE; w++) {
                real *at = scores + j * PANEL + w * LANES;
                store(at, load(at) * scale + load(bias.table + panel->lowest - (start + j) + w * LANES));
            }
        return;
    }
    for (int j = 0; j < keys; j++)
        for (int w = 0; w < WIDE; w++) {
            real *at = scores + j * PANEL + w * LANES;
            store(at, load(at) * scale - bias.slope * distances(panel, start + j, w));
        }
}

/* Whether some row of the panel must not see some of these keys. */
INLINE int needs_hiding(const Call *c, const Panel *panel, int64_t start, int keys) {
    return c->segment_ids || start + keys - 1 > panel->lowest || panel->highest - start >= c->window;
}

INLINE ivec hidden_lanes(const Call *c, const Panel *panel, int64_t batch, int64_t key, int w) {
    ivec lane;
    for (int i = 0; i < LANES; i++) lane[i] = w * LANES + i;
    /* The row at lowest + lane sees the key if 0 <= lowest + lane - key < window. */
    const int64_t ahead = key - panel->lowest, beyond = ahead + c->window;
    ivec hidden = (lane < (whole)smaller_of(larger_of(ahead, 0), PANEL)) |
                  (lane >= (whole)smaller_of(larger_of(beyond, 0), PANEL));
    if (c->segment_ids) {
        const int64_t last = smaller_of(key, c->k_len - 1); /* keys past the end are in everybody's future */
        hidden |= panel->segment_id[w] != c->segment_ids[batch * c->k_len + last];
    }
    return hidden;
}

/* The future, what is outside the window, and other segments get -infinity. */
static void hide(const Call *c, const Panel *panel, int64_t batch, int64_t start, int keys, real *restrict scores) {
    for (int j = 0; j < keys; j++)
        for (int w = 0; w < WIDE; w++) {
            real *at = scores + j * PANEL + w * LANES;
            store(at, choose(hidden_lanes(c, panel, batch, start + j, w), spread(-INFINITY), load(at)));
        }
}

#endif
