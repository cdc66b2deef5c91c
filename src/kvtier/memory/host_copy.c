/* Scattered host copies. Compiled on first use (native.py); the Python loop in copy_paths.py gives the same result.
 *
 * The pieces, laid end to end, are cut into equal shares of bytes, one per thread; a share may begin and end inside a piece.
 * While one piece is copied, the head of the next source is prefetched: the hardware prefetcher stops at each 4 KiB page. */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { LINE = 64, PREFETCH_BYTES = 4096, MAX_THREADS = 64 };

typedef struct {
    const int64_t *src, *dst, *nbytes;
    size_t first;   /* piece this share begins in */
    int64_t skip;   /* bytes of it that belong to the share before */
    int64_t length; /* bytes of this share */
} Share;

static void *copy_share(void *argument) {
    const Share *share = argument;
    int64_t left = share->length, skip = share->skip;
    for (size_t k = share->first; left > 0; ++k, skip = 0) {
        int64_t n = share->nbytes[k] - skip;
        if (n < left) {
            const char *next = (const char *)(intptr_t)share->src[k + 1];
            int64_t ahead = share->nbytes[k + 1] < PREFETCH_BYTES ? share->nbytes[k + 1] : PREFETCH_BYTES;
            for (int64_t at = 0; at < ahead; at += LINE) __builtin_prefetch(next + at, 0, 3);
        } else {
            n = left;
        }
        memcpy((char *)(intptr_t)share->dst[k] + skip, (const char *)(intptr_t)share->src[k] + skip, (size_t)n);
        left -= n;
    }
    return NULL;
}

/* Copy `count` independent pieces of `total` bytes together. Returns the number of threads that worked. */
int kvtier_copy_pieces(size_t count, const int64_t *src, const int64_t *dst, const int64_t *nbytes, int64_t total, int threads) {
    Share shares[MAX_THREADS];
    pthread_t others[MAX_THREADS];
    int started[MAX_THREADS] = {0};
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    size_t piece = 0;
    int64_t before = 0; /* bytes in the pieces before `piece` */
    for (int t = 0; t < threads; ++t) {
        int64_t begin = total / threads * t, end = t + 1 == threads ? total : total / threads * (t + 1);
        while (piece < count && before + nbytes[piece] <= begin) before += nbytes[piece++];
        shares[t] = (Share){src, dst, nbytes, piece, begin - before, end - begin};
    }
    for (int t = 1; t < threads; ++t) started[t] = pthread_create(&others[t], NULL, copy_share, &shares[t]) == 0;
    copy_share(&shares[0]);
    int worked = 1;
    for (int t = 1; t < threads; ++t) {
        if (started[t]) {
            pthread_join(others[t], NULL);
            ++worked;
        } else {
            copy_share(&shares[t]);
        }
    }
    return worked;
}
