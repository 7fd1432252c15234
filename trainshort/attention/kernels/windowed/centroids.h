/* Centroids: a few dozen vectors such that each key of a head lies close to one of them, and some for the queries.
 *
 * The keys of a trained model lie in clusters, because equal tokens have similar keys. So do the queries. The bound in
 * bound.h measures each key and each query from its nearest centroid, so its error depends on the size of the clusters.
 * The bound is valid for every choice of centroids. Good centroids allow the kernel to skip more keys.
 *
 * The centroids are found on a sample of the keys or queries:
 *
 * 1. Each centroid starts at the sample that is farthest from all previous centroids.
 * 2. Each centroid moves to the mean of the samples that are nearest to it.
 *
 * The result depends only on the keys and queries. It does not depend on the number of threads or on random numbers.
 */
#ifndef TRAINSHORT_CENTROIDS_H
#define TRAINSHORT_CENTROIDS_H

#include "args.h"

enum {
    /* The largest number of key centroids. It must be at most 256, because each key stores its centroid in a byte. */
    MAX_CENTROIDS = 72,
    MIN_CENTROIDS = 4,
    /* The number of keys for each centroid. With fewer keys, finding the nearest centroids would take too long. */
    KEYS_PER_CENTROID = 64,
    /* The number of sampled keys for each centroid. */
    SAMPLES_PER_CENTROID = 12,

    /* A head is steep if its bias falls by more than this over a block of keys. Steep heads have short windows, so they
     * need few centroids. */
    STEEP_BIAS_DROP = 10,
    STEEP_CENTROIDS = 16,

    /* The number of query centroids. */
    QUERY_CENTROIDS = 16,
    /* Without query centroids, this many zero vectors are used. `compute_dots` needs a multiple of four. */
    ZERO_QUERY_CENTROIDS = 4,
    /* Query centroids are used from this number of keys on. */
    MIN_KEYS_FOR_QUERY_CENTROIDS = 2048,
    /* Query centroids are used from this head dimension on. With narrow heads they save about 1 % of the work, and need
     * more memory than the attention output. */
    MIN_DIM_FOR_QUERY_CENTROIDS = 48,
    /* The same limit with a decay bias, where query centroids save about 10 % of the work. */
    MIN_DIM_FOR_QUERY_CENTROIDS_WITH_DECAY = 16,
};

/* Query centroids are used if `find_centroids` returns less than this for the queries. The result is between 0.7 and
 * 1.06 for trained models, and between 1.2 and 1.3 for random normal numbers. */
#define MAX_CLUSTER_SPREAD 1.15

typedef struct {
    int count;                /* a multiple of four, as `compute_dots` needs */
    real *vectors;            /* [centroid][dim] */
    real *half_squared_norms; /* half of the squared norm of each centroid */
} Centroids;

/* The keys or the queries of one head. */
typedef struct {
    const Tensor *tensor;
    int64_t batch, head, length;
} HeadTokens;

/* The number of key centroids, which grows with the number of keys. The number is a multiple of four. */
INLINE int key_centroid_count(const Call *c) {
    const int64_t count = smaller_of(c->k_len / KEYS_PER_CENTROID, MAX_CENTROIDS);
    const int64_t multiple_of_four = count / 4 * 4;
    return (int)larger_of(multiple_of_four, MIN_CENTROIDS);
}

/* The largest number of query centroids for a call. */
INLINE int max_query_centroids(const Call *c) {
    const int min_dim = c->cumulative_decay ? MIN_DIM_FOR_QUERY_CENTROIDS_WITH_DECAY : MIN_DIM_FOR_QUERY_CENTROIDS;
    const int is_too_small = c->k_len < MIN_KEYS_FOR_QUERY_CENTROIDS || c->dim < min_dim;
    return is_too_small ? ZERO_QUERY_CENTROIDS : QUERY_CENTROIDS;
}

/* The number of samples for a number of centroids. The samples fill complete tiles. */
INLINE int sample_count(int centroids) {
    return (int)(blocks_of(centroids * SAMPLES_PER_CENTROID, QUERY_TILE) * QUERY_TILE);
}

/* The scratch memory of `find_centroids`, in reals: samples, sample distances, dot products, sums and one row. */
INLINE size_t centroid_scratch_size(const Call *c) {
    const size_t max_centroids = larger_of(key_centroid_count(c), QUERY_CENTROIDS);
    const size_t samples = sample_count(max_centroids);
    const size_t padded = padded_dim(c);
    return samples * (padded + 1) + max_centroids * (QUERY_TILE + padded) + padded;
}

/* Find the nearest centroid of each token of a tile, which has QUERY_TILE tokens.
 *
 * `tile` holds the tokens as [dim][token]. `padded` is the number of dimensions. `dots` is scratch memory for the dot
 * products of all centroids with the tile. `nearest` receives the index of the nearest centroid of each token. */
static void find_nearest_centroids(const Centroids *centroids, const real *tile, int padded, real *dots,
                                   uint8_t *nearest) {
    compute_dots(tile, centroids->vectors, padded, padded, centroids->count, dots);
    for (int w = 0; w < TILE_VECTORS; w++) {
        vec smallest = broadcast(INFINITY);
        ivec index = {0};
        for (int n = 0; n < centroids->count; n++) {
            /* Half of |token - centroid|^2 - |token|^2. The smallest value belongs to the nearest centroid. */
            const vec distance = centroids->half_squared_norms[n] - load(dots + n * QUERY_TILE + w * LANES);
            const ivec closer = distance < smallest;
            smallest = select_lanes(closer, distance, smallest);
            /* Set the index to n in the lanes in which this centroid is closer. A true lane has all bits set. */
            index = (closer & ((ivec){0} + n)) | (~closer & index);
        }
        for (int i = 0; i < LANES; i++) nearest[w * LANES + i] = (uint8_t)index[i];
    }
}

/* Read the sample with the index `sample` into `row`. The `samples` samples are spread evenly over all tokens. */
static void read_sample(const Call *c, const HeadTokens *tokens, int sample, int samples, real *row) {
    const int64_t token = sample * tokens->length / samples;
    read_row(c, row_address(c, tokens->tensor, tokens->batch, tokens->head, token), row);
    memset(row + c->dim, 0, (padded_dim(c) - c->dim) * sizeof(real));
}

/* Set the centroid with the index `n` to a vector.
 *
 * A vector that is not finite is replaced by zeros. Otherwise one key that is infinite or NaN would also affect queries
 * that do not see this key. */
static void set_centroid(Centroids *centroids, int n, const real *row, int padded) {
    real *centroid = centroids->vectors + n * padded;
    real half_squared_norm = 0;
    memcpy(centroid, row, padded * sizeof(real));
    for (int t = 0; t < padded; t++) half_squared_norm += centroid[t] * centroid[t] / 2;
    if (!isfinite(half_squared_norm)) {
        memset(centroid, 0, padded * sizeof(real));
        half_squared_norm = 0;
    }
    centroids->half_squared_norms[n] = half_squared_norm;
}

/* Update the squared distance of each sample to its nearest centroid after a new centroid was added.
 *
 * Returns the sample that is farthest from all centroids. */
static int update_sample_distances(const real *sample_tiles, int samples, const real *centroid, int padded,
                                   real *distances) {
    for (int s = 0; s < samples; s += QUERY_TILE) {
        const real *tile = sample_tiles + s * padded;
        vec square[TILE_VECTORS] = {{0}};
        for (int t = 0; t < padded; t++)
            for (int w = 0; w < TILE_VECTORS; w++) {
                const vec difference = load(tile + t * QUERY_TILE + w * LANES) - centroid[t];
                square[w] += difference * difference;
            }
        for (int w = 0; w < TILE_VECTORS; w++) {
            const vec distance = load(distances + s + w * LANES);
            store(distances + s + w * LANES, select_lanes(square[w] < distance, square[w], distance));
        }
    }
    int farthest = 0;
    real largest = -1;
    for (int s = 0; s < samples; s++) {
        /* Samples that are not finite keep the distance infinity. They are not chosen. */
        if (distances[s] > largest && distances[s] < INFINITY) {
            largest = distances[s];
            farthest = s;
        }
    }
    return farthest;
}

/* Move each centroid to the mean of the samples that are nearest to the centroid.
 *
 * `sample_tiles` holds the samples as [tile][dim][sample]. `dots`, `sums` and `row` are scratch memory. */
static void move_to_means(const Call *c, const HeadTokens *tokens, Centroids *centroids, const real *sample_tiles,
                          int samples, real *dots, real *sums, real *row) {
    const int padded = padded_dim(c);
    int counts[MAX_CENTROIDS] = {0};
    uint8_t nearest[QUERY_TILE];
    memset(sums, 0, centroids->count * padded * sizeof(real));
    for (int s = 0; s < samples; s += QUERY_TILE) {
        find_nearest_centroids(centroids, sample_tiles + s * padded, padded, dots, nearest);
        for (int i = 0; i < QUERY_TILE; i++) {
            real *sum = sums + nearest[i] * padded;
            read_sample(c, tokens, s + i, samples, row);
            for (int t = 0; t < padded; t++) sum[t] += row[t];
            counts[nearest[i]]++;
        }
    }
    for (int n = 0; n < centroids->count; n++) {
        real *sum = sums + n * padded;
        for (int t = 0; t < padded; t++) sum[t] /= counts[n];
        if (counts[n]) set_centroid(centroids, n, sum, padded);
    }
}

/* Find `count` centroids of the keys or the queries of a head.
 *
 * Returns the cluster spread: the root mean square distance of the samples to their nearest centroids, divided by the
 * root mean square norm of the samples. The spread is measured before the centroids move to the means. */
static real find_centroids(const Call *c, const HeadTokens *tokens, int count, Centroids *centroids, real *scratch) {
    const int padded = padded_dim(c);
    const int samples = sample_count(count);
    double sum_of_squared_distances = 0;
    double sum_of_squared_norms = 0;
    centroids->count = count;

    /* Divide the scratch memory. */
    real *sample_tiles = scratch; /* [tile][dim][sample] */
    real *distances = sample_tiles + samples * padded;
    real *dots = distances + samples;
    real *sums = dots + count * QUERY_TILE;
    real *row = sums + count * padded;

    for (int s = 0; s < samples; s++) {
        read_sample(c, tokens, s, samples, row);
        real *tile = sample_tiles + s / QUERY_TILE * padded * QUERY_TILE;
        for (int t = 0; t < padded; t++) {
            tile[t * QUERY_TILE + s % QUERY_TILE] = row[t];
            sum_of_squared_norms += (double)row[t] * row[t];
        }
        distances[s] = INFINITY;
    }

    /* Each centroid starts at the sample that is farthest from all previous centroids. */
    int farthest = 0;
    for (int n = 0; n < count; n++) {
        read_sample(c, tokens, farthest, samples, row);
        set_centroid(centroids, n, row, padded);
        farthest = update_sample_distances(sample_tiles, samples, centroids->vectors + n * padded, padded, distances);
    }
    for (int s = 0; s < samples; s++) sum_of_squared_distances += distances[s];
    move_to_means(c, tokens, centroids, sample_tiles, samples, dots, sums, row);
    return (real)sqrt(sum_of_squared_distances / sum_of_squared_norms);
}

#endif
