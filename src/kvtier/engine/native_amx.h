/* Products for 5 to 16 tokens with AMX, included by native.c: y[t][n] = sum over k of W[n][k] * x[t][k].
 *
 * A bf16 has 8 significant bits. Each x is split into three bf16 values whose sum is exactly x, and a stored q (4 or 8
 * bits) fits into one bf16. The products are therefore exact, and the tile unit adds them in float32. Scales are
 * applied in float32, once per 32 columns:
 *   sum of (d * q + m) * x  =  d * sum of (q - 8) * x  +  (m + 8 d) * sum of x
 * The rounding error is smaller than that of a sum in column order. The result of a token does not depend on the other
 * tokens, but it is not bit-identical to the result of the loops that compute up to 4 tokens.
 */
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

/* LEAST: minimum number of tokens. Compared with the loops, the tile unit is equally fast for 4 tokens, a fifth faster
 * for 8 and a third faster for 16 (Xeon with AMX, 2 cores, measured on 2026-11-15).
 * AMX_AHEAD: prefetch distance in blocks of weights. */
enum { PARTS = 3, LEAST = 5, AMX_AHEAD = 2 };
static const uint32_t TOP = 0xffff0000u;

static int has_amx;

/* Linux enables the tile registers on request: ARCH_REQ_XCOMP_PERM (0x1023) for XTILEDATA (18). */
__attribute__((constructor)) static void request_amx(void) { has_amx = syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TileConfig;

/* Convert a block to the tile format. For each output, row j contains the bf16 weights of columns j and j + 16. */
INLINE void pairs_of(int kind, const char *block, uints *out) {
    static const uint16_t eights[32] = { /* -8 to 7, twice, because the lookup also uses a bit of the other nibble */
        0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
        0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
        0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    for (int j = 0; j < BLOCK / 2; ++j)
        if (kind == Q4_1) {
            const __m512i q = _mm512_cvtepu8_epi32(LOAD(__m128i, block + 128 + 16 * j));
            const __m512i both = _mm512_or_si512(q, _mm512_slli_epi32(q, 12));
            out[j] = (uints)_mm512_permutexvar_epi16(both, LOAD(__m512i, eights));
        } else {
            floats first, second;
            if (kind == BF16) bf16(block, 0, j, &first, &second);
            else {
                first = __builtin_convertvector(bytes_at(block + 64 + 16 * j), floats);
                second = __builtin_convertvector(bytes_at(block + 64 + 16 * (j + 16)), floats);
            }
            out[j] = (uints)first >> 16 | ((uints)second & TOP);
        }
}

/* Split x [count][columns] into bf16 parts [PARTS][tokens][columns], where 32 columns are in the order of the pairs.
 * Also compute the sum of each group of 32 columns, [columns / 32][tokens]. */
static void cut(const float *x, uint16_t *parts, float *sums, long count, long columns, long tokens) {
    for (long t = 0; t < tokens; ++t)
        for (long k = 0; k < columns; k += BLOCK) {
            floats first = {0}, second = {0};
            const float *from = x + t * columns + k;
            if (t < count) first = LOAD(floats, from), second = LOAD(floats, from + LANES);
            sums[k / BLOCK * tokens + t] = sum_of(first + second);
            for (int part = 0; part < PARTS; ++part) {
                const uints top1 = (uints)first & TOP, top2 = (uints)second & TOP, pairs = top1 >> 16 | top2;
                memcpy(parts + (part * tokens + t) * columns + k, &pairs, sizeof pairs);
                first -= (floats)top1, second -= (floats)top2;
            }
        }
}

/* Set found to parts x pairs for two tiles. Products of the two tiles alternate, because the unit can overlap them. */
INLINE void multiply(const uint16_t *parts, long columns, long tokens, uints pairs[2][16], floats found[2][16]) {
    __asm__ volatile("" ::: "memory"); /* gcc 12 does not model tile loads as memory reads */
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(2, pairs[0], 64);
    _tile_loadd(3, pairs[1], 64);
    _tile_loadd(4, parts, 2 * columns);
    _tile_dpbf16ps(0, 4, 2);
    _tile_dpbf16ps(1, 4, 3);
    _tile_loadd(5, parts + tokens * columns, 2 * columns);
    _tile_dpbf16ps(0, 5, 2);
    _tile_dpbf16ps(1, 5, 3);
    _tile_loadd(6, parts + 2 * tokens * columns, 2 * columns);
    _tile_dpbf16ps(0, 6, 2);
    _tile_dpbf16ps(1, 6, 3);
    _tile_stored(0, found[0], 64);
    _tile_stored(1, found[1], 64);
}

/* Compute tiles [begin, end), two at a time. With an odd number, the last tile is computed twice and stored once. */
INLINE void amx_tiles(const Product *p, long begin, long end, int kind) {
    const long blocks = p->columns / BLOCK, bytes = BLOCK_BYTES[kind], tokens = p->tokens;
    const uint16_t *parts = (const uint16_t *)p->x;
    const float *sums = (const float *)(parts + PARTS * tokens * p->columns);
    uints pairs[2][16];
    floats found[2][16], total[2][16];
    for (long tile = begin; tile < end; tile += 2) {
        const int last = end - tile > 1;
        memset(total, 0, sizeof total);
        for (long b = 0; b < blocks; ++b) {
            const char *block[2] = {p->weights + (tile * blocks + b) * bytes,
                                    p->weights + ((tile + last) * blocks + b) * bytes};
            for (int i = 0; i < 2; ++i) {
                for (int line = 0; line < bytes; line += 64) __builtin_prefetch(block[i] + AMX_AHEAD * bytes + line);
                pairs_of(kind, block[i], pairs[i]);
            }
            multiply(parts + b * BLOCK, p->columns, tokens, pairs, found);
            for (int i = 0; i < 2; ++i) {
                const floats d = kind == BF16 ? total[0][0] * 0 + 1 : LOAD(floats, block[i]);
                const floats m = kind == Q4_1 ? LOAD(floats, block[i] + 64) + 8 * d : d * 0;
                for (long t = 0; t < tokens; ++t) {
                    total[i][t] += found[i][t] * d;
                    if (kind == Q4_1) total[i][t] += m * sums[b * tokens + t];
                }
            }
        }
        for (int i = 0; i <= last; ++i)
            for (long t = 0; t < tokens; ++t) STORE(p->y + t * p->rows + (tile + i) * TILE, total[i][t]);
    }
}

static void amx_range(const void *data, long begin, long end, int thread) {
    const Product *p = data;
    (void)thread;
    TileConfig config = {.palette = 1};
    for (int i = 0; i < 7; ++i) config.bytes[i] = 64, config.rows[i] = i == 2 || i == 3 ? 16 : (uint8_t)p->tokens;
    _tile_loadconfig(&config);
    if (p->kind == Q4_1) amx_tiles(p, begin, end, Q4_1);
    else if (p->kind == Q8_0) amx_tiles(p, begin, end, Q8_0);
    else amx_tiles(p, begin, end, BF16);
    _tile_release();
}

/* Return 1 if AMX computed the product, 0 if the caller must compute it. scratch is float [2][tokens][columns]. */
static int amx_product(Product *p, const float *x, float *scratch, long count, int threads, int way) {
    if (!has_amx || count < LEAST) return 0;
    uint16_t *parts = (uint16_t *)scratch;
    cut(x, parts, (float *)(parts + PARTS * p->tokens * p->columns), count, p->columns, p->tokens);
    p->x = scratch;
    run(amx_range, p, p->rows / TILE, 2, threads, way);
    return 1;
}
#else
enum { has_amx = 0 };

static int amx_product(Product *p, const float *x, float *scratch, long count, int threads, int way) {
    return (void)p, (void)x, (void)scratch, (void)count, (void)threads, (void)way, 0;
}
#endif
