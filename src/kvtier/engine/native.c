/* CPU kernels for steps of a few tokens, which are limited by memory bandwidth: products with matrices in the
 * quantisation of the checkpoint, and attention that reads the paged cache in place. Compiled on first use (native.py).
 * Without a compiler, torch does the same work.
 *
 * Weights are widened to float32 in registers. They equal the weights of the dequantised matrix, because d * q is exact
 * (11 bits times 4 or 8 bits) and adding m rounds once, as in dequantisation. Each output is a float32 sum in column
 * order, so it does not depend on the number of tokens. On CPUs with AMX, native_amx.h computes 5 or more tokens.
 *
 * A packed matrix is a sequence of tiles of 16 outputs. Within a tile, the 16 weights of a column are contiguous, so a
 * vector holds 16 outputs and the input is broadcast. Data of each tile and 32 columns:
 *   Q4_1: float d[16], m[16]; uint8 q[16][16], low nibble column j, high nibble column j + 16
 *   Q8_0: float d[16]; int8 q[32][16]
 *   BF16: uint16 w[32][16]
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

/* GRAIN: with fewer elements, waking a second thread costs more time than it saves (2 cores, 2026-11-15).
 * AHEAD: prefetch distance in attention, in tokens. */
enum { LANES = 16, BLOCK = 32, GRAIN = 16384, AHEAD = 12 };
enum { Q4_1, Q8_0, BF16 };

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

#define LOAD(type, from) ({ type v_; memcpy(&v_, (from), sizeof v_); v_; })
#define STORE(to, v) ({ f32x16 s_ = (v); memcpy((to), &s_, sizeof s_); })
#define INLINE static inline __attribute__((always_inline))

INLINE float sum_of(f32x16 v) {
    v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    return (v[0] + v[1]) + (v[2] + v[3]);
}

/* exp(x) with an error of at most 2 ulp; x is clamped to [-87, 88] (1e-38 to 2e38). */
INLINE f32x16 exp_of(f32x16 x) {
    i32x16 low = x < -87, high = x > 88;
    x = (f32x16)(((i32x16)x & ~low & ~high) | ((i32x16)(x * 0 - 87) & low) | ((i32x16)(x * 0 + 88) & high));
    const f32x16 n = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* round to the nearest integer */
    const f32x16 r = x - n * 0.693359375f - n * -2.12194440e-4f;
    f32x16 p = r * 1.9875691500e-4f + 1.3981999507e-3f; /* minimax polynomial from Cephes */
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (f32x16)((__builtin_convertvector(n, i32x16) + 127) << 23);
}

/* Softmax in place; `padded` is `length` rounded up to whole vectors. */
static void softmax(float *scores, long length, long padded) {
    for (long i = length; i < padded; ++i) scores[i] = scores[0];
    f32x16 tops = LOAD(f32x16, scores);
    for (long i = LANES; i < padded; i += LANES) {
        const f32x16 v = LOAD(f32x16, scores + i);
        const i32x16 more = v > tops;
        tops = (f32x16)(((i32x16)v & more) | ((i32x16)tops & ~more));
    }
    float top = tops[0];
    for (int i = 1; i < LANES; ++i) top = tops[i] > top ? tops[i] : top;
    for (long i = length; i < padded; ++i) scores[i] = top;
    f32x16 sum = {0};
    for (long i = 0; i < padded; i += LANES) {
        const f32x16 e = exp_of(LOAD(f32x16, scores + i) - top);
        STORE(scores + i, e);
        sum += e;
    }
    const float scale = 1.0f / (sum_of(sum) - (float)(padded - length)); /* each padding element added exp(0) = 1 */
    for (long i = 0; i < padded; i += LANES) STORE(scores + i, LOAD(f32x16, scores + i) * scale);
}

/* ---- Threads: GOMP_parallel of the OpenMP runtime that torch has loaded, so that torch's threads are reused ---- */

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);
static Parallel parallel;
static int (*thread_number)(void), (*team_size)(void);

void kvtier_threads(void *parallel_, void *thread_number_, void *team_size_) {
    parallel = (Parallel)parallel_;
    thread_number = (int (*)(void))thread_number_;
    team_size = (int (*)(void))team_size_;
}

static int is_alone(int threads, long numbers) { return !parallel || threads < 2 || numbers < GRAIN; }

static void run(void (*work)(void *), void *data, int alone, int threads) {
    if (alone) work(data);
    else parallel(work, data, (unsigned)threads, 0);
}

/* Set [*begin, *end) to this thread's share of `count` work items. */
static void share(long count, int alone, long *begin, long *end) {
    long n = alone ? 1 : team_size(), i = alone ? 0 : thread_number();
    *begin = count * i / n, *end = count * (i + 1) / n;
}

/* ---- Products: y[t][n] = sum over k of W[n][k] * x[k][t] ---- */

typedef struct {
    const char *weights;
    const float *x; /* [columns][tokens]; with AMX: bf16 parts (native_amx.h) */
    float *y;       /* [tokens][rows] */
    long rows, columns, tokens;
    int kind, alone;
} Product;

/* Load 16 bytes as integers. Uses intrinsics, because gcc 12 would widen loaded bytes one at a time. */
INLINE i32x16 bytes_at(const char *from) {
#if defined(__AVX512F__)
    return (i32x16)_mm512_cvtepi8_epi32(LOAD(__m128i, from));
#elif defined(__AVX2__)
    const __m256i low = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)from));
    const __m256i high = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)(from + 8)));
    i32x16 all;
    memcpy(&all, &low, sizeof low), memcpy((char *)&all + sizeof low, &high, sizeof high);
    return all;
#else
    return __builtin_convertvector(LOAD(i8x16, from), i32x16);
#endif
}

/* Convert the low four bits of each element to float. AVX-512 has a table lookup in a register for this. */
INLINE f32x16 nibbles_of(i32x16 q) {
#ifdef __AVX512F__
    const f32x16 table = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (f32x16)_mm512_permutexvar_ps((__m512i)q, (__m512)table);
#else
    return __builtin_convertvector(q & 15, f32x16);
#endif
}

/* Dequantise columns j and j + 16 of a block. Each column has 16 weights. */
INLINE void q4_1(const char *block, int j, f32x16 *first, f32x16 *second) {
    const f32x16 d = LOAD(f32x16, block), m = LOAD(f32x16, block + 64);
    const i32x16 q = bytes_at(block + 128 + 16 * j);
    *first = nibbles_of(q) * d + m;
    *second = nibbles_of(q >> 4) * d + m;
}

INLINE void q8_0(const char *block, int j, f32x16 *first, f32x16 *second) {
    const f32x16 d = LOAD(f32x16, block);
    *first = __builtin_convertvector(bytes_at(block + 64 + 16 * j), f32x16) * d;
    *second = __builtin_convertvector(bytes_at(block + 64 + 16 * (j + 16)), f32x16) * d;
}

INLINE void bf16(const char *block, int j, f32x16 *first, f32x16 *second) {
    *first = (f32x16)(__builtin_convertvector(LOAD(u16x16, block + 32 * j), u32x16) << 16);
    *second = (f32x16)(__builtin_convertvector(LOAD(u16x16, block + 32 * (j + 16)), u32x16) << 16);
}

/* Compute tiles [begin, end). The sums of TILES tiles and TOKENS tokens stay in registers. */
#define PRODUCT(KIND, BYTES, TILES, TOKENS)                                                                           \
    static void KIND##_##TOKENS(const Product *p, long begin, long end) {                                             \
        const long blocks = p->columns / BLOCK, tile_bytes = blocks * BYTES;                                          \
        for (long tile = begin; tile < end; tile += TILES) {                                                          \
            const int tiles = end - tile < TILES ? (int)(end - tile) : TILES;                                         \
            f32x16 sum[TILES][TOKENS];                                                                                \
            memset(sum, 0, sizeof sum);                                                                               \
            if (tiles == TILES)                                                                                       \
                for (long b = 0; b < blocks; ++b)                                                                     \
                    for (int j = 0; j < BLOCK / 2; ++j)                                                               \
                        STEP(KIND, BYTES, TILES, TOKENS)                                                              \
            else                                                                                                      \
                for (long b = 0; b < blocks; ++b)                                                                     \
                    for (int j = 0; j < BLOCK / 2; ++j)                                                               \
                        STEP(KIND, BYTES, tiles, TOKENS)                                                              \
            for (int i = 0; i < tiles; ++i)                                                                           \
                for (int t = 0; t < TOKENS; ++t)                                                                      \
                    memcpy(p->y + t * p->rows + (tile + i) * LANES, &sum[i][t], sizeof(f32x16));                      \
        }                                                                                                             \
    }
#define STEP(KIND, BYTES, TILES, TOKENS)                                                                              \
    _Pragma("GCC unroll 4") for (int i = 0; i < TILES; ++i) {                                                         \
        f32x16 first, second;                                                                                         \
        KIND(p->weights + (tile + i) * tile_bytes + b * BYTES, j, &first, &second);                                   \
        const float *x = p->x + (b * BLOCK + j) * TOKENS;                                                             \
        _Pragma("GCC unroll 16") for (int t = 0; t < TOKENS; ++t) sum[i][t] += first * x[t];                          \
        _Pragma("GCC unroll 16") for (int t = 0; t < TOKENS; ++t) sum[i][t] += second * x[16 * TOKENS + t];           \
    }

/* The sums need 4, 8 or 16 vectors of 64 bytes. AVX-512 has 32 registers of 64 bytes, AVX2 has 16 of 32 bytes. */
#define PRODUCTS(KIND, BYTES)                                                                                         \
    PRODUCT(KIND, BYTES, 4, 1)                                                                                        \
    PRODUCT(KIND, BYTES, 4, 2)                                                                                        \
    PRODUCT(KIND, BYTES, 2, 4)                                                                                        \
    PRODUCT(KIND, BYTES, 2, 8)                                                                                        \
    PRODUCT(KIND, BYTES, 1, 16)
static const int BLOCK_BYTES[] = {[Q4_1] = 2 * 64 + 256, [Q8_0] = 64 + 512, [BF16] = 1024};
PRODUCTS(q4_1, BLOCK_BYTES[Q4_1])
PRODUCTS(q8_0, BLOCK_BYTES[Q8_0])
PRODUCTS(bf16, BLOCK_BYTES[BF16])

typedef void (*ProductFunction)(const Product *, long, long);
static const ProductFunction PRODUCT_OF[3][5] = {
    {q4_1_1, q4_1_2, q4_1_4, q4_1_8, q4_1_16},
    {q8_0_1, q8_0_2, q8_0_4, q8_0_8, q8_0_16},
    {bf16_1, bf16_2, bf16_4, bf16_8, bf16_16},
};

/* Transpose x [count][columns] to [columns][tokens]; tokens beyond `count` are zeros. */
static void transpose(const float *x, float *out, long count, long columns, long tokens) {
    for (long k = 0; k < columns; ++k)
        for (long t = 0; t < tokens; ++t) out[k * tokens + t] = t < count ? x[t * columns + k] : 0;
}

static void product_share(void *data) {
    const Product *p = data;
    long begin, end;
    share(p->rows / LANES, p->alone, &begin, &end);
    PRODUCT_OF[p->kind][__builtin_ctzl(p->tokens)](p, begin, end);
}

#include "native_amx.h"

/* x [count][columns], scratch [2][tokens][columns], y [tokens][rows]. rows is a multiple of 16, columns of 32; tokens
 * is count rounded up to a power of 2, at most 16. */
void kvtier_product(int kind, const void *weights, const float *x, float *scratch, float *y, long rows, long columns,
                    long count, long tokens, int threads) {
    Product p = {weights, x, y, rows, columns, tokens, kind, is_alone(threads, rows * columns)};
    if (amx_product(&p, x, scratch, count, threads)) return;
    if (tokens > 1) transpose(x, scratch, count, columns, tokens), p.x = scratch;
    run(product_share, &p, p.alone, threads);
}

/* ---- Attention: one query token per sequence, paged cache of one layer ---- */

typedef struct {
    const float *q;         /* [sequences] with stride q_stride, each [heads][dim] */
    const float *cache;     /* keys of (block, token) at block * block_stride + token * token_stride, [kv_heads][dim] */
    const int32_t *tables;  /* [sequences][table_width] */
    const int32_t *lengths; /* [sequences] */
    float *out;             /* [sequences][heads][dim] */
    float *scratch;         /* [threads][heads][max_length] */
    long sequences, q_stride, heads, kv_heads, dim, table_width, block_tokens, block_stride, token_stride, v_offset;
    long max_length;
    float scale;
    int alone;
} Attention;

/* Return the keys of a token. The keys of all heads are contiguous, so they are read together. */
INLINE const float *keys_of(const Attention *a, long sequence, long at) {
    return a->cache + a->tables[sequence * a->table_width + at / a->block_tokens] * a->block_stride +
           at % a->block_tokens * a->token_stride;
}

/* Prefetch the keys or values of a later token, because the hardware prefetcher stops at a page boundary. */
INLINE void prefetch(const Attention *a, long sequence, long at, long offset, long count) {
    if (at >= a->lengths[sequence]) return;
    const float *from = keys_of(a, sequence, at) + offset;
    for (long i = 0; i < count; i += LANES) __builtin_prefetch(from + i);
}

/* Compute attention for the query heads that belong to kv heads [first, last) of a sequence. */
static void attend_one(const Attention *a, long sequence, long first, long last, float *scores) {
    const long group = a->heads / a->kv_heads, length = a->lengths[sequence], dim = a->dim;
    const long padded = (length + LANES - 1) / LANES * LANES, num_heads = (last - first) * group;
    const float *q = a->q + sequence * a->q_stride + first * group * dim;
    float *out = a->out + (sequence * a->heads + first * group) * dim;
    for (long at = 0; at < length; ++at) {
        prefetch(a, sequence, at + AHEAD, first * dim, (last - first) * dim);
        const float *k = keys_of(a, sequence, at) + first * dim, *query = q;
        float *score = scores + at;
        for (long kv = first; kv < last; ++kv, k += dim)
            for (long g = 0; g < group; ++g, query += dim, score += padded) {
                f32x16 sum = {0};
                for (long i = 0; i < dim; i += LANES) sum += LOAD(f32x16, query + i) * LOAD(f32x16, k + i);
                *score = sum_of(sum) * a->scale;
            }
    }
    for (long h = 0; h < num_heads; ++h) softmax(scores + h * padded, length, padded);
    memset(out, 0, sizeof(float) * num_heads * dim);
    for (long at = 0; at < length; ++at) {
        prefetch(a, sequence, at + AHEAD, first * dim + a->v_offset, (last - first) * dim);
        const float *v = keys_of(a, sequence, at) + a->v_offset + first * dim, *weight = scores + at;
        float *to = out;
        for (long kv = first; kv < last; ++kv, v += dim)
            for (long g = 0; g < group; ++g, to += dim, weight += padded)
                for (long i = 0; i < dim; i += LANES)
                    STORE(to + i, LOAD(f32x16, to + i) + *weight * LOAD(f32x16, v + i));
    }
}

/* Split the work by sequence, or by sequence and kv head if there are fewer sequences than threads. */
static void attention_share(void *data) {
    const Attention *a = data;
    const long threads = a->alone ? 1 : team_size(), parts = a->sequences < threads ? a->kv_heads : 1;
    const long heads = a->kv_heads / parts;
    long begin, end;
    share(a->sequences * parts, a->alone, &begin, &end);
    float *scores = a->scratch + (a->alone ? 0 : thread_number()) * a->heads * a->max_length;
    for (long i = begin; i < end; ++i) attend_one(a, i / parts, i % parts * heads, (i % parts + 1) * heads, scores);
}

/* dim is a multiple of 16. sizes: the `long` fields of Attention, in order. */
void kvtier_attend(const float *q, const float *cache, const int32_t *tables, const int32_t *lengths, float *out,
                   float *scratch, const long *sizes, float scale, int threads) {
    const int alone = is_alone(threads, GRAIN);
    Attention a = {q,        cache,    tables,   lengths,  out,      scratch,  sizes[0],  sizes[1], sizes[2], sizes[3],
                   sizes[4], sizes[5], sizes[6], sizes[7], sizes[8], sizes[9], sizes[10], scale,    alone};
    run(attention_share, &a, a.alone, threads);
}

/* ---- Fused elementwise work between the products: one pass per token ---- */

typedef struct {
    float *x, *residual, *out; /* x [tokens][dim] or null; residual [tokens][dim]; out [tokens][dim] */
    const float *weight;
    long tokens, dim;
    float eps;
    int alone;
} Norm;

static void norm_share(void *data) {
    const Norm *p = data;
    long begin, end;
    share(p->tokens, p->alone, &begin, &end);
    for (long t = begin; t < end; ++t) {
        float *residual = p->residual + t * p->dim, *out = p->out + t * p->dim;
        f32x16 squares = {0};
        for (long i = 0; i < p->dim; i += LANES) {
            f32x16 v = LOAD(f32x16, residual + i);
            if (p->x) {
                v += LOAD(f32x16, p->x + t * p->dim + i);
                STORE(residual + i, v);
            }
            squares += v * v;
        }
        const float scale = 1.0f / __builtin_sqrtf(sum_of(squares) / (float)p->dim + p->eps);
        for (long i = 0; i < p->dim; i += LANES)
            STORE(out + i, LOAD(f32x16, residual + i) * scale * LOAD(f32x16, p->weight + i));
    }
}

/* residual += x (unless x is null); out = RMS norm of residual. dim is a multiple of 16. */
void kvtier_norm(float *x, float *residual, const float *weight, float *out, long tokens, long dim, float eps,
                 int threads) {
    Norm p = {x, residual, out, weight, tokens, dim, eps, is_alone(threads, tokens * dim)};
    run(norm_share, &p, p.alone, threads);
}

typedef struct {
    const float *gate_up;
    float *out;
    long tokens, dim;
    int alone;
} Gate;

static void gate_share(void *data) {
    const Gate *p = data;
    long begin, end;
    share(p->tokens, p->alone, &begin, &end);
    for (long t = begin; t < end; ++t) {
        const float *gate = p->gate_up + 2 * t * p->dim, *up = gate + p->dim;
        for (long i = 0; i < p->dim; i += LANES) {
            const f32x16 g = LOAD(f32x16, gate + i);
            STORE(p->out + t * p->dim + i, g / (exp_of(-g) + 1.0f) * LOAD(f32x16, up + i));
        }
    }
}

/* out = silu(gate) * up. dim is a multiple of 16. */
void kvtier_gate(const float *gate_up, float *out, long tokens, long dim, int threads) {
    Gate p = {gate_up, out, tokens, dim, is_alone(threads, tokens * dim)};
    run(gate_share, &p, p.alone, threads);
}

typedef struct {
    float *qkv; /* [tokens][heads + 2 kv_heads][dim] */
    const float *cos, *sin;
    float *cache;
    const int64_t *slots;
    long tokens, heads, kv_heads, dim, block_tokens, block_stride, token_stride, v_offset;
    int alone;
} Rotation;

static void rotation_share(void *data) {
    const Rotation *p = data;
    const long half = p->dim / 2, kv_dim = p->kv_heads * p->dim;
    long begin, end;
    share(p->tokens, p->alone, &begin, &end);
    for (long t = begin; t < end; ++t) {
        float *head = p->qkv + t * (p->heads + 2 * p->kv_heads) * p->dim, *k = head + p->heads * p->dim;
        for (long h = 0; h < p->heads + p->kv_heads; ++h, head += p->dim)
            for (long i = 0; i < half; i += LANES) {
                const f32x16 c = LOAD(f32x16, p->cos + t * half + i), s = LOAD(f32x16, p->sin + t * half + i);
                const f32x16 left = LOAD(f32x16, head + i), right = LOAD(f32x16, head + half + i);
                STORE(head + i, left * c - right * s);
                STORE(head + half + i, right * c + left * s);
            }
        float *to = p->cache + p->slots[t] / p->block_tokens * p->block_stride +
                    p->slots[t] % p->block_tokens * p->token_stride;
        memcpy(to, k, sizeof(float) * kv_dim);
        memcpy(to + p->v_offset, k + kv_dim, sizeof(float) * kv_dim);
    }
}

/* Apply RoPE to queries and keys in place; write keys and values to the cache. dim is a multiple of 32. */
void kvtier_rotate(float *qkv, const float *cos, const float *sin, float *cache, const int64_t *slots,
                   const long *sizes, int threads) {
    const int alone = is_alone(threads, sizes[0] * (sizes[1] + 2 * sizes[2]) * sizes[3]);
    Rotation p = {qkv,      cos,      sin,      cache,    slots,    sizes[0], sizes[1],
                  sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], alone};
    run(rotation_share, &p, p.alone, threads);
}

#include "native_draw.h"
