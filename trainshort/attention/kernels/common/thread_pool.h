/* Distributes the items of a work queue over several threads. Items are started in the order of their numbers, so an
 * item may wait for an earlier item.
 *
 * There are two kinds of threads:
 *
 * - Long work (attention) uses the threads of the OpenMP library that PyTorch has loaded. The caller passes the address
 *   of GOMP_parallel, so this code is not linked with OpenMP. Other threads would compete with PyTorch's threads, which
 *   wait for work in a loop and keep their cores busy.
 * - Short work (decoding one token consists of about thirty pieces of a few microseconds) uses helper threads of this
 *   file. The calling thread processes the items itself, and helpers that are awake take some of them. The caller never
 *   waits for a helper to start. OpenMP waits for all threads, which is slow if other processes use the cores.
 */
#ifndef TRAINSHORT_THREAD_POOL_H
#define TRAINSHORT_THREAD_POOL_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* The type of GOMP_parallel: runs `work(data)` in `threads` threads. */
typedef void (*Parallel)(void (*work)(void *), void *data, unsigned threads, unsigned flags);

typedef struct {
    void (*process_item)(void *context, int64_t item, void *scratch);
    void *context;        /* passed to `process_item` */
    int64_t num_items;    /* items are numbered from 0 */
    size_t scratch_bytes; /* scratch memory per thread, aligned to 64 bytes; 0 passes NULL */
    atomic_llong next_item;
} Queue;

/* Processes all items of a queue with up to `threads` threads.
 *
 * `parallel` is the address of GOMP_parallel, or NULL to use the helper threads of this file. Returns 0. Returns 1 if no
 * thread could allocate its scratch memory, so that some items are not processed. */
int run_queue(Queue *queue, int threads, Parallel parallel);

#endif
