/* Items of work, handed out in order to as many threads as a call may use: the one pool of all compiled code here.
 *
 * Long work (attention) takes its threads from the OpenMP runtime that torch itself has loaded; its entry point is passed
 * in, nothing is linked. A second pool would fight the first one's spinning threads for the cores.
 *
 * Without it, and for pieces of a few microseconds (decoding a token is some thirty of them), there are helpers of our
 * own. The caller does the work itself; helpers take items of it if they are awake. Nobody waits for a helper that has
 * not begun: on a busy machine a barrier per piece, as OpenMP has it, costs a turn of the scheduler each time.
 *
 * Handing out in order is a promise: an item may wait for any earlier one, because that one has begun.
 */
#ifndef TRAINSHORT_POOL_H
#define TRAINSHORT_POOL_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

typedef void (*Parallel)(void (*work)(void *), void *data, unsigned threads, unsigned flags);

typedef struct {
    void (*work)(void *context, int64_t item, void *scratch);
    void *context;
    int64_t items;
    size_t scratch; /* bytes that each thread needs, at addresses of whole cache lines */
    atomic_llong next;
} Queue;

/* Does all items, with up to `threads` threads: of OpenMP where its entry point is given, else helpers. Returns 0, or 1
 * when there was no memory for anybody's scratch and so work is left undone. */
int run_queue(Queue *queue, int threads, Parallel parallel);

#endif
