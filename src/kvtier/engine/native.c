/* Steps of a few tokens on the CPU, which wait for memory: matrices in the bytes the checkpoint has, and attention that
 * reads the cache where it lies. Compiled on first use (native.py); torch does the same work where there is no compiler.
 *
 * Weights are widened to float32 in registers, to exactly the numbers the dequantised matrix has (d * q is exact: 11
 * bits times 4 or 8; adding m rounds once, as it does there). Sums are float32, in the order of the columns for each
 * output, however many tokens there are.
 *
 * A packed matrix is a row of tiles of 16 outputs; within a tile the 16 weights of one column lie together, so that a
 * vector holds 16 outputs and an input is broadcast. Per tile and 32 columns:
 *   Q4_1: float d[16], m[16]; uint8 q[16][16], low nibble column j, high nibble column j + 16
 *   Q8_0: float d[16]; uint16 q[16][16], low byte column j, high byte column j + 16, 128 added to both (gcc 12 widens
 *         bytes just loaded, or signed, one by one)
 *   BF16: uint16 w[32][16]
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 16, BLOCK = 32, MAX_TOKENS = 16, MAX_GROUP = 16 };

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));

#define LOAD(type, from) ({ type v_; memcpy(&v_, (from), sizeof v_); v_; })
#define WIDEN(v) __builtin_convertvector(__builtin_convertvector((v), i32x16), f32x16)
#define INLINE static inline __attribute__((always_inline))

/* ---- work shared by threads: GOMP_parallel of the OpenMP runtime torch has loaded, so that its threads do it ---- */

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);
static Parallel parallel;
static int (*thread_number)(void), (*team_size)(void);

void kvtier_threads(void *parallel_, void *thread_number_, void *team_size_) {
    parallel = (Parallel)parallel_;
    thread_number = (int (*)(void))thread_number_;
    team_size = (int (*)(void))team_size_;
}

static void run(void (*work)(void *), void *data, int threads) {
    if (parallel && threads > 1) parallel(work, data, (unsigned)threads, 0);
    else work(data);
}

/* This thread's share [*begin, *end) of `count` pieces of work. */
static void share(long count, int alone, long *begin, long *end) {
    long n = alone ? 1 : team_size(), i = alone ? 0 : thread_number();
    *begin = count * i / n, *end = count * (i + 1) / n;
}

/* ---- y[t][n] = sum over k of W[n][k] * x[k][t] ---- */

typedef struct {
    const char *weights;
    const float *x; /* [columns][tokens] */
    float *y;       /* [tokens][rows] */
    long rows, columns, tokens;
    int kind, alone;
} Product;

/* Two columns, first and second, of one tile: their weights as numbers. */
INLINE void q4_1(const char *block, int j, f32x16 *first, f32x16 *second) {
    const f32x16 d = LOAD(f32x16, block), m = LOAD(f32x16, block + 64);
    const u8x16 q = LOAD(u8x16, block + 128 + 16 * j);
    *first = WIDEN(q & 15) * d + m;
    *second = WIDEN(q >> 4) * d + m;
}

INLINE void q8_0(const char *block, int j, f32x16 *first, f32x16 *second) {
    const f32x16 d = LOAD(f32x16, block);
    const u16x16 q = LOAD(u16x16, block + 64 + 32 * j);
    *first = (WIDEN(q & 255) - 128) * d;
    *second = (WIDEN(q >> 8) - 128) * d;
}

INLINE void bf16(const char *block, int j, f32x16 *first, f32x16 *second) {
    *first = (f32x16)(__builtin_convertvector(LOAD(u16x16, block + 32 * j), u32x16) << 16);
    *second = (f32x16)(__builtin_convertvector(LOAD(u16x16, block + 32 * (j + 16)), u32x16) << 16);
}

/* TILES tiles by TOKENS tokens in registers. */
#define PRODUCT(KIND, BLOCK_BYTES, TILES, TOKENS)                                                                     \
    static void KIND##_##TOKENS(const Product *p, long begin, long end) {                                             \
        const long blocks = p->columns / BLOCK, tile_bytes = blocks * BLOCK_BYTES;                                    \
        for (long tile = begin; tile < end; tile += TILES) {                                                          \
            const int tiles = end - tile < TILES ? (int)(end - tile) : TILES;                                         \
            f32x16 sum[TILES][TOKENS];                                                                                \
            memset(sum, 0, sizeof sum);                                                                               \
            if (tiles == TILES)                                                                                       \
                for (long b = 0; b < blocks; ++b)                                                                     \
                    for (int j = 0; j < BLOCK / 2; ++j)                                                               \
                        STEP(KIND, BLOCK_BYTES, TILES, TOKENS)                                                        \
            else                                                                                                      \
                for (long b = 0; b < blocks; ++b)                                                                     \
                    for (int j = 0; j < BLOCK / 2; ++j)                                                               \
                        STEP(KIND, BLOCK_BYTES, tiles, TOKENS)                                                        \
            for (int i = 0; i < tiles; ++i)                                                                           \
                for (int t = 0; t < TOKENS; ++t)                                                                      \
                    memcpy(p->y + t * p->rows + (tile + i) * LANES, &sum[i][t], sizeof(f32x16));                      \
        }                                                                                                             \
    }
#define STEP(KIND, BLOCK_BYTES, TILES, TOKENS)                                                                        \
    _Pragma("GCC unroll 4") for (int i = 0; i < TILES; ++i) {                                                         \
        f32x16 first, second;                                                                                         \
        KIND(p->weights + (tile + i) * tile_bytes + b * BLOCK_BYTES, j, &first, &second);                             \
        const float *x = p->x + (b * BLOCK + j) * TOKENS;                                                             \
        _Pragma("GCC unroll 16") for (int t = 0; t < TOKENS; ++t) sum[i][t] += first * x[t];                          \
        _Pragma("GCC unroll 16") for (int t = 0; t < TOKENS; ++t) sum[i][t] += second * x[16 * TOKENS + t];           \
    }

/* Sum registers: 4, 8 or 16 of the 32 there are with AVX-512 (of 64 bytes), of the 16 of AVX2 (two each). */
#define PRODUCTS(KIND, BLOCK_BYTES)                                                                                   \
    PRODUCT(KIND, BLOCK_BYTES, 4, 1)                                                                                  \
    PRODUCT(KIND, BLOCK_BYTES, 4, 2)                                                                                  \
    PRODUCT(KIND, BLOCK_BYTES, 2, 4)                                                                                  \
    PRODUCT(KIND, BLOCK_BYTES, 2, 8)                                                                                  \
    PRODUCT(KIND, BLOCK_BYTES, 1, 16)
PRODUCTS(q4_1, (2 * 64 + 256))
PRODUCTS(q8_0, (64 + 512))
PRODUCTS(bf16, 1024)

typedef void (*ProductFunction)(const Product *, long, long);
static const ProductFunction PRODUCT_OF[3][5] = {
    {q4_1_1, q4_1_2, q4_1_4, q4_1_8, q4_1_16},
    {q8_0_1, q8_0_2, q8_0_4, q8_0_8, q8_0_16},
    {bf16_1, bf16_2, bf16_4, bf16_8, bf16_16},
};

static void product_share(void *data) {
    const Product *p = data;
    long begin, end;
    share(p->rows / LANES, p->alone, &begin, &end);
    PRODUCT_OF[p->kind][__builtin_ctzl(p->tokens)](p, begin, end);
}

/* kind: 0 Q4_1, 1 Q8_0, 2 BF16. rows a multiple of 16, columns of 32, tokens 1, 2, 4, 8 or 16. */
void kvtier_product(int kind, const void *weights, const float *x, float *y, long rows, long columns, long tokens,
                    int threads) {
    Product p = {weights, x, y, rows, columns, tokens, kind, !parallel || threads < 2};
    run(product_share, &p, threads);
}

/* ---- attention of one query token per sequence over the paged cache of one layer ---- */

typedef struct {
    const float *q;         /* [sequences], each q_stride apart, [heads][dim] */
    const float *cache;     /* keys of (block, token) at block * block_stride + token * token_stride, [kv_heads][dim] */
    const int32_t *tables;  /* [sequences][table_width] */
    const int32_t *lengths; /* [sequences] */
    float *out;             /* [sequences][heads][dim] */
    float *scratch;         /* [threads][group * max_length] */
    long sequences, q_stride, heads, kv_heads, dim, table_width, block_tokens, block_stride, token_stride, v_offset;
    long max_length;
    float scale;
    int alone;
} Attention;

INLINE float sum_of(f32x16 v) {
    float total = 0;
    for (int i = 0; i < LANES; ++i) total += v[i];
    return total;
}

INLINE float dot(const float *a, const float *b, long n) {
    f32x16 sum = {0};
    for (long i = 0; i < n; i += LANES) sum += LOAD(f32x16, a + i) * LOAD(f32x16, b + i);
    return sum_of(sum);
}

static float softmax(float *scores, long n) {
    float top = -INFINITY, total = 0;
    for (long i = 0; i < n; ++i) top = scores[i] > top ? scores[i] : top;
    for (long i = 0; i < n; ++i) scores[i] = expf(scores[i] - top);
    for (long i = 0; i < n; ++i) total += scores[i];
    return total;
}

static void attend_one(const Attention *a, long sequence, long kv_head, float *scores) {
    const long group = a->heads / a->kv_heads, length = a->lengths[sequence], dim = a->dim;
    const float *q = a->q + sequence * a->q_stride + kv_head * group * dim;
    const int32_t *table = a->tables + sequence * a->table_width;
    float *out = a->out + (sequence * a->heads + kv_head * group) * dim;
    for (long at = 0; at < length; ++at) {
        const float *k = a->cache + table[at / a->block_tokens] * a->block_stride +
                         at % a->block_tokens * a->token_stride + kv_head * dim;
        for (long g = 0; g < group; ++g) scores[g * length + at] = dot(q + g * dim, k, dim) * a->scale;
    }
    float total[MAX_GROUP];
    for (long g = 0; g < group; ++g) total[g] = softmax(scores + g * length, length);
    memset(out, 0, sizeof(float) * group * dim);
    for (long at = 0; at < length; ++at) {
        const float *v = a->cache + table[at / a->block_tokens] * a->block_stride +
                         at % a->block_tokens * a->token_stride + kv_head * dim + a->v_offset;
        for (long g = 0; g < group; ++g) {
            const float weight = scores[g * length + at];
            for (long i = 0; i < dim; ++i) out[g * dim + i] += weight * v[i];
        }
    }
    for (long g = 0; g < group; ++g)
        for (long i = 0; i < dim; ++i) out[g * dim + i] /= total[g];
}

static void attention_share(void *data) {
    const Attention *a = data;
    long begin, end;
    share(a->sequences * a->kv_heads, a->alone, &begin, &end);
    float *scores = a->scratch + (a->alone ? 0 : thread_number()) * (a->heads / a->kv_heads) * a->max_length;
    for (long i = begin; i < end; ++i) attend_one(a, i / a->kv_heads, i % a->kv_heads, scores);
}

/* heads / kv_heads at most 16, dim a multiple of 16. */
void kvtier_attend(const float *q, const float *cache, const int32_t *tables, const int32_t *lengths, float *out,
                   float *scratch, const long *sizes, float scale, int threads) {
    Attention a = {q,        cache,    tables,   lengths,  out,      scratch,  sizes[0],  sizes[1], sizes[2], sizes[3],
                   sizes[4], sizes[5], sizes[6], sizes[7], sizes[8], sizes[9], sizes[10], scale,    !parallel || threads < 2};
    run(attention_share, &a, threads);
}
