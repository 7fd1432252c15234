#include "thread_pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MOST_HELPERS = 63, SPINS = 2000 }; /* some tens of microseconds: the next piece usually comes within them */

static struct {
    pthread_mutex_t busy; /* a second caller works alone rather than wait */
    int started;
    Queue *queue;
    atomic_int open, wanted, inside, sleepers;
    _Atomic uint32_t round;
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER};

static void futex(int operation, uint32_t value) {
    syscall(SYS_futex, (uint32_t *)&pool.round, operation | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

static void serve(void *data) {
    Queue *queue = data;
    void *scratch = NULL;
    if (queue->scratch && posix_memalign(&scratch, 64, queue->scratch)) return; /* others go on */
    for (;;) {
        const int64_t item = atomic_fetch_add(&queue->next, 1);
        if (item >= queue->items) break;
        queue->work(queue->context, item, scratch);
    }
    free(scratch);
}

static uint32_t next_round(uint32_t last) {
    for (int spin = 0; spin < SPINS; spin++) {
        if (atomic_load(&pool.round) != last) return atomic_load(&pool.round);
        _mm_pause();
    }
    atomic_fetch_add(&pool.sleepers, 1);
    while (atomic_load(&pool.round) == last) futex(FUTEX_WAIT, last);
    atomic_fetch_sub(&pool.sleepers, 1);
    return atomic_load(&pool.round);
}

/* A helper counts itself in before it looks whether there is work; the caller closes the work before it looks whether
 * somebody is in. So either the caller waits for the helper, or the helper finds the door closed. */
static void *help(void *number) {
    uint32_t round = 0;
    for (;;) {
        round = next_round(round);
        atomic_fetch_add(&pool.inside, 1);
        if (atomic_load(&pool.open) && (intptr_t)number < atomic_load(&pool.wanted)) serve(pool.queue);
        atomic_fetch_sub(&pool.inside, 1);
    }
    return NULL;
}

/* A forked child has no helpers, whatever they were doing in the parent; it starts its own. What the parent was working
 * on stays the parent's: with the door left open, a helper of the child would reach for it. */
static void begin_anew(void) {
    pthread_mutex_init(&pool.busy, NULL);
    pool.started = 0;
    pool.queue = NULL;
    atomic_store(&pool.open, 0);
    atomic_store(&pool.inside, 0);
    atomic_store(&pool.sleepers, 0);
}

static void start_helpers(int count) {
    static int watching = 0;
    if (!watching) watching = !pthread_atfork(NULL, NULL, begin_anew);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    for (pthread_t thread; pool.started < count && pool.started < MOST_HELPERS; pool.started++)
        if (pthread_create(&thread, &attributes, help, (void *)(intptr_t)pool.started)) break;
    pthread_attr_destroy(&attributes);
}

static void with_helpers(Queue *queue, int threads) {
    if (threads < 2 || pthread_mutex_trylock(&pool.busy)) {
        serve(queue);
        return;
    }
    if (pool.started < threads - 1) start_helpers(threads - 1);
    pool.queue = queue;
    atomic_store(&pool.wanted, threads - 1);
    atomic_store(&pool.open, 1);
    atomic_fetch_add(&pool.round, 1);
    if (atomic_load(&pool.sleepers)) futex(FUTEX_WAKE, threads - 1);
    serve(queue);
    atomic_store(&pool.open, 0);
    while (atomic_load(&pool.inside)) _mm_pause();
    pthread_mutex_unlock(&pool.busy);
}

int run_queue(Queue *queue, int threads, Parallel parallel) {
    if (threads > queue->items) threads = (int)queue->items;
    atomic_init(&queue->next, 0);
    if (threads > 1 && parallel)
        parallel(serve, queue, (unsigned)threads, 0);
    else
        with_helpers(queue, threads);
    return atomic_load(&queue->next) < queue->items;
}
