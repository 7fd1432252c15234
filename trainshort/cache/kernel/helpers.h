/* Work for as many cores as are free, in pieces of a few microseconds.
 *
 * A token is some thirty small pieces of work. The caller does each one itself; helpers take shares of it if they are
 * awake. Nobody waits for a helper that has not begun: on a busy machine a barrier per piece, as OpenMP has it, costs a
 * turn of the scheduler each time, many times the work itself.
 */
#ifndef TRAINSHORT_HELPERS_H
#define TRAINSHORT_HELPERS_H

#include <stdint.h>

typedef void (*Share)(void *context, int64_t item);

/* Calls share(context, item) once for each item below `items`, with up to `threads` threads; returns when all are done. */
void share_out(Share share, void *context, int64_t items, int threads);

#endif
