/* A few dozen vectors such that each key of a head lies close to one of them, and a few for its queries.
 *
 * The keys of a trained model are not a cloud around their mean: they lie in clusters (the same token gives about the
 * same key) and near a few directions; so do the queries. The bound measures each from its nearest centre, so what it
 * does not know about a score shrinks with the clusters, not with the whole cloud. Any set of centres is sound; good
 * ones skip more.
 *
 * They are found on a sample: each next centre is the sample furthest from all before it (which leaves none far from
 * every centre), then each moves to the mean of the samples it is nearest to. The result depends on the keys and queries
 * alone, not on threads or chance.
 */
#ifndef TRAINSHORT_CENTRES_H
#define TRAINSHORT_CENTRES_H

#include "args.h"

enum {
    MOST_CENTRES = 72, /* at most 256: a key notes its own in a byte */
    KEYS_EACH = 64,    /* keys to a centre: finding the nearest one must cost little beside the attention itself */
    SAMPLES_EACH = 12, /* sampled keys to a centre */
    ENOUGH_FALL = 10,  /* nats over a block of keys from which on a head's window is so short that few centres do */
    FEW_CENTRES = 16,
    FEWEST_CENTRES = 4,
    QUERY_CENTRES = 16,     /* of the queries */
    NO_QUERY_CENTRES = 4,   /* zeros in their place (a tile's height) where there are fewer keys or dims than */
    ENOUGH_KEYS = 2048,
    ENOUGH_DIMS = 48,       /* narrow heads gain a hundredth, and the tails would take more memory than the output */
    ENOUGH_WITH_CLOCK = 16, /* with a clock of the text a tenth */
};

#define CLUSTERED 1.15 /* what `find_centres` gives of queries whose centres are worth their cost: 0.7 to 1.06 in trained
                        * models of ours, 1.2 to 1.3 of random normal numbers */

typedef struct {
    int count;    /* a multiple of four, as panel_dots wants it */
    real *rows;   /* [centre][dim] */
    real *halves; /* |centre|^2 / 2 */
} Centres;

/* The keys or queries of one head. */
typedef struct {
    const Tensor *tokens;
    int64_t batch, head, length;
} Crowd;

INLINE int most_centres(const Call *c) {
    const int64_t fours = smaller_of(c->k_len / KEYS_EACH, MOST_CENTRES) / 4;
    return (int)larger_of(fours * 4, FEWEST_CENTRES);
}

INLINE int most_query_centres(const Call *c) {
    const int dims = c->cumulative_decay ? ENOUGH_WITH_CLOCK : ENOUGH_DIMS;
    return c->k_len < ENOUGH_KEYS || c->dim < dims ? NO_QUERY_CENTRES : QUERY_CENTRES;
}

INLINE int samples_of(int centres) { return (int)(blocks_of(centres * SAMPLES_EACH, PANEL) * PANEL); }

/* Reals of scratch that `find_centres` needs: samples, how far each is from every centre, products, a row. */
INLINE size_t centres_scratch(const Call *c) {
    const size_t most = larger_of(most_centres(c), QUERY_CENTRES), samples = samples_of(most), padded = padded_dim(c);
    return samples * (padded + 1) + most * (PANEL + padded) + padded;
}

/* Nearest centre of each token of a panel ([dim][token]). `dots` holds a panel of products for every centre. */
static void nearest_centres(const Centres *centres, const real *panel, int padded, real *dots, uint8_t *nearest) {
    panel_dots(panel, centres->rows, padded, padded, centres->count, dots);
    for (int w = 0; w < WIDE; w++) {
        vec least = spread(INFINITY);
        ivec index = {0};
        for (int n = 0; n < centres->count; n++) {
            const vec gap = centres->halves[n] - load(dots + n * PANEL + w * LANES); /* half of |k - c|^2 - |k|^2 */
            const ivec closer = gap < least;
            least = choose(closer, gap, least);
            index = (closer & ((ivec){0} + n)) | (~closer & index);
        }
        for (int i = 0; i < LANES; i++) nearest[w * LANES + i] = (uint8_t)index[i];
    }
}

static void read_sample(const Call *c, const Crowd *of, int sample, int samples, real *row) {
    read_row(c, row_at(c, of->tokens, of->batch, of->head, sample * of->length / samples), row);
    memset(row + c->dim, 0, (padded_dim(c) - c->dim) * sizeof(real));
}

static void set_centre(Centres *centres, int n, const real *row, int padded) {
    real *centre = centres->rows + n * padded, half = 0;
    memcpy(centre, row, padded * sizeof(real));
    for (int t = 0; t < padded; t++) half += centre[t] * centre[t] / 2;
    if (!isfinite(half)) { /* any centre is sound; a finite one spares the rows that do not see the faulty key */
        memset(centre, 0, padded * sizeof(real));
        half = 0;
    }
    centres->halves[n] = half;
}

/* gaps = the smaller of gaps and each sample's squared distance from a new centre; returns the sample furthest away. */
static int narrow_gaps(const real *panels, int samples, const real *centre, int padded, real *gaps) {
    for (int s = 0; s < samples; s += PANEL) {
        const real *panel = panels + s * padded;
        vec square[WIDE] = {{0}};
        for (int t = 0; t < padded; t++)
            for (int w = 0; w < WIDE; w++) {
                const vec difference = load(panel + t * PANEL + w * LANES) - centre[t];
                square[w] += difference * difference;
            }
        for (int w = 0; w < WIDE; w++) {
            const vec gap = load(gaps + s + w * LANES);
            store(gaps + s + w * LANES, choose(square[w] < gap, square[w], gap));
        }
    }
    int furthest = 0;
    real widest = -1;
    for (int s = 0; s < samples; s++)
        if (gaps[s] > widest && gaps[s] < INFINITY) widest = gaps[s], furthest = s; /* infinite: not a finite key */
    return furthest;
}

/* Each centre becomes the mean of the samples that it is the nearest centre of. */
static void move_to_means(const Call *c, const Crowd *of, Centres *centres, const real *panels, int samples, real *dots,
                          real *sums, real *row) {
    const int padded = padded_dim(c);
    int counts[MOST_CENTRES] = {0};
    uint8_t nearest[PANEL];
    memset(sums, 0, centres->count * padded * sizeof(real));
    for (int s = 0; s < samples; s += PANEL) {
        nearest_centres(centres, panels + s * padded, padded, dots, nearest);
        for (int i = 0; i < PANEL; i++) {
            real *sum = sums + nearest[i] * padded;
            read_sample(c, of, s + i, samples, row);
            for (int t = 0; t < padded; t++) sum[t] += row[t];
            counts[nearest[i]]++;
        }
    }
    for (int n = 0; n < centres->count; n++) {
        real *sum = sums + n * padded;
        for (int t = 0; t < padded; t++) sum[t] /= counts[n];
        if (counts[n]) set_centre(centres, n, sum, padded);
    }
}

/* Returns how far the samples lie from the nearest centre, to how far from zero: the root of two sums of squares. It is
 * taken before the centres move, while they are samples themselves. */
static real find_centres(const Call *c, const Crowd *of, int count, Centres *centres, real *scratch) {
    const int padded = padded_dim(c), samples = samples_of(count);
    double apart = 0, size = 0;
    centres->count = count;
    real *panels = scratch, *gaps = panels + samples * padded, *dots = gaps + samples;
    real *sums = dots + centres->count * PANEL, *row = sums + centres->count * padded;
    for (int s = 0; s < samples; s++) {
        read_sample(c, of, s, samples, row);
        for (int t = 0; t < padded; t++) {
            panels[(s / PANEL * padded + t) * PANEL + s % PANEL] = row[t];
            size += (double)row[t] * row[t];
        }
        gaps[s] = INFINITY;
    }
    for (int n = 0, next = 0; n < centres->count; n++) {
        read_sample(c, of, next, samples, row);
        set_centre(centres, n, row, padded);
        next = narrow_gaps(panels, samples, centres->rows + n * padded, padded, gaps);
    }
    for (int s = 0; s < samples; s++) apart += gaps[s];
    move_to_means(c, of, centres, panels, samples, dots, sums, row);
    return (real)sqrt(apart / size);
}

#endif
