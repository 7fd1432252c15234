/* Items of work, handed out in order to as many threads as the call may use.
 *
 * Threads come from the OpenMP runtime that torch itself has loaded (its entry point is passed in, nothing is linked):
 * a second pool would fight the first one's spinning threads for the cores. Without it, plain threads are started.
 * Handing out in order is a promise: an item may wait for any earlier one, because that one has begun.
 */
#ifndef TRAINSHORT_POOL_H
#define TRAINSHORT_POOL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "call.h"

typedef struct {
    void (*work)(void *context, int64_t item, real *scratch);
    void *context;
    int64_t items;
    size_t scratch; /* reals that each thread needs */
    atomic_llong next;
} Queue;

static void run_queue(void *data) {
    Queue *queue = data;
    real *scratch = NULL;
    if (posix_memalign((void **)&scratch, 64, queue->scratch * sizeof(real))) return; /* others go on; see below */
    for (;;) {
        const int64_t item = atomic_fetch_add(&queue->next, 1);
        if (item >= queue->items) break;
        queue->work(queue->context, item, scratch);
    }
    free(scratch);
}

static void *run_queue_in_thread(void *data) {
    run_queue(data);
    return NULL;
}

enum { MOST_THREADS = 256 };

/* Returns 0, or 1 when there was no memory for anybody's scratch and so work is left undone. */
static int run_all(const Call *c, Queue *queue) {
    const int64_t threads = smaller_of(smaller_of(c->threads, MOST_THREADS), queue->items);
    atomic_init(&queue->next, 0);
    if (threads > 1 && c->parallel) {
        c->parallel(run_queue, queue, (unsigned)threads, 0);
    } else {
        pthread_t others[MOST_THREADS];
        int started = 0;
        while (started < threads - 1 && !pthread_create(&others[started], NULL, run_queue_in_thread, queue)) started++;
        run_queue(queue);
        for (int i = 0; i < started; i++) pthread_join(others[i], NULL);
    }
    return atomic_load(&queue->next) < queue->items;
}

#endif
