/* Products with packed matrices, included by native.c: y[t][n] = sum over k of W[n][k] * x[t][k]. More than 16 tokens
 * are computed in groups of 16, so that the sums of a group stay in registers and its inputs in the L1 or L2 cache.
 *
 * Weights are widened to float32 in registers. They equal the weights of the dequantised matrix, because d * q is exact
 * (11 bits times 4 or 8 bits) and adding m rounds once, as in dequantisation. Each output is a float32 sum in a fixed
 * column order, so it does not depend on the number of tokens. With AMX, native_amx.h computes 5 or more tokens.
 *
 * A packed matrix is a sequence of tiles of 16 outputs. Within a tile, the 16 weights of a column are contiguous, so a
 * vector holds the weights of several outputs and the input is broadcast. Data of each tile and 32 columns:
 *   Q4_1: float d[16], m[16]; uint8 q[16][16], low nibble column j, high nibble column j + 16
 *   Q8_0: float d[16]; int8 q[32][16]
 *   BF16: uint16 w[32][16]
 * The sum adds column j, then j + 16, for j from 0 to 15.
 */
enum { Q4_1, Q8_0, BF16, Q4_INTEGER, Q8_INTEGER };
enum { VECTORS = TILE / LANES };
static const int BLOCK_BYTES[] = {
    [Q4_1] = 2 * 64 + 256, [Q8_0] = 64 + 512, [BF16] = 1024, [Q4_INTEGER] = 2 * 64 + 256, [Q8_INTEGER] = 64 + 512};

typedef struct {
    const int8_t *high, *low;   /* halves of r, [tokens][columns] */
    const float *scales, *sums; /* s, and s * sum of r, [tokens][columns / 32] */
    const int32_t *counts;      /* sum of r, [tokens][columns / 32] */
} Rounded; /* x = s * r (native_integer.h) */

typedef struct {
    const char *weights;
    const float *x; /* [tokens][columns]; with AVX-512 [columns][tokens]; with AMX bf16 parts (native_amx.h) */
    float *y;       /* [tokens][rows] */
    long rows, columns, count, tokens; /* tokens: count, rounded up to a power of 2 */
    int kind;
    Rounded rounded; /* for kinds of native_integer.h */
} Product;

/* Return the number of tokens in the group that begins at token `first`. */
INLINE long group_of(long count, long first) { return count - first < MAX_TOKENS ? count - first : MAX_TOKENS; }

INLINE long padded(long count) { return count > 1 ? 2L << (63 - __builtin_clzl(count - 1)) : 1; }

/* Load LANES bytes as integers. Uses intrinsics, because gcc 12 would widen loaded bytes one at a time. */
INLINE ints bytes_at(const char *from) {
#if defined(__AVX512F__)
    return (ints)_mm512_cvtepi8_epi32(LOAD(__m128i, from));
#elif defined(__AVX2__)
    return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)from));
#else
    return (ints){(int8_t)from[0], (int8_t)from[1], (int8_t)from[2], (int8_t)from[3]};
#endif
}

/* Convert the low four bits of each element to float. AVX-512 has a table lookup in a register for this. */
INLINE floats nibbles_of(ints q) {
#ifdef __AVX512F__
    const floats table = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (floats)_mm512_permutexvar_ps((__m512i)q, (__m512)table);
#else
    return __builtin_convertvector(q & 15, floats);
#endif
}

/* Dequantise columns j and j + 16 of a block for LANES outputs, beginning at output `lane`. */
INLINE void q4_1(const char *block, int lane, int j, floats *first, floats *second) {
    const floats d = LOAD(floats, block + 4 * lane), m = LOAD(floats, block + 64 + 4 * lane);
    const ints q = bytes_at(block + 128 + 16 * j + lane);
    *first = nibbles_of(q) * d + m;
    *second = nibbles_of(q >> 4) * d + m;
}

INLINE void q8_0(const char *block, int lane, int j, floats *first, floats *second) {
    const floats d = LOAD(floats, block + 4 * lane);
    *first = __builtin_convertvector(bytes_at(block + 64 + 16 * j + lane), floats) * d;
    *second = __builtin_convertvector(bytes_at(block + 64 + 16 * (j + 16) + lane), floats) * d;
}

typedef uint16_t shorts __attribute__((vector_size(2 * LANES)));

INLINE void bf16(const char *block, int lane, int j, floats *first, floats *second) {
    *first = (floats)(__builtin_convertvector(LOAD(shorts, block + 32 * j + 2 * lane), uints) << 16);
    *second = (floats)(__builtin_convertvector(LOAD(shorts, block + 32 * (j + 16) + 2 * lane), uints) << 16);
}

#ifdef __AVX512F__
/* Compute tiles [begin, end). The sums of TILES tiles and TOKENS tokens stay in registers. */
#define PRODUCT(KIND, BYTES, TILES, TOKENS)                                                                           \
    static void KIND##_##TOKENS(const Product *p, long begin, long end) {                                             \
        const long blocks = p->columns / BLOCK, tile_bytes = blocks * BYTES;                                          \
        for (long tile = begin; tile < end; tile += TILES) {                                                          \
            const int tiles = end - tile < TILES ? (int)(end - tile) : TILES;                                         \
            floats sum[TILES][TOKENS];                                                                                \
            memset(sum, 0, sizeof sum);                                                                               \
            if (tiles == TILES)                                                                                       \
                for (long b = 0; b < blocks; ++b) {                                                                   \
                    for (int i = 0; i < TILES; ++i)                                                                   \
                        PREFETCH(p->weights + (tile + TILES + i) * tile_bytes + b * BYTES, BYTES);                    \
                    for (int j = 0; j < BLOCK / 2; ++j)                                                               \
                        STEP(KIND, BYTES, TILES, TOKENS)                                                              \
                }                                                                                                     \
            else                                                                                                      \
                for (long b = 0; b < blocks; ++b)                                                                     \
                    for (int j = 0; j < BLOCK / 2; ++j)                                                               \
                        STEP(KIND, BYTES, tiles, TOKENS)                                                              \
            for (int i = 0; i < tiles; ++i)                                                                           \
                for (int t = 0; t < TOKENS; ++t)                                                                      \
                    memcpy(p->y + t * p->rows + (tile + i) * TILE, &sum[i][t], sizeof(floats));                      \
        }                                                                                                             \
    }
#define STEP(KIND, BYTES, TILES, TOKENS)                                                                              \
    _Pragma("GCC unroll 4") for (int i = 0; i < TILES; ++i) {                                                         \
        floats first, second;                                                                                         \
        KIND(p->weights + (tile + i) * tile_bytes + b * BYTES, 0, j, &first, &second);                                   \
        const float *x = p->x + (b * BLOCK + j) * TOKENS;                                                             \
        _Pragma("GCC unroll 16") for (int t = 0; t < TOKENS; ++t) sum[i][t] += first * x[t];                          \
        _Pragma("GCC unroll 16") for (int t = 0; t < TOKENS; ++t) sum[i][t] += second * x[16 * TOKENS + t];           \
    }

/* The sums need 4, 8 or 16 of the 32 registers. */
#define PRODUCTS(KIND, BYTES)                                                                                         \
    PRODUCT(KIND, BYTES, 4, 1)                                                                                        \
    PRODUCT(KIND, BYTES, 4, 2)                                                                                        \
    PRODUCT(KIND, BYTES, 2, 4)                                                                                        \
    PRODUCT(KIND, BYTES, 2, 8)                                                                                        \
    PRODUCT(KIND, BYTES, 1, 16)
PRODUCTS(q4_1, BLOCK_BYTES[Q4_1])
PRODUCTS(q8_0, BLOCK_BYTES[Q8_0])
PRODUCTS(bf16, BLOCK_BYTES[BF16])

typedef void (*ProductFunction)(const Product *, long, long);
static const ProductFunction PRODUCT_OF[3][5] = {
    {q4_1_1, q4_1_2, q4_1_4, q4_1_8, q4_1_16},
    {q8_0_1, q8_0_2, q8_0_4, q8_0_8, q8_0_16},
    {bf16_1, bf16_2, bf16_4, bf16_8, bf16_16},
};

typedef struct {
    const float *x;
    float *out;
    long count, columns;
} Transposition;

/* Transpose groups [begin, end) of at most 16 tokens to [columns][tokens]; tokens beyond `count` are zeros. */
static void transpose(const void *data, long begin, long end, int thread) {
    (void)thread;
    const Transposition *d = data;
    for (long group = begin; group < end; ++group) {
        const long first = group * MAX_TOKENS, count = group_of(d->count, first), tokens = padded(count);
        const float *x = d->x + first * d->columns;
        float *out = d->out + first * d->columns;
        for (long k = 0; k < d->columns; ++k)
            for (long t = 0; t < tokens; ++t) out[k * tokens + t] = t < count ? x[t * d->columns + k] : 0;
    }
}

static void compute_tiles(const Product *p, long begin, long end) {
    PRODUCT_OF[p->kind][__builtin_ctzl(p->tokens)](p, begin, end);
}
#else
/* Blocking for 16 registers (AVX2: 8 floats each, SSE2: 4). The sums of one tile and GROUP tokens take 12 of them; two
 * are for weights and one for a broadcast input. To dequantise each weight once, DEPTH blocks of a tile are unpacked
 * into a buffer in the L1 cache, which all groups of tokens read. NEON has 32 registers of 4 floats. */
#if defined(__AVX2__) || defined(__aarch64__)
enum { GROUP = 6 };
#else
enum { GROUP = 3 };
#endif
enum { DEPTH = 4, SINGLES = 2 };

INLINE void dequantise(int kind, const char *block, int lane, int j, floats *first, floats *second) {
    if (kind == Q4_1) q4_1(block, lane, j, first, second);
    else if (kind == Q8_0) q8_0(block, lane, j, first, second);
    else bf16(block, lane, j, first, second);
}

/* One token: the weights are used directly. Several tiles hide the latency of the additions. */
INLINE void single(const Product *p, long tile, const int tiles, const int kind) {
    const long blocks = p->columns / BLOCK, bytes = BLOCK_BYTES[kind];
    const char *weights = p->weights + tile * blocks * bytes;
    floats sum[SINGLES][VECTORS] = {{{0}}};
    for (long b = 0; b < blocks; ++b) {
        for (int i = 0; i < tiles; ++i) PREFETCH(weights + ((tiles + i) * blocks + b) * bytes, bytes);
        _Pragma("GCC unroll 2") for (int j = 0; j < BLOCK / 2; ++j) {
            const float *x = p->x + b * BLOCK + j;
            _Pragma("GCC unroll 2") for (int i = 0; i < tiles; ++i)
                _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; ++v) {
                    floats first, second;
                    dequantise(kind, weights + (i * blocks + b) * bytes, v * LANES, j, &first, &second);
                    sum[i][v] += first * x[0];
                    sum[i][v] += second * x[16];
                }
        }
    }
    for (int i = 0; i < tiles; ++i)
        for (int v = 0; v < VECTORS; ++v) STORE(p->y + (tile + i) * TILE + v * LANES, sum[i][v]);
}

/* Add the products of `blocks` unpacked blocks [32][TILE] and `tokens` rows of x to sums [tokens][TILE]. */
INLINE void add_products(const float *weights, const float *x, long stride, float *sums, int blocks, const int tokens) {
    floats sum[GROUP][VECTORS];
    _Pragma("GCC unroll 6") for (int t = 0; t < tokens; ++t)
        _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; ++v) sum[t][v] = LOAD(floats, sums + t * TILE + v * LANES);
    for (int b = 0; b < blocks; ++b)
        for (int j = 0; j < BLOCK / 2; ++j)
            _Pragma("GCC unroll 2") for (int column = b * BLOCK + j; column < (b + 1) * BLOCK; column += 16)
                _Pragma("GCC unroll 6") for (int t = 0; t < tokens; ++t)
                    _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; ++v)
                        sum[t][v] += LOAD(floats, weights + column * TILE + v * LANES) * x[t * stride + column];
    _Pragma("GCC unroll 6") for (int t = 0; t < tokens; ++t)
        _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; ++v) STORE(sums + t * TILE + v * LANES, sum[t][v]);
}

static void add_group(const float *weights, const float *x, long stride, float *sums, int blocks, int tokens) {
    switch (tokens) {
    case 1: add_products(weights, x, stride, sums, blocks, 1); break;
    case 2: add_products(weights, x, stride, sums, blocks, 2); break;
    case 3: add_products(weights, x, stride, sums, blocks, 3); break;
#if defined(__AVX2__) || defined(__aarch64__)
    case 4: add_products(weights, x, stride, sums, blocks, 4); break;
    case 5: add_products(weights, x, stride, sums, blocks, 5); break;
    case 6: add_products(weights, x, stride, sums, blocks, 6); break;
#endif
    }
}

/* Several tokens, in groups of almost equal size. */
INLINE void several(const Product *p, long tile, const int kind) {
    const long blocks = p->columns / BLOCK, bytes = BLOCK_BYTES[kind], groups = (p->count + GROUP - 1) / GROUP;
    float weights[DEPTH * BLOCK * TILE] __attribute__((aligned(64))), sums[MAX_TOKENS * TILE] = {0};
    for (long b = 0; b < blocks; b += DEPTH) {
        const int depth = blocks - b < DEPTH ? (int)(blocks - b) : DEPTH;
        for (int i = 0; i < depth; ++i) {
            PREFETCH(p->weights + ((tile + 1) * blocks + b + i) * bytes, bytes);
            for (int j = 0; j < BLOCK / 2; ++j)
                _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; ++v) {
                    floats first, second;
                    dequantise(kind, p->weights + (tile * blocks + b + i) * bytes, v * LANES, j, &first, &second);
                    STORE(weights + (i * BLOCK + j) * TILE + v * LANES, first);
                    STORE(weights + (i * BLOCK + j + 16) * TILE + v * LANES, second);
                }
        }
        for (long g = 0; g < groups; ++g) {
            const long t = p->count * g / groups, next = p->count * (g + 1) / groups;
            const float *x = p->x + t * p->columns + b * BLOCK;
            add_group(weights, x, p->columns, sums + t * TILE, depth, (int)(next - t));
        }
    }
    for (long t = 0; t < p->count; ++t) memcpy(p->y + t * p->rows + tile * TILE, sums + t * TILE, TILE * sizeof(float));
}

INLINE void compute(const Product *p, long begin, long end, const int kind) {
    if (p->count > 1)
        for (long tile = begin; tile < end; ++tile) several(p, tile, kind);
    else {
        for (; begin + SINGLES <= end; begin += SINGLES) single(p, begin, SINGLES, kind);
        for (; begin < end; ++begin) single(p, begin, 1, kind);
    }
}

static void compute_tiles(const Product *p, long begin, long end) {
    if (p->kind == Q4_1) compute(p, begin, end, Q4_1);
    else if (p->kind == Q8_0) compute(p, begin, end, Q8_0);
    else compute(p, begin, end, BF16);
}
#endif

/* Compute tiles [begin, end) for all tokens, in groups of 16. */
static void product_groups(const void *data, long begin, long end, int thread) {
    (void)thread;
    Product p = *(const Product *)data;
    const long count = p.count;
    for (long first = 0; first < count; first += MAX_TOKENS) {
        p.count = group_of(count, first), p.tokens = padded(p.count);
        compute_tiles(&p, begin, end);
        p.x += p.tokens * p.columns, p.y += p.tokens * p.rows;
    }
}

#include "native_amx.h"
#include "native_integer.h"

/* x [count][columns], scratch [2][padded][columns], y [padded][rows]. rows is a multiple of 16, columns of 32. `padded`
 * is count rounded up to a power of 2, or to a multiple of 16 if it is above 16. Rows of y beyond `count` are undefined.
 */
void kvtier_product(int kind, const void *weights, const float *x, float *scratch, float *y, long rows, long columns,
                    long count, int threads) {
    const int is_integer = kind == Q4_INTEGER || kind == Q8_INTEGER;
    if (count > MAX_TOKENS && (is_integer || has_amx)) {
        for (long first = 0; first < count; first += MAX_TOKENS)
            kvtier_product(kind, weights, x + first * columns, scratch, y + first * rows, rows, columns,
                           group_of(count, first), threads);
        return;
    }
    Product p = {weights, x, y, rows, columns, count, padded(count), kind, {0}};
    const int way = way_of(threads, rows * columns, count);
    if (is_integer) {
        p.rounded = quantise(x, scratch, count, columns);
        run(integer_tiles, &p, rows / TILE, 1, threads, way);
        return;
    }
    if (amx_product(&p, x, scratch, count, threads, way)) return;
#ifdef __AVX512F__
    if (count > 1) {
        const Transposition all = {x, scratch, count, columns};
        run(transpose, &all, (count + MAX_TOKENS - 1) / MAX_TOKENS, 1, threads, count > MAX_TOKENS ? way : ALONE);
        p.x = scratch;
    }
#endif
    run(product_groups, &p, rows / TILE, 4, threads, way);
}

/* Return the number of floats in a vector. */
int kvtier_lanes(void) { return LANES; }
