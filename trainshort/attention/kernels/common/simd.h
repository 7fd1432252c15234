/* Eight floats (or four doubles) at a time: the few operations that compiled code here is written in.
 *
 * One source, two libraries: -DREAL_IS_DOUBLE builds the one that gradient checks use. AVX2, FMA and F16C are given;
 * the Python side does not load this on a machine without them.
 */
#ifndef TRAINSHORT_VECTOR_H
#define TRAINSHORT_VECTOR_H

#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef REAL_IS_DOUBLE
typedef double real;
typedef int64_t whole;
#define LOWEST (-DBL_MAX)
#define MANTISSA 52
#define EXPONENT_BIAS 1023
#define LN_2 0.6931471805599453
#define LN_2_REST 2.3190468138462996e-17
#define LARGER(x, y) ((vec)_mm256_max_pd((__m256d)(x), (__m256d)(y)))
#define SIGNS(x) _mm256_movemask_pd((__m256d)(x))
#define EXP_COEFFICIENTS                                                                                          \
    1.0, 1.0, 0.5, 0.166666666666661682, 0.041666666666492629, 0.0083333333335594518, 0.00138888889512612042,     \
        0.000198412694324344383, 0.0000248014864812834982, 2.75576226520244885e-6, 2.76323082244525444e-7,        \
        2.49942933457304636e-8
#else
typedef float real;
typedef int32_t whole;
#define LOWEST (-FLT_MAX)
#define MANTISSA 23
#define EXPONENT_BIAS 127
#define LN_2 0.693147182f /* the nearest float, and what it is too large by */
#define LN_2_REST -1.90465432e-9f
#define LARGER(x, y) ((vec)_mm256_max_ps((__m256)(x), (__m256)(y)))
#define SIGNS(x) _mm256_movemask_ps((__m256)(x))
#define EXP_COEFFICIENTS                                                                                          \
    1.0f, 1.0f, 0.499999920750887305f, 0.166664200721253165f, 0.0416682261892944906f, 0.00837482405058938231f,    \
        0.00138368357424753056f
#endif

typedef real vec __attribute__((vector_size(32)));
typedef whole ivec __attribute__((vector_size(32)));

#define LANES ((int)(32 / sizeof(real)))
#define INLINE static inline __attribute__((always_inline))

INLINE int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t blocks_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

INLINE vec load(const real *from) {
    vec x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store(real *to, vec x) { memcpy(to, &x, sizeof x); }

INLINE vec spread(real x) { return x - (vec){0}; }

INLINE vec choose(ivec where, vec yes, vec no) { return (vec)((where & (ivec)yes) | (~where & (ivec)no)); }

/* The larger of two; the second where they do not compare, so a NaN in `x` leaves `y` standing. */
INLINE vec larger(vec x, vec y) { return LARGER(x, y); }

INLINE real sum_lanes(vec x) {
    real sum = 0;
    for (int w = 0; w < LANES; w++) sum += x[w];
    return sum;
}

INLINE real dot(const real *x, const real *y, int64_t length) {
    vec sum = {0};
    int64_t t = 0;
    for (; t + LANES <= length; t += LANES) sum += load(x + t) * load(y + t);
    real total = sum_lanes(sum);
    for (; t < length; t++) total += x[t] * y[t];
    return total;
}

INLINE int any(ivec where) { return SIGNS(where) != 0; }

/* table[index] in each lane, for a table of eight. */
INLINE vec pick_of_eight(const real *table, ivec index) {
#ifdef REAL_IS_DOUBLE
    return (vec){table[index[0]], table[index[1]], table[index[2]], table[index[3]]};
#else
    return (vec)_mm256_permutevar8x32_ps((__m256)load(table), (__m256i)index);
#endif
}

/* The same for a table of sixteen. */
INLINE vec pick_of_sixteen(const real *table, ivec index) {
    return choose(index > 7, pick_of_eight(table + 8, index & 7), pick_of_eight(table, index & 7));
}

/* e^x for x <= 0, to about one unit in the last place; 0 below the smallest normal number; NaN stays NaN.
 *
 * x = n ln 2 + f with n whole and |f| <= ln 2 / 2: adding 1.5 * 2^MANTISSA rounds to a whole number and leaves it in
 * the low bits. e^f is a minimax polynomial (relative error 2e-9 in float, 3e-18 in double). It is multiplied by 2^n,
 * not shifted in its exponent bits, because a product keeps NaN a NaN. */
INLINE vec exp_below_zero(vec x) {
    static const real coefficients[] = {EXP_COEFFICIENTS};
    const int degree = sizeof coefficients / sizeof coefficients[0] - 1;
    const real magic = (real)1.5 * ((int64_t)1 << MANTISSA);
    const ivec tiny = x < (real)(1 - EXPONENT_BIAS) * (real)LN_2;
    const vec shifted = x * (real)1.4426950408889634 + magic, n = shifted - magic;
    const ivec power = ((ivec)shifted + EXPONENT_BIAS) << MANTISSA;
    const vec f = (x - n * (real)LN_2) - n * (real)LN_2_REST;
    vec y = spread(coefficients[degree]);
    for (int i = degree - 1; i >= 0; i--) y = y * f + coefficients[i];
    return (vec)(~tiny & (ivec)(y * (vec)power));
}

/* log x for a normal x >= 1, to 1e-7 of it or 1e-7, whichever is more.
 *
 * x = 2^n m with m between sqrt(1/2) and sqrt(2), and log m = 2 artanh(s) = 2 (s + s^3/3 + s^5/5 ...), s = (m - 1)/(m + 1):
 * |s| < 0.172, so six terms leave 1e-11. */
INLINE vec log_above_zero(vec x) {
    const ivec bits = (ivec)x, one = (ivec)spread(1);
    vec m = (vec)((bits & (((whole)1 << MANTISSA) - 1)) | one);
    const ivec large = m > (real)1.4142135;
    m = choose(large, m / 2, m);
    vec n;
    for (int w = 0; w < LANES; w++) n[w] = (real)((bits[w] >> MANTISSA) - EXPONENT_BIAS);
    n = choose(large, n + 1, n);
    const vec s = (m - 1) / (m + 1), square = s * s;
    vec sum = spread((real)1 / 11);
    for (int odd = 9; odd > 0; odd -= 2) sum = sum * square + (real)1 / odd;
    return n * (real)0.6931471805599453 + 2 * s * sum;
}

#endif
