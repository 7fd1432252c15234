/* One row through one linear layer; see row.c. The struct is mirrored by generate/one_row.py. */
#ifndef TRAINSHORT_ROW_H
#define TRAINSHORT_ROW_H

#include <stdint.h>

typedef struct {
    const float *x, *weight, *bias, *gain, *shift, *residual; /* all but x and weight may be NULL */
    float *out, *scratch;                                      /* scratch: inputs floats, for the normalised row */
    int64_t inputs, outputs;
    double eps;
    int32_t threads, activation, normed;
} Linear;

void trainshort_linear(const Linear *l);

#endif
