/* Products with integer instructions, included by native_product.h. They round the input, so results differ from those
 * of the exact products: a block of 32 columns of x becomes s * r with integers |r| <= 16256 and s = max |x| / 16256.
 *   Q4: sum of (d * q + m) * x  =  d * s * sum of q * r  +  m * s * sum of r
 *   Q8: sum of d * q * x        =  d * s * sum of q * r
 * r = 128 * high + low, with -127 <= high <= 127 and -64 <= low < 64, so that instructions for bytes can multiply each
 * half. An r of 8 bits would need only half of these instructions, but changed 3 % of the greedy tokens of SmolLM2-135M
 * (5,120 positions, measured on 2026-11-18). The sums over the columns of a block are exact, and blocks are added in
 * float32 in column order. The result of a token does not depend on the other tokens.
 *
 * Data of each tile of 16 outputs and 32 columns; 4 columns of an output are contiguous, as the instructions need:
 *   Q4: float d[16], m[16]; uint8 q[4][16][4]: low nibble column 4 * i + k, high nibble column 16 + 4 * i + k
 *   Q8: float d[16]; int8 q[8][16][4]: column 4 * i + k
 */
enum { GROUPS = BLOCK / 4, MOST = 127 * 128 };

typedef int8_t chars __attribute__((vector_size(LANES)));

/* Round x [count][columns]. `scratch` has room for 2 * count * columns floats. A block with NaN or infinity gets the
 * scale NaN, so that its products are NaN. */
static Rounded quantise(const float *x, float *scratch, long count, long columns) {
    const long blocks = columns / BLOCK;
    float *scales = scratch, *sums = scales + count * blocks;
    int32_t *counts = (int32_t *)(sums + count * blocks);
    int8_t *high = (int8_t *)(counts + count * blocks), *low = high + count * columns;
    for (long at = 0; at < count * blocks; ++at, x += BLOCK) {
        floats top = {0}, poison = {0};
        for (int i = 0; i < BLOCK; i += LANES) {
            const floats v = LOAD(floats, x + i), size = (floats)((ints)v & 0x7fffffff);
            const ints more = size > top;
            top = (floats)(((ints)size & more) | ((ints)top & ~more));
            poison += v * 0;
        }
        float most = 0;
        for (int i = 0; i < LANES; ++i) most = top[i] > most ? top[i] : most;
        const float inverse = most > 1e-30f ? MOST / most : 0;
        ints sum = {0};
        for (int i = 0; i < BLOCK; i += LANES) {
            const floats near = (LOAD(floats, x + i) * inverse + 12582912.0f) - 12582912.0f;
            const ints r = __builtin_convertvector(near, ints);
            const ints upper = (r + 64) >> 7;
            const chars first = __builtin_convertvector(upper, chars);
            const chars second = __builtin_convertvector(r - (upper << 7), chars);
            memcpy(high + at * BLOCK + i, &first, sizeof first);
            memcpy(low + at * BLOCK + i, &second, sizeof second);
            sum += r;
        }
        int32_t total = 0;
        for (int i = 0; i < LANES; ++i) total += sum[i];
        scales[at] = most / MOST + sum_of(poison);
        counts[at] = total, sums[at] = scales[at] * (float)total;
    }
    return (Rounded){high, low, scales, sums, counts};
}

INLINE ints four(const int8_t *r) {
    int32_t value;
    memcpy(&value, r, sizeof value);
    return (ints){0} + value;
}

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
#define HAS_VNNI
#ifdef __AVX512F__
INLINE ints dot(ints sum, ints q, ints r) { return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)q, (__m512i)r); }
#else
INLINE ints dot(ints sum, ints q, ints r) { return (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)q, (__m256i)r); }
#endif
#elif defined(__AVX512BW__)
INLINE ints pairs(ints q, ints r) { return (ints)_mm512_maddubs_epi16((__m512i)q, (__m512i)r); }
INLINE ints add_pairs(ints a, ints b) { return (ints)_mm512_add_epi16((__m512i)a, (__m512i)b); }
INLINE ints join_pairs(ints a) { return (ints)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi16(1)); }
INLINE ints size_of(ints q) { return (ints)_mm512_abs_epi8((__m512i)q); }
INLINE ints with_sign(ints r, ints q) {
    return (ints)_mm512_mask_sub_epi8((__m512i)r, _mm512_movepi8_mask((__m512i)q), _mm512_setzero_si512(), (__m512i)r);
}
#elif defined(__AVX2__)
INLINE ints pairs(ints q, ints r) { return (ints)_mm256_maddubs_epi16((__m256i)q, (__m256i)r); }
INLINE ints add_pairs(ints a, ints b) { return (ints)_mm256_add_epi16((__m256i)a, (__m256i)b); }
INLINE ints join_pairs(ints a) { return (ints)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi16(1)); }
INLINE ints size_of(ints q) { return (ints)_mm256_abs_epi8((__m256i)q); }
INLINE ints with_sign(ints r, ints q) { return (ints)_mm256_sign_epi8((__m256i)r, (__m256i)q); }
#else
/* Fallback without dot-product instructions, one output per element. `low` is 0 for unsigned q, 128 for signed q. */
INLINE ints dot_bytes(ints sum, ints q, ints r, int low) {
    for (int k = 0; k < 32; k += 8) sum += ((((q >> k) & 255) ^ low) - low) * (r << (24 - k) >> 24);
    return sum;
}
#endif

/* Return the sum of q * r over a block, where q is in [0, 15]. The sums of pairs are at most 8 * 2 * 15 * 127, so they
 * fit into 16 bits. */
INLINE ints sum_q4(const ints *q, const int8_t *r) {
    ints sum = {0};
#if defined(HAS_VNNI)
    _Pragma("GCC unroll 8") for (int i = 0; i < GROUPS; ++i) sum = dot(sum, q[i], four(r + 4 * i));
#elif defined(__AVX2__)
    _Pragma("GCC unroll 8") for (int i = 0; i < GROUPS; ++i) sum = add_pairs(sum, pairs(q[i], four(r + 4 * i)));
    sum = join_pairs(sum);
#else
    for (int i = 0; i < GROUPS; ++i) sum = dot_bytes(sum, q[i], four(r + 4 * i), 0);
#endif
    return sum;
}

/* Return the sum of q * r over a block, where q is in [-128, 127]. With VNNI, q is larger by 128, see OFFSET. */
INLINE ints sum_q8(const ints *q, const int8_t *r) {
    ints sum = {0};
#if defined(HAS_VNNI)
    _Pragma("GCC unroll 8") for (int i = 0; i < GROUPS; ++i) sum = dot(sum, q[i], four(r + 4 * i));
#elif defined(__AVX2__)
    _Pragma("GCC unroll 8") for (int i = 0; i < GROUPS; ++i)
        sum += join_pairs(pairs(size_of(q[i]), with_sign(four(r + 4 * i), q[i])));
#else
    for (int i = 0; i < GROUPS; ++i) sum = dot_bytes(sum, q[i], four(r + 4 * i), 128);
#endif
    return sum;
}

/* VNNI multiplies unsigned by signed bytes, so it gets q + OFFSET. */
#ifdef HAS_VNNI
enum { OFFSET = 128 };
#else
enum { OFFSET = 0 };
#endif

/* Compute a tile for `count` tokens. */
INLINE void integer_tile(const Product *p, long tile, const int kind, const long count) {
    const long blocks = p->columns / BLOCK, bytes = BLOCK_BYTES[kind];
    const char *weights = p->weights + tile * blocks * bytes;
    floats total[MAX_TOKENS][VECTORS];
    memset(total, 0, sizeof(total[0]) * (size_t)count);
    for (long b = 0; b < blocks; ++b, weights += bytes) {
        PREFETCH(weights + blocks * bytes, bytes);
        for (int v = 0; v < VECTORS; ++v) {
            const floats d = LOAD(floats, weights + 4 * LANES * v);
            const floats m = kind == Q4_INTEGER ? LOAD(floats, weights + 64 + 4 * LANES * v) : d;
            const char *from = weights + (kind == Q4_INTEGER ? 128 : 64) + 4 * LANES * v;
            ints q[GROUPS];
            _Pragma("GCC unroll 8") for (int i = 0; i < GROUPS; ++i)
                if (kind == Q8_INTEGER) q[i] = LOAD(ints, from + 64 * i) ^ (int32_t)(OFFSET * 0x01010101u);
                else if (i < GROUPS / 2) q[i] = LOAD(ints, from + 64 * i) & 0x0f0f0f0f;
                else q[i] = LOAD(ints, from + 64 * (i - GROUPS / 2)) >> 4 & 0x0f0f0f0f;
            for (long t = 0; t < count; ++t) {
                const long at = t * blocks + b;
                const int8_t *high = p->rounded.high + at * BLOCK, *low = p->rounded.low + at * BLOCK;
                const ints sum = kind == Q4_INTEGER
                                     ? (sum_q4(q, high) << 7) + sum_q4(q, low)
                                     : (sum_q8(q, high) << 7) + sum_q8(q, low) - OFFSET * p->rounded.counts[at];
                total[t][v] += __builtin_convertvector(sum, floats) * (d * p->rounded.scales[at]);
                if (kind == Q4_INTEGER) total[t][v] += m * p->rounded.sums[at];
            }
        }
    }
    for (long t = 0; t < count; ++t) memcpy(p->y + t * p->rows + tile * TILE, total[t], TILE * sizeof(float));
}

static void integer_tiles(const void *data, long begin, long end, int thread) {
    const Product *p = data;
    (void)thread;
    for (long tile = begin; tile < end; ++tile)
        if (p->kind == Q4_INTEGER && p->count == 1) integer_tile(p, tile, Q4_INTEGER, 1);
        else if (p->kind == Q4_INTEGER) integer_tile(p, tile, Q4_INTEGER, p->count);
        else if (p->count == 1) integer_tile(p, tile, Q8_INTEGER, 1);
        else integer_tile(p, tile, Q8_INTEGER, p->count);
}
