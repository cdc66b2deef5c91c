/* Loops that numpy cannot do in one pass. native.py compiles them on first use. Each function has a Python twin for
 * machines without a compiler, and a test that compares the results of both.
 *
 * kvtier_copy_pieces: scattered host copies (twin: run_in_order in copy_paths.py). The total number of bytes is divided
 * equally among the threads; a share may begin and end inside a piece.
 *
 * This is twice as fast as memcpy per piece (10,000 x 4 KiB, Xeon, 2 cores, 2026-11-15: 5.2 -> 2.4 ms), because:
 * - The start of the next source is prefetched during a copy, because the hardware prefetcher stops at each 4 KiB page.
 *   Prefetching 512 bytes is enough; prefetching all 4,096 is slower.
 * - Batches of STREAM_FROM_BYTES or more do not fit into the CPU cache. With SSE2, they are written past the cache, so
 *   that no destination line is read before it is overwritten. For 1 MiB, such writes take 280 us, memcpy 20. */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { LINE = 64, PREFETCH_BYTES = 512, MAX_THREADS = 64, STREAM_FROM_BYTES = 16 << 20 };

#ifdef __SSE2__
#include <emmintrin.h>

/* memcpy with stores that bypass the cache. The unaligned ends, and pieces of less than four lines, use memcpy. */
static void copy_past_cache(char *dst, const char *src, size_t n) {
    if (n < 4 * LINE) {
        memcpy(dst, src, n);
        return;
    }
    size_t head = -(uintptr_t)dst & (LINE - 1), lines = (n - head) / LINE;
    memcpy(dst, src, head);
    dst += head, src += head;
    for (size_t k = 0; k < lines; ++k, dst += LINE, src += LINE) {
        __m128i a = _mm_loadu_si128((const __m128i *)src), b = _mm_loadu_si128((const __m128i *)src + 1);
        __m128i c = _mm_loadu_si128((const __m128i *)src + 2), d = _mm_loadu_si128((const __m128i *)src + 3);
        _mm_stream_si128((__m128i *)dst, a);
        _mm_stream_si128((__m128i *)dst + 1, b);
        _mm_stream_si128((__m128i *)dst + 2, c);
        _mm_stream_si128((__m128i *)dst + 3, d);
    }
    memcpy(dst, src, n - head - lines * LINE);
}
#define FENCE() _mm_sfence() /* makes the streaming stores, which are weakly ordered, visible before the join */
#else
#define copy_past_cache memcpy
#define FENCE()
#endif

typedef struct {
    const int64_t *src, *dst, *nbytes;
    size_t first;   /* the piece in which this share begins */
    int64_t skip;   /* bytes of that piece that belong to earlier shares */
    int64_t length; /* bytes of this share */
    int past_cache;
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
        char *dst = (char *)(intptr_t)share->dst[k] + skip;
        const char *src = (const char *)(intptr_t)share->src[k] + skip;
        if (share->past_cache) copy_past_cache(dst, src, (size_t)n);
        else memcpy(dst, src, (size_t)n);
        left -= n;
    }
    if (share->past_cache) FENCE();
    return NULL;
}

/* Copy `count` independent pieces. `total` is the sum of their sizes. Return the number of threads used. */
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
        shares[t] = (Share){src, dst, nbytes, piece, begin - before, end - begin, total >= STREAM_FROM_BYTES};
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

/* kvtier_row_copies: list the copies that reorder rows (twin: row_copies in state/warp.py). Row i of the output is row
 * index[i] of the old rows if index[i] < size0, else row i of the new rows. If the address old_rows or new_rows is 0,
 * its rows are skipped. Adjacent old rows, or new rows, that stay adjacent become one copy. Destinations ascend and do
 * not overlap. Writes all sources, then all destinations, then all sizes to `out`, which has room for 3 * n numbers.
 * Returns the number of copies. */
size_t kvtier_row_copies(size_t n, const int64_t *index, int64_t size0, int64_t old_rows, int64_t new_rows, int64_t out_rows,
                         int64_t row_bytes, int64_t *out) {
    int64_t *src = out, *dst = out + n, *nbytes = out + 2 * n;
    int64_t src_end = 0, before = -1; /* before: kind of the previous row (1 new, 0 old, -1 none) */
    size_t count = 0;
    for (size_t i = 0; i < n; ++i) {
        int64_t is_new = index[i] >= size0, rows = is_new ? new_rows : old_rows;
        if (!rows) {
            before = -1;
            continue;
        }
        int64_t from = rows + (is_new ? (int64_t)i : index[i]) * row_bytes;
        if (is_new == before && from == src_end) {
            nbytes[count - 1] += row_bytes;
        } else {
            src[count] = from, dst[count] = out_rows + (int64_t)i * row_bytes, nbytes[count] = row_bytes;
            ++count;
        }
        before = is_new, src_end = from + row_bytes;
    }
    memmove(out + count, dst, count * sizeof *out);
    memmove(out + 2 * count, nbytes, count * sizeof *out);
    return count;
}

/* kvtier_scan: classify the entries of a batch before planning (twin: scan in copy_plan.py, which explains scopes). */
typedef struct {
    int64_t disjoint;    /* destinations ascend and do not overlap */
    int64_t independent; /* disjoint, and no source overlaps a destination */
    int64_t nbytes;
    int64_t num_pieces; /* after merging adjacent entries of one scope; starts[k] is the first entry of piece k */
} Scan;

/* True if [begin, end) overlaps one of n ascending, disjoint destinations. */
static int is_written(size_t n, const int64_t *dst, const int64_t *nbytes, int64_t begin, int64_t end) {
    size_t low = 0, high = n; /* find the first destination that ends after `begin` */
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (dst[middle] + nbytes[middle] <= begin) low = middle + 1;
        else high = middle;
    }
    return low < n && dst[low] < end;
}

void kvtier_scan(size_t n, const int64_t *src, const int64_t *dst, const int64_t *nbytes, const int64_t *scope,
                 int64_t *starts, Scan *scan) {
    int64_t src_end = 0, dst_end = INT64_MIN, pieces = 0;
    Scan found = {1, 1, 0, 0};
    for (size_t k = 0; k < n; ++k) {
        int same_scope = k > 0 && (scope == NULL || (scope[k] == scope[k - 1] && scope[k] >= 0));
        if (!(same_scope && src[k] == src_end && dst[k] == dst_end)) starts[pieces++] = (int64_t)k;
        found.disjoint &= dst[k] >= dst_end;
        found.nbytes += nbytes[k];
        src_end = src[k] + nbytes[k];
        dst_end = dst[k] + nbytes[k];
    }
    found.independent = found.disjoint;
    for (size_t k = 0; k < n && found.independent; ++k)
        if (src[k] < dst_end && src[k] + nbytes[k] > dst[0]) /* usually false, because sources and destinations are far apart */
            found.independent = !is_written(n, dst, nbytes, src[k], src[k] + nbytes[k]);
    found.num_pieces = pieces;
    *scan = found;
}

/* kvtier_fill_rows: write pieces of equal size as kernel parameters, Rows<capacity> of gather.cu (twin: fill_rows in
 * gather.py). Returns the size of a piece, or 0 if sizes differ or offsets do not fit. The caller sets `parts`. */
typedef struct {
    uint64_t src_base, dst_base, nbytes;
    uint32_t count, parts, shift, unused, offsets[];
} Rows;

int64_t kvtier_fill_rows(size_t n, const int64_t *src, const int64_t *dst, const int64_t *nbytes, size_t capacity, Rows *rows) {
    int64_t src_base = src[0], dst_base = dst[0];
    for (size_t k = 0; k < n; ++k) {
        if (nbytes[k] != nbytes[0]) return 0;
        if (src[k] < src_base) src_base = src[k];
        if (dst[k] < dst_base) dst_base = dst[k];
    }
    uint64_t used = 16; /* bits set in any offset; the initial bit limits the offsets' unit, 1 << shift, to 16 bytes */
    for (size_t k = 0; k < n; ++k) used |= (uint64_t)(src[k] - src_base) | (uint64_t)(dst[k] - dst_base);
    unsigned shift = (unsigned)__builtin_ctzll(used);
    if (used >> shift >> 32) return 0;
    for (size_t k = 0; k < n; ++k) {
        rows->offsets[k] = (uint32_t)((uint64_t)(src[k] - src_base) >> shift);
        rows->offsets[capacity + k] = (uint32_t)((uint64_t)(dst[k] - dst_base) >> shift);
    }
    rows->src_base = (uint64_t)src_base, rows->dst_base = (uint64_t)dst_base, rows->nbytes = (uint64_t)nbytes[0];
    rows->count = (uint32_t)n, rows->shift = shift;
    return nbytes[0];
}

/* kvtier_fill_pieces: write pieces of any sizes as kernel parameters, Pieces<N> of gather.cu (twin: fill_pieces in gather.py).
 * Returns the largest size. The caller sets `parts`. */
typedef struct {
    uint32_t count, parts;
    struct {
        int64_t src, dst, nbytes;
    } pieces[];
} Pieces;

int64_t kvtier_fill_pieces(size_t n, const int64_t *src, const int64_t *dst, const int64_t *nbytes, Pieces *block) {
    int64_t widest = 0;
    for (size_t k = 0; k < n; ++k) {
        block->pieces[k].src = src[k], block->pieces[k].dst = dst[k], block->pieces[k].nbytes = nbytes[k];
        if (nbytes[k] > widest) widest = nbytes[k];
    }
    block->count = (uint32_t)n;
    return widest;
}

/* kvtier_sort_moves: validate pairs of device and host block ids and sort them by destination (twin: sort_moves in
 * transfer/compiled.py). `order` has room for 4 * n numbers: permutation, sorted device ids, sorted host ids, scratch.
 * Returns 0 if an id is out of range or a destination occurs twice; the caller then lets the twin raise the error. */
enum { DIGIT = 11 }; /* bits per pass of the radix sort */

int kvtier_sort_moves(size_t n, const int64_t *device, const int64_t *host, int64_t num_device, int64_t num_host, int to_host,
                      int64_t *order) {
    const int64_t *key = to_host ? host : device;
    int64_t last = (to_host ? num_host : num_device) - 1, before = -1, *scratch = order + 3 * n, *from = order, *to = scratch;
    int ascending = 1;
    for (size_t k = 0; k < n; ++k) {
        if ((uint64_t)device[k] >= (uint64_t)num_device || (uint64_t)host[k] >= (uint64_t)num_host) return 0;
        ascending &= key[k] > before;
        before = key[k], order[k] = (int64_t)k;
    }
    for (int shift = 0; !ascending && last >> shift; shift += DIGIT) { /* radix sort, one digit of the ids per pass */
        size_t at[1 << DIGIT] = {0}, sum = 0;
        for (size_t k = 0; k < n; ++k) ++at[key[k] >> shift & ((1 << DIGIT) - 1)];
        for (size_t digit = 0; digit < 1 << DIGIT; ++digit) {
            size_t count = at[digit];
            at[digit] = sum, sum += count;
        }
        for (size_t k = 0; k < n; ++k) to[at[key[from[k]] >> shift & ((1 << DIGIT) - 1)]++] = from[k];
        int64_t *swapped = from;
        from = to, to = swapped;
    }
    if (from != order) memcpy(order, from, n * sizeof *order);
    for (size_t k = 0; k < n; ++k) {
        if (k > 0 && key[order[k]] == key[order[k - 1]]) return 0;
        order[n + k] = device[order[k]], order[2 * n + k] = host[order[k]];
    }
    return 1;
}

/* kvtier_block_copies: list the copies for blocks of `nbytes` bytes that are contiguous on both sides (twin: block_copies
 * in transfer/compiled.py). Blocks that are adjacent on both sides become one copy. A copy does not cross a host block id
 * that is a multiple of `run_blocks` (0: no such limit). Writes all sources, then all destinations, then all sizes to
 * `out`, which has room for 3 * n numbers. Returns the number of copies. */
size_t kvtier_block_copies(size_t n, const int64_t *device, const int64_t *host, int64_t device_at, int64_t device_stride, int64_t host_at,
                           int64_t host_stride, int64_t nbytes, int64_t run_blocks, int to_host, int64_t *out) {
    int64_t *near = out + (to_host ? 0 : n), *far = out + (to_host ? n : 0), *size = out + 2 * n;
    int64_t near_end = 0, far_end = 0, run = -1;
    size_t count = 0;
    for (size_t k = 0; k < n; ++k) {
        int64_t on_device = device_at + device[k] * device_stride, on_host = host_at + host[k] * host_stride;
        int64_t this_run = run_blocks ? host[k] / run_blocks : 0;
        if (on_device == near_end && on_host == far_end && this_run == run) size[count - 1] += nbytes;
        else near[count] = on_device, far[count] = on_host, size[count] = nbytes, ++count;
        near_end = on_device + nbytes, far_end = on_host + nbytes, run = this_run;
    }
    memmove(out + count, out + n, count * sizeof *out);
    memmove(out + 2 * count, size, count * sizeof *out);
    return count;
}

/* kvtier_crc32: compute the CRC-32 of each of `count` blocks (twin: zlib.crc32). Folds 64 bytes at a time with carry-less
 * multiplication if the processor supports it (Intel's method, reflected polynomial 0xEDB88320). This reaches 7.4 GB/s,
 * zlib 1.6 GB/s (Xeon, 2026-11-15). Each thread gets its next block from a shared counter. */
static uint32_t crc_table[256];

static void make_crc_table(void) {
    for (uint32_t n = 0; n < 256; ++n) {
        uint32_t crc = n;
        for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? 0xEDB88320u ^ crc >> 1 : crc >> 1;
        crc_table[n] = crc;
    }
}

static uint32_t crc_bytes(uint32_t crc, const unsigned char *data, size_t n) {
    for (size_t k = 0; k < n; ++k) crc = crc_table[(crc ^ data[k]) & 255] ^ crc >> 8;
    return crc;
}

#if defined(__x86_64__)
#include <immintrin.h>

#define FOLD(x, k, next) \
    _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11)), next)
#define LOAD(at) _mm_loadu_si128((const __m128i *)(data + (at)))

/* `crc` is the inverted intermediate value, as in crc_bytes; n is a multiple of 16 and at least 64. */
__attribute__((target("pclmul,sse4.1"))) static uint32_t crc_fold(uint32_t crc, const unsigned char *data, size_t n) {
    const __m128i by_64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4), by_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    const __m128i to_64 = _mm_set_epi64x(0, 0x0163cd6124), poly = _mm_set_epi64x(0x01f7011641, 0x01db710641);
    const __m128i low = _mm_setr_epi32(~0, 0, ~0, 0);
    __m128i a = _mm_xor_si128(LOAD(0), _mm_cvtsi32_si128((int)crc)), b = LOAD(16), c = LOAD(32), d = LOAD(48);
    for (data += 64, n -= 64; n >= 64; data += 64, n -= 64)
        a = FOLD(a, by_64, LOAD(0)), b = FOLD(b, by_64, LOAD(16)), c = FOLD(c, by_64, LOAD(32)), d = FOLD(d, by_64, LOAD(48));
    a = FOLD(a, by_16, b), a = FOLD(a, by_16, c), a = FOLD(a, by_16, d);
    for (; n >= 16; data += 16, n -= 16) a = FOLD(a, by_16, LOAD(0));
    /* fold 128 bits to 64, then Barrett reduction to 32 */
    a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by_16, 0x10));
    a = _mm_xor_si128(_mm_srli_si128(a, 4), _mm_clmulepi64_si128(_mm_and_si128(a, low), to_64, 0x00));
    __m128i q = _mm_clmulepi64_si128(_mm_and_si128(a, low), poly, 0x10);
    q = _mm_clmulepi64_si128(_mm_and_si128(q, low), poly, 0x00);
    return (uint32_t)_mm_extract_epi32(_mm_xor_si128(a, q), 1);
}
#define CAN_FOLD() (__builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"))
#else
#define crc_fold crc_bytes
#define CAN_FOLD() 0
#endif

typedef struct {
    const int64_t *data, *nbytes;
    size_t count;
    size_t *next; /* shared by the threads: index of the next block to process */
    uint32_t *crc;
} Sums;

static void *crc_share(void *argument) {
    const Sums *sums = argument;
    int folds = CAN_FOLD();
    for (size_t k; (k = __atomic_fetch_add(sums->next, 1, __ATOMIC_RELAXED)) < sums->count;) {
        const unsigned char *data = (const unsigned char *)(intptr_t)sums->data[k];
        size_t n = (size_t)sums->nbytes[k], folded = folds && n >= 64 ? n & ~(size_t)15 : 0;
        uint32_t crc = ~0u;
        if (folded) crc = crc_fold(crc, data, folded);
        sums->crc[k] = ~crc_bytes(crc, data + folded, n - folded);
    }
    return NULL;
}

void kvtier_crc32(size_t count, const int64_t *data, const int64_t *nbytes, uint32_t *crc, int threads) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_crc_table);
    size_t next = 0;
    Sums sums = {data, nbytes, count, &next, crc};
    pthread_t others[MAX_THREADS];
    int started = 0;
    for (int t = 1; t < threads && t < MAX_THREADS; ++t) started += pthread_create(&others[started], NULL, crc_share, &sums) == 0;
    crc_share(&sums);
    for (int t = 0; t < started; ++t) pthread_join(others[t], NULL);
}
