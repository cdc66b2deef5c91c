/* Threads, included by native.c. `run` divides [0, count) among threads, in one of two ways:
 *
 *   TEAM   equal parts on torch's threads (GOMP_parallel of the OpenMP runtime that torch has loaded). For long inputs,
 *          between products that torch computes: torch's threads spin for milliseconds and leave no core to others.
 *   POOL   small chunks on threads of this library. Each thread takes a chunk when it is free. For steps of a few
 *          tokens. If another process uses a core, the other cores compute more chunks, and no thread waits for a
 *          thread that has not started. A thread without work sleeps after SPIN_NANOSECONDS.
 */
#include <pthread.h>
#include <signal.h>
#include <time.h>

enum { ALONE, TEAM, POOL };
/* CHUNKS: chunks per thread. SPIN_NANOSECONDS: longer than the gap between two products of a step. */
enum { MAX_THREADS = 64, CHUNKS = 8, SPIN_NANOSECONDS = 30000 };

typedef void (*Work)(const void *data, long begin, long end, int thread);
typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);
static Parallel parallel;
static int (*thread_number)(void), (*team_size)(void);

void kvtier_threads(void *parallel_, void *thread_number_, void *team_size_) {
    parallel = (Parallel)parallel_;
    thread_number = (int (*)(void))thread_number_;
    team_size = (int (*)(void))team_size_;
}

/* Return ALONE, TEAM or POOL for a call with `tokens` tokens and `numbers` elements. */
static int way_of(int threads, long numbers, long tokens) {
    if (threads < 2 || numbers < GRAIN) return ALONE;
    return tokens > MAX_TOKENS && parallel ? TEAM : POOL;
}

typedef struct {
    Work work;
    const void *data;
    long count;
} Team;

static void team_share(void *data) {
    const Team *t = data;
    const long n = team_size(), i = thread_number();
    t->work(t->data, t->count * i / n, t->count * (i + 1) / n, (int)i);
}

/* The job of the pool. `state` has the number of the job (24 bits), its threads (8), its chunks (16) and the next chunk
 * (16). A thread takes a chunk by adding 1 to `state`, which fails if the job has changed. The thread reads the other
 * fields only afterwards: they stay valid, because the job cannot end before the chunk is done. */
static struct {
    uint64_t state;
    long done;
    Work work;
    const void *data;
    long count, size;
    int busy, workers, sleepers, waiting;
    pthread_mutex_t mutex;
    pthread_cond_t work_came, job_ended;
} pool = {.mutex = PTHREAD_MUTEX_INITIALIZER, .work_came = PTHREAD_COND_INITIALIZER,
          .job_ended = PTHREAD_COND_INITIALIZER};

static long chunks_of(uint64_t state) { return (long)(state >> 16 & 0xffff); }

static int has_chunk(int thread) {
    const uint64_t state = __atomic_load_n(&pool.state, __ATOMIC_SEQ_CST);
    return (long)(state & 0xffff) < chunks_of(state) && thread < (int)(state >> 32 & 0xff);
}

/* Compute chunks until all are taken. */
static void take_chunks(int thread) {
    while (has_chunk(thread)) {
        uint64_t state = __atomic_load_n(&pool.state, __ATOMIC_SEQ_CST);
        const long chunk = (long)(state & 0xffff);
        if (chunk >= chunks_of(state) || thread >= (int)(state >> 32 & 0xff) ||
            !__atomic_compare_exchange_n(&pool.state, &state, state + 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            continue;
        const long begin = chunk * pool.size, end = begin + pool.size;
        pool.work(pool.data, begin, end < pool.count ? end : pool.count, thread);
        if (__atomic_add_fetch(&pool.done, 1, __ATOMIC_SEQ_CST) == chunks_of(state) &&
            __atomic_load_n(&pool.waiting, __ATOMIC_SEQ_CST)) {
            pthread_mutex_lock(&pool.mutex);
            pthread_cond_signal(&pool.job_ended);
            pthread_mutex_unlock(&pool.mutex);
        }
    }
}

static long nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

static void pause_briefly(void) {
    for (int i = 0; i < 16; ++i)
#if defined(__x86_64__)
        __builtin_ia32_pause();
#else
        __atomic_signal_fence(__ATOMIC_SEQ_CST);
#endif
}

static void *work_on_jobs(void *number) {
    const int thread = (int)(intptr_t)number;
    for (;;) {
        take_chunks(thread);
        for (const long end = nanoseconds() + SPIN_NANOSECONDS; !has_chunk(thread) && nanoseconds() < end;)
            pause_briefly();
        if (has_chunk(thread)) continue;
        pthread_mutex_lock(&pool.mutex);
        __atomic_add_fetch(&pool.sleepers, 1, __ATOMIC_SEQ_CST);
        while (!has_chunk(thread)) pthread_cond_wait(&pool.work_came, &pool.mutex);
        __atomic_sub_fetch(&pool.sleepers, 1, __ATOMIC_SEQ_CST);
        pthread_mutex_unlock(&pool.mutex);
    }
    return NULL;
}

/* Start workers until there are `threads` with the caller. Workers block all signals: Python's threads handle them. */
static void start_workers(int threads) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t started;
    while (pool.workers < threads - 1 &&
           !pthread_create(&started, NULL, work_on_jobs, (void *)(intptr_t)(pool.workers + 1))) {
        pthread_detach(started);
        ++pool.workers;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* A forked child has no workers, and does not continue a job that was running at the time of the fork. */
static void forget_workers(void) {
    pool.state = pool.state >> 40 << 40;
    pthread_mutex_init(&pool.mutex, NULL);
    pthread_cond_init(&pool.work_came, NULL);
    pthread_cond_init(&pool.job_ended, NULL);
    pool.busy = pool.workers = pool.sleepers = pool.waiting = 0;
}

__attribute__((constructor)) static void register_fork_handler(void) { pthread_atfork(NULL, NULL, forget_workers); }

static void wait_for_end(long chunks) {
    for (const long end = nanoseconds() + SPIN_NANOSECONDS; nanoseconds() < end; pause_briefly())
        if (__atomic_load_n(&pool.done, __ATOMIC_SEQ_CST) == chunks) return;
    /* Another thread was interrupted in a chunk. Sleep, so that the other thread can use the core of this thread. */
    pthread_mutex_lock(&pool.mutex);
    __atomic_store_n(&pool.waiting, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&pool.done, __ATOMIC_SEQ_CST) != chunks) pthread_cond_wait(&pool.job_ended, &pool.mutex);
    __atomic_store_n(&pool.waiting, 0, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&pool.mutex);
}

/* Return 0 if another thread uses the pool. */
static int run_in_pool(Work work, const void *data, long count, long grain, int threads) {
    if (__atomic_exchange_n(&pool.busy, 1, __ATOMIC_SEQ_CST)) return 0;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (pool.workers < threads - 1) start_workers(threads);
    const long even = (count + threads * CHUNKS - 1) / (threads * CHUNKS), size = (even + grain - 1) / grain * grain;
    const uint64_t chunks = (uint64_t)((count + size - 1) / size), job = (pool.state >> 40) + 1;
    pool.work = work, pool.data = data, pool.count = count, pool.size = size, pool.done = 0;
    __atomic_store_n(&pool.state, job << 40 | (uint64_t)threads << 32 | chunks << 16, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&pool.sleepers, __ATOMIC_SEQ_CST)) {
        pthread_mutex_lock(&pool.mutex);
        pthread_cond_broadcast(&pool.work_came);
        pthread_mutex_unlock(&pool.mutex);
    }
    take_chunks(0);
    wait_for_end((long)chunks);
    __atomic_store_n(&pool.busy, 0, __ATOMIC_SEQ_CST);
    return 1;
}

/* Call `work` for all of [0, count), with chunks whose lengths are multiples of `grain`. */
static void run(Work work, const void *data, long count, long grain, int threads, int way) {
    if (way == TEAM) {
        Team team = {work, data, count};
        parallel(team_share, &team, (unsigned)threads, 0);
    } else if (way == ALONE || !run_in_pool(work, data, count, grain, threads))
        work(data, 0, count, 0);
}
