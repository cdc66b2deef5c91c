/* Loops over every stored byte. checksum.py compiles them on first use. Each function has a Python twin, and a test that
 * compares the results of both.
 *
 * kvtier_checksum: CRC-32 (as zlib) and the sum of the 32-bit words, in one pass (twin: checksum_in_python). The CRC
 * folds 64 bytes at a time with carry-less multiplication (V. Gopal et al., "Fast CRC Computation for Generic
 * Polynomials Using PCLMULQDQ Instruction", Intel 2009): a CRC is the remainder of a polynomial division, and a block of
 * 128 bits can be replaced by its product with x^n mod P, added n bits later. The constants are x^n mod P,
 * bit-reflected, for n = 512+-32, 128+-32 and 64, and P with its Barrett quotient.
 *
 * kvtier_checksums: the same for several pieces, on two threads, because one core cannot use the full memory bandwidth.
 *
 * kvtier_copy: a copy, from 4 KiB on with stores that bypass the cache (twin: numpy.copyto). The source is cached,
 * because it was just verified. The target need not be, because the GPU reads it. 1 MiB takes 80 us instead of 130 us.
 *
 * kvtier_gather, kvtier_scatter: copies of several pieces to and from one buffer (twins: gather and scatter in codec.py).
 * kvtier_gather_checksum gathers and computes the checksum in one pass, so that the pieces are read once. */
#include <emmintrin.h>
#include <pthread.h>
#include <smmintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <wmmintrin.h>

static const uint64_t __attribute__((aligned(16))) K512[2] = {0x0154442bd4, 0x01c6e41596};
static const uint64_t __attribute__((aligned(16))) K128[2] = {0x01751997d0, 0x00ccaa009e};
static const uint64_t __attribute__((aligned(16))) K64[2] = {0x0163cd6124, 0};
static const uint64_t __attribute__((aligned(16))) P[2] = {0x01db710641, 0x01f7011641};

#define LOAD(p) _mm_loadu_si128((const __m128i *)(p))

static inline __m128i fold(__m128i x, __m128i k, __m128i next) {
    __m128i low = _mm_clmulepi64_si128(x, k, 0x00), high = _mm_clmulepi64_si128(x, k, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

/* Reduce 128 bits to 32: fold by 64 bits twice, then apply Barrett reduction. */
static uint32_t reduce(__m128i x) {
    const __m128i k128 = _mm_load_si128((const __m128i *)K128), k64 = _mm_load_si128((const __m128i *)K64);
    const __m128i p = _mm_load_si128((const __m128i *)P), low32 = _mm_setr_epi32(~0, 0, ~0, 0);
    x = _mm_xor_si128(_mm_srli_si128(x, 8), _mm_clmulepi64_si128(x, k128, 0x10));
    x = _mm_xor_si128(_mm_srli_si128(x, 4), _mm_clmulepi64_si128(_mm_and_si128(x, low32), k64, 0x00));
    __m128i q = _mm_clmulepi64_si128(_mm_and_si128(x, low32), p, 0x10);
    q = _mm_clmulepi64_si128(_mm_and_si128(q, low32), p, 0x00);
    return (uint32_t)_mm_extract_epi32(_mm_xor_si128(x, q), 1);
}

static inline __m128i *put64(__m128i *to, __m128i a, __m128i b, __m128i c, __m128i d) {
    _mm_stream_si128(to, a), _mm_stream_si128(to + 1, b), _mm_stream_si128(to + 2, c), _mm_stream_si128(to + 3, d);
    return to + 4;
}

/* Return the sum in the upper half and the CRC in the lower half, over n pieces that follow each other. Each size is a
 * multiple of 64, at least 64. Unless dst is NULL, copy the pieces to dst, which is aligned to 16 bytes. */
static inline __attribute__((always_inline)) uint64_t join(size_t n, const uint8_t *const *pieces, const size_t *sizes,
                                                           __m128i *dst) {
    const __m128i k = _mm_load_si128((const __m128i *)K512), k128 = _mm_load_si128((const __m128i *)K128);
    const uint8_t *data = pieces[0];
    __m128i a = LOAD(data), b = LOAD(data + 16), c = LOAD(data + 32), d = LOAD(data + 48);
    __m128i sum = _mm_add_epi32(_mm_add_epi32(a, b), _mm_add_epi32(c, d));
    __m128i *to = dst;
    if (dst)
        to = put64(to, a, b, c, d);
    a = _mm_xor_si128(a, _mm_cvtsi32_si128(-1)); /* zlib's initial value is all ones, and its result is inverted */
    for (size_t i = 0; i < n; i++) {
        for (const uint8_t *at = pieces[i] + (i ? 0 : 64), *end = pieces[i] + sizes[i]; at < end; at += 64) {
            __m128i e = LOAD(at), f = LOAD(at + 16), g = LOAD(at + 32), h = LOAD(at + 48);
            _mm_prefetch((const char *)at + 4096, _MM_HINT_T0); /* the prefetcher stops at each page; 10 GB/s instead of 6 */
            if (dst)
                to = put64(to, e, f, g, h);
            sum = _mm_add_epi32(sum, _mm_add_epi32(_mm_add_epi32(e, f), _mm_add_epi32(g, h)));
            a = fold(a, k, e), b = fold(b, k, f), c = fold(c, k, g), d = fold(d, k, h);
        }
    }
    if (dst)
        _mm_sfence(); /* makes the streaming stores, which are weakly ordered, visible before the return */
    uint32_t crc = ~reduce(fold(fold(fold(a, k128, b), k128, c), k128, d));
    sum = _mm_add_epi32(sum, _mm_srli_si128(sum, 8));
    sum = _mm_add_epi32(sum, _mm_srli_si128(sum, 4));
    return (uint64_t)(uint32_t)_mm_cvtsi128_si32(sum) << 32 | crc;
}

uint64_t kvtier_checksum_joined(size_t n, const uint8_t *const *pieces, const size_t *sizes) {
    return join(n, pieces, sizes, NULL);
}

uint64_t kvtier_gather_checksum(size_t n, const uint8_t *const *pieces, const size_t *sizes, char *dst) {
    return join(n, pieces, sizes, (__m128i *)dst);
}

uint64_t kvtier_checksum(const uint8_t *data, size_t n) { return join(1, &data, &n, NULL); }

struct pieces {
    size_t n, next;
    const uint8_t *const *data;
    const size_t *sizes;
    uint64_t *sums;
};

static void *sum_pieces(void *arg) {
    struct pieces *all = arg;
    for (size_t i; (i = __atomic_fetch_add(&all->next, 1, __ATOMIC_RELAXED)) < all->n;)
        all->sums[i] = kvtier_checksum(all->data[i], all->sizes[i]);
    return NULL;
}

void kvtier_checksums(size_t n, const uint8_t *const *data, const size_t *sizes, uint64_t *sums) {
    struct pieces all = {n, 0, data, sizes, sums};
    pthread_t helper;
    int is_helped = pthread_create(&helper, NULL, sum_pieces, &all) == 0;
    sum_pieces(&all);
    if (is_helped)
        pthread_join(helper, NULL);
}

void kvtier_copy(char *dst, const char *src, size_t n) {
    size_t head = -(uintptr_t)dst & 15;
    if (n < 4096) {
        memcpy(dst, src, n);
        return;
    }
    memcpy(dst, src, head);
    dst += head, src += head, n -= head;
    for (; n >= 64; n -= 64, src += 64, dst += 64) {
        __m128i a = LOAD(src), b = LOAD(src + 16), c = LOAD(src + 32), d = LOAD(src + 48);
        _mm_stream_si128((__m128i *)dst, a);
        _mm_stream_si128((__m128i *)dst + 1, b);
        _mm_stream_si128((__m128i *)dst + 2, c);
        _mm_stream_si128((__m128i *)dst + 3, d);
    }
    memcpy(dst, src, n);
    _mm_sfence(); /* makes the streaming stores, which are weakly ordered, visible before the return */
}

void kvtier_gather(size_t n, const char *const *src, const size_t *sizes, char *dst) {
    for (size_t i = 0; i < n; dst += sizes[i++])
        kvtier_copy(dst, src[i], sizes[i]);
}

void kvtier_scatter(size_t n, char *const *dst, const size_t *sizes, const char *src) {
    for (size_t i = 0; i < n; src += sizes[i++])
        kvtier_copy(dst[i], src, sizes[i]);
}
