#include "thread_pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The largest number of helper threads in a process. */
enum { MAX_HELPERS = 63 };

/* How often a helper looks for work before it sleeps. All attempts together take some tens of microseconds. The next
 * piece of work usually comes within this time. */
enum { SPINS_BEFORE_SLEEP = 2000 };

/* The helper threads of this process, and the queue that they work on. */
static struct {
    pthread_mutex_t lock;      /* held by the caller whose queue the helpers work on */
    int num_helpers;           /* helper threads that exist */
    Queue *queue;              /* the current queue */
    atomic_int is_open;        /* whether helpers may start to work on the queue */
    atomic_int max_helpers;    /* helpers with a smaller number may work on the queue */
    atomic_int num_active;     /* helpers that look for work or process items */
    atomic_int num_sleeping;   /* helpers that sleep until the next queue */
    _Atomic uint32_t queue_id; /* increases with every queue; helpers wait for a change */
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* Calls the Linux system call futex for `pool.queue_id`.
 *
 * With FUTEX_WAIT, this thread sleeps if `queue_id` equals `value`. With FUTEX_WAKE, up to `value` threads wake up. */
static void futex_queue_id(int operation, uint32_t value) {
    syscall(SYS_futex, (uint32_t *)&pool.queue_id, operation | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

/* Processes items of a queue until none is left. Several threads run this function at the same time. */
static void process_items(void *data) {
    Queue *queue = data;
    void *scratch = NULL;
    if (queue->scratch_bytes) {
        const int is_out_of_memory = posix_memalign(&scratch, 64, queue->scratch_bytes) != 0;
        if (is_out_of_memory) return; /* Other threads may have memory and process the items. */
    }
    for (;;) {
        const int64_t item = atomic_fetch_add(&queue->next_item, 1);
        if (item >= queue->num_items) break;
        queue->process_item(queue->context, item, scratch);
    }
    free(scratch);
}

/* Waits until `queue_id` differs from `last_id`, and returns the new id. */
static uint32_t wait_for_queue(uint32_t last_id) {
    for (int spin = 0; spin < SPINS_BEFORE_SLEEP; spin++) {
        if (atomic_load(&pool.queue_id) != last_id) return atomic_load(&pool.queue_id);
        _mm_pause();
    }
    atomic_fetch_add(&pool.num_sleeping, 1);
    while (atomic_load(&pool.queue_id) == last_id) futex_queue_id(FUTEX_WAIT, last_id);
    atomic_fetch_sub(&pool.num_sleeping, 1);
    return atomic_load(&pool.queue_id);
}

/* The main function of a helper thread. `data` is the number of the helper, as an integer.
 *
 * A helper first increases `num_active` and then reads `is_open`. The caller first clears `is_open` and then reads
 * `num_active`. Therefore, either the caller sees the helper and waits for it, or the helper sees that the queue is
 * closed. */
static void *run_helper(void *data) {
    const intptr_t helper = (intptr_t)data;
    uint32_t queue_id = 0;
    for (;;) {
        queue_id = wait_for_queue(queue_id);
        atomic_fetch_add(&pool.num_active, 1);
        if (atomic_load(&pool.is_open) && helper < atomic_load(&pool.max_helpers)) process_items(pool.queue);
        atomic_fetch_sub(&pool.num_active, 1);
    }
    return NULL;
}

/* Resets the pool in a child process after a fork.
 *
 * The child process has no helper threads, so it creates new ones. The queue of the parent process is closed here.
 * Otherwise, helpers of the child process would work on it. */
static void reset_after_fork(void) {
    pthread_mutex_init(&pool.lock, NULL);
    pool.num_helpers = 0;
    pool.queue = NULL;
    atomic_store(&pool.is_open, 0);
    atomic_store(&pool.num_active, 0);
    atomic_store(&pool.num_sleeping, 0);
}

/* Creates helper threads until there are `count`. If a thread cannot be created, there are fewer helpers. */
static void start_helpers(int count) {
    static int handles_fork = 0;
    if (!handles_fork) handles_fork = pthread_atfork(NULL, NULL, reset_after_fork) == 0;

    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    while (pool.num_helpers < count && pool.num_helpers < MAX_HELPERS) {
        pthread_t thread;
        void *helper_number = (void *)(intptr_t)pool.num_helpers;
        const int has_failed = pthread_create(&thread, &attributes, run_helper, helper_number) != 0;
        if (has_failed) break;
        pool.num_helpers++;
    }
    pthread_attr_destroy(&attributes);
}

/* Processes a queue with the calling thread and up to `threads` - 1 helpers. */
static void run_with_helpers(Queue *queue, int threads) {
    /* If the helpers work for another caller, the lock is not free. This thread then processes all items alone. */
    if (threads < 2 || pthread_mutex_trylock(&pool.lock) != 0) {
        process_items(queue);
        return;
    }
    const int num_helpers = threads - 1;
    if (pool.num_helpers < num_helpers) start_helpers(num_helpers);

    /* Open the queue for the helpers. */
    pool.queue = queue;
    atomic_store(&pool.max_helpers, num_helpers);
    atomic_store(&pool.is_open, 1);
    atomic_fetch_add(&pool.queue_id, 1);
    if (atomic_load(&pool.num_sleeping)) futex_queue_id(FUTEX_WAKE, num_helpers);
    process_items(queue);

    /* Close the queue, and wait for helpers that still process an item. */
    atomic_store(&pool.is_open, 0);
    while (atomic_load(&pool.num_active)) _mm_pause();
    pthread_mutex_unlock(&pool.lock);
}

/* thread_pool.h describes the arguments and the result. */
int run_queue(Queue *queue, int threads, Parallel parallel) {
    if (threads > queue->num_items) threads = (int)queue->num_items;
    atomic_init(&queue->next_item, 0);
    if (threads > 1 && parallel)
        parallel(process_items, queue, (unsigned)threads, 0); /* the function GOMP_parallel of OpenMP */
    else
        run_with_helpers(queue, threads);
    const int is_incomplete = atomic_load(&queue->next_item) < queue->num_items;
    return is_incomplete;
}
