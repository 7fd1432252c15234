/* Vectors of eight floats (or four doubles), and the operations on them that the kernels use.
 *
 * The type `real` is float. With -DREAL_IS_DOUBLE, it is double, which the tests of gradients use. The processor must
 * support AVX2, FMA and F16C. kernels/build.py loads a library only if PyTorch reports a processor with AVX2.
 */
#ifndef TRAINSHORT_SIMD_H
#define TRAINSHORT_SIMD_H

#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

/* `lane_int` is an integer with as many bits as `real`.
 *
 * LN_2 is the number of type `real` that is nearest to ln 2. LN_2_REMAINDER is ln 2 - LN_2.
 * EXP_COEFFICIENTS are the coefficients of a polynomial that approximates e^x for |x| <= ln 2 / 2. */
#ifdef REAL_IS_DOUBLE
typedef double real;
typedef int64_t lane_int;
#define LOWEST (-DBL_MAX)
#define MANTISSA_BITS 52
#define EXPONENT_BIAS 1023
#define LN_2 0.6931471805599453
#define LN_2_REMAINDER 2.3190468138462996e-17
#define VECTOR_MAX(x, y) ((vec)_mm256_max_pd((__m256d)(x), (__m256d)(y)))
#define SIGN_BITS(x) _mm256_movemask_pd((__m256d)(x))
#define EXP_COEFFICIENTS                                                                                          \
    1.0, 1.0, 0.5, 0.166666666666661682, 0.041666666666492629, 0.0083333333335594518, 0.00138888889512612042,     \
        0.000198412694324344383, 0.0000248014864812834982, 2.75576226520244885e-6, 2.76323082244525444e-7,        \
        2.49942933457304636e-8
#else
typedef float real;
typedef int32_t lane_int;
#define LOWEST (-FLT_MAX)
#define MANTISSA_BITS 23
#define EXPONENT_BIAS 127
#define LN_2 0.693147182f
#define LN_2_REMAINDER -1.90465432e-9f
#define VECTOR_MAX(x, y) ((vec)_mm256_max_ps((__m256)(x), (__m256)(y)))
#define SIGN_BITS(x) _mm256_movemask_ps((__m256)(x))
#define EXP_COEFFICIENTS                                                                                          \
    1.0f, 1.0f, 0.499999920750887305f, 0.166664200721253165f, 0.0416682261892944906f, 0.00837482405058938231f,    \
        0.00138368357424753056f
#endif

/* A vector of real numbers and a vector of integers. Comparisons of vectors return an `ivec`: each lane (element) is -1
 * if the comparison is true and 0 if it is false. */
typedef real vec __attribute__((vector_size(32)));
typedef lane_int ivec __attribute__((vector_size(32)));

#define LANES ((int)(32 / sizeof(real))) /* the number of elements in a vector */
#define INLINE static inline __attribute__((always_inline))

INLINE int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

/* Returns the number of blocks of `size` elements that `n` elements need. The last block may be incomplete. */
INLINE int64_t blocks_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

/* Reads a vector from memory. The address needs no alignment. */
INLINE vec load(const real *from) {
    vec x;
    memcpy(&x, from, sizeof x);
    return x;
}

/* Writes a vector to memory. The address needs no alignment. */
INLINE void store(real *to, vec x) { memcpy(to, &x, sizeof x); }

/* Returns a vector with `x` in every lane. */
INLINE vec broadcast(real x) { return x - (vec){0}; }

/* Returns for each lane the number of `if_true` if `condition` is true (-1), and of `if_false` if it is false (0). */
INLINE vec select_lanes(ivec condition, vec if_true, vec if_false) {
    return (vec)((condition & (ivec)if_true) | (~condition & (ivec)if_false));
}

/* Returns the larger number of x and y for each lane. If x or y is NaN, returns y. */
INLINE vec larger(vec x, vec y) { return VECTOR_MAX(x, y); }

/* Returns the sum of all lanes. */
INLINE real sum_lanes(vec x) {
    real sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += x[lane];
    return sum;
}

/* Returns the dot product of two arrays. */
INLINE real dot(const real *x, const real *y, int64_t length) {
    vec lane_sums = {0};
    int64_t i = 0;
    for (; i + LANES <= length; i += LANES) lane_sums += load(x + i) * load(y + i);
    real total = sum_lanes(lane_sums);
    for (; i < length; i++) total += x[i] * y[i]; /* the elements after the last complete vector */
    return total;
}

/* Returns whether the condition is true in at least one lane. */
INLINE int any(ivec condition) { return SIGN_BITS(condition) != 0; }

/* Returns table[index] for each lane. The table has eight entries. */
INLINE vec pick_of_eight(const real *table, ivec index) {
#ifdef REAL_IS_DOUBLE
    return (vec){table[index[0]], table[index[1]], table[index[2]], table[index[3]]};
#else
    return (vec)_mm256_permutevar8x32_ps((__m256)load(table), (__m256i)index);
#endif
}

/* Returns table[index] for each lane. The table has sixteen entries. */
INLINE vec pick_of_sixteen(const real *table, ivec index) {
    const ivec index_in_half = index & 7;
    const vec from_first_half = pick_of_eight(table, index_in_half);
    const vec from_second_half = pick_of_eight(table + 8, index_in_half);
    return select_lanes(index > 7, from_second_half, from_first_half);
}

/* Returns e^x for x <= 0, with an error of about one unit in the last place. Returns 0 if e^x is smaller than the
 * smallest normal number, and NaN if x is NaN.
 *
 * The function writes x = n ln 2 + f with an integer n and |f| <= ln 2 / 2. Then e^x = 2^n e^f.
 *
 * - Adding 1.5 * 2^MANTISSA_BITS rounds x / ln 2 to the integer n. The low bits of the sum then contain n.
 * - e^f is a minimax polynomial. Its relative error is 2e-9 with float and 3e-18 with double.
 * - The polynomial is multiplied by 2^n. Adding n to its exponent bits instead would turn NaN into a number. */
INLINE vec exp_below_zero(vec x) {
    static const real coefficients[] = {EXP_COEFFICIENTS};
    const int degree = sizeof coefficients / sizeof coefficients[0] - 1;
    const real rounding_constant = (real)1.5 * ((int64_t)1 << MANTISSA_BITS);
    const ivec is_tiny = x < (real)(1 - EXPONENT_BIAS) * (real)LN_2;
    const vec shifted = x * (real)1.4426950408889634 + rounding_constant;
    const vec n = shifted - rounding_constant;
    const ivec power_of_two = ((ivec)shifted + EXPONENT_BIAS) << MANTISSA_BITS; /* the bits of the number 2^n */
    const vec f = (x - n * (real)LN_2) - n * (real)LN_2_REMAINDER;
    vec exp_f = broadcast(coefficients[degree]);
    for (int i = degree - 1; i >= 0; i--) exp_f = exp_f * f + coefficients[i];
    const vec result = exp_f * (vec)power_of_two;
    return (vec)(~is_tiny & (ivec)result);
}

/* Returns log(x) for a normal number x >= 1. The error is at most 1e-7 * max(1, log(x)).
 *
 * The function writes x = 2^n m with m between sqrt(1/2) and sqrt(2). With s = (m - 1) / (m + 1):
 *
 *     log(m) = 2 artanh(s) = 2 (s + s^3/3 + s^5/5 + ...)
 *
 * Because |s| < 0.172, the error of the first six terms is about 1e-11. */
INLINE vec log_above_zero(vec x) {
    const ivec bits = (ivec)x;
    const ivec bits_of_one = (ivec)broadcast(1);
    const lane_int mantissa_mask = ((lane_int)1 << MANTISSA_BITS) - 1;
    vec m = (vec)((bits & mantissa_mask) | bits_of_one); /* between 1 and 2 */
    vec n;
    for (int lane = 0; lane < LANES; lane++) n[lane] = (real)((bits[lane] >> MANTISSA_BITS) - EXPONENT_BIAS);
    const ivec is_above_sqrt_2 = m > (real)1.4142135;
    m = select_lanes(is_above_sqrt_2, m / 2, m);
    n = select_lanes(is_above_sqrt_2, n + 1, n);
    const vec s = (m - 1) / (m + 1);
    const vec s_squared = s * s;
    vec sum = broadcast((real)1 / 11); /* the last of the six terms */
    for (int odd = 9; odd > 0; odd -= 2) sum = sum * s_squared + (real)1 / odd;
    return n * (real)0.6931471805599453 + 2 * s * sum; /* n ln 2 + log(m) */
}

#endif
