/* CPU kernels for steps of a few tokens. Memory bandwidth limits such steps. Products use matrices in the quantisation
 * of the checkpoint, and attention reads the paged cache in place. On some processors, the kernels also compute long
 * inputs. native.py loads a prebuilt library or compiles this file on first use. If neither works, torch is used.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

/* LANES: floats of a vector register. TILE: outputs that are stored together in a packed matrix.
 * GRAIN: with fewer elements, waking a second thread takes longer than it saves (2 cores, measured on 2026-11-15).
 * AHEAD: prefetch distance in attention, in tokens. */
#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX2__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
enum { TILE = 16, BLOCK = 32, MAX_TOKENS = 16, GRAIN = 16384, AHEAD = 12 };

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t uints __attribute__((vector_size(4 * LANES)));

#define LOAD(type, from) ({ type v_; memcpy(&v_, (from), sizeof v_); v_; })
#define STORE(to, v) ({ floats s_ = (v); memcpy((to), &s_, sizeof s_); })
/* Prefetch `bytes` bytes, because the data of one tile is too short for the hardware prefetcher. */
#define PREFETCH(from, bytes)                                                                                         \
    for (long line_ = 0; line_ < (bytes); line_ += 64) __builtin_prefetch((from) + line_)
#define INLINE static inline __attribute__((always_inline))

INLINE float sum_of(floats v) {
#if defined(__AVX512F__)
    v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
#elif defined(__AVX2__)
    v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
#endif
    return (v[0] + v[1]) + (v[2] + v[3]);
}

/* exp(x) with an error of at most 2 ulp; x is clamped to [-87, 88] (1e-38 to 2e38). */
INLINE floats exp_of(floats x) {
    ints low = x < -87, high = x > 88;
    const floats zero = {0};
    x = (floats)(((ints)x & ~low & ~high) | ((ints)(zero - 87) & low) | ((ints)(zero + 88) & high));
    const floats n = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* round to the nearest integer */
    const floats r = x - n * 0.693359375f - n * -2.12194440e-4f;
    floats p = r * 1.9875691500e-4f + 1.3981999507e-3f; /* minimax polynomial from Cephes */
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (floats)((__builtin_convertvector(n, ints) + 127) << 23);
}

/* Softmax in place; `padded` is `length` rounded up to whole vectors. */
static void softmax(float *scores, long length, long padded) {
    for (long i = length; i < padded; ++i) scores[i] = scores[0];
    floats tops = LOAD(floats, scores);
    for (long i = LANES; i < padded; i += LANES) {
        const floats v = LOAD(floats, scores + i);
        const ints more = v > tops;
        tops = (floats)(((ints)v & more) | ((ints)tops & ~more));
    }
    float top = tops[0];
    for (int i = 1; i < LANES; ++i) top = tops[i] > top ? tops[i] : top;
    for (long i = length; i < padded; ++i) scores[i] = top;
    floats sum = {0};
    for (long i = 0; i < padded; i += LANES) {
        const floats e = exp_of(LOAD(floats, scores + i) - top);
        STORE(scores + i, e);
        sum += e;
    }
    const float scale = 1.0f / (sum_of(sum) - (float)(padded - length)); /* each padding element added exp(0) = 1 */
    for (long i = 0; i < padded; i += LANES) STORE(scores + i, LOAD(floats, scores + i) * scale);
}

#include "native_threads.h"

#include "native_product.h"

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
    long parts; /* per sequence: kv_heads if there are fewer sequences than threads, otherwise 1 */
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
    for (long i = 0; i < count; i += TILE) __builtin_prefetch(from + i);
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
                floats sum = {0};
                for (long i = 0; i < dim; i += LANES) sum += LOAD(floats, query + i) * LOAD(floats, k + i);
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
                    STORE(to + i, LOAD(floats, to + i) + *weight * LOAD(floats, v + i));
    }
}

static void attend_parts(const void *data, long begin, long end, int thread) {
    const Attention *a = data;
    const long parts = a->parts, heads = a->kv_heads / parts;
    float *scores = a->scratch + thread * a->heads * a->max_length;
    for (long i = begin; i < end; ++i) attend_one(a, i / parts, i % parts * heads, (i % parts + 1) * heads, scores);
}

/* dim is a multiple of 16. sizes: the `long` fields of Attention up to max_length. GRAIN: use threads for any size. */
void kvtier_attend(const float *q, const float *cache, const int32_t *tables, const int32_t *lengths, float *out,
                   float *scratch, const long *sizes, float scale, int threads) {
    const long parts = sizes[0] < threads ? sizes[3] : 1;
    Attention a = {q,        cache,    tables,   lengths,  out,      scratch,  sizes[0],  sizes[1], sizes[2], sizes[3],
                   sizes[4], sizes[5], sizes[6], sizes[7], sizes[8], sizes[9], sizes[10], scale,    parts};
    run(attend_parts, &a, a.sequences * parts, 1, threads, way_of(threads, GRAIN, a.sequences));
}

#include "native_chunk.h"

/* ---- Fused elementwise work between the products: one pass per token ---- */

typedef struct {
    float *x, *residual, *out; /* x [tokens][dim] or null; residual [tokens][dim]; out [tokens][dim] */
    const float *weight;
    long tokens, dim;
    float eps;
} Norm;

static void norm_tokens(const void *data, long begin, long end, int thread) {
    const Norm *p = data;
    (void)thread;
    for (long t = begin; t < end; ++t) {
        float *residual = p->residual + t * p->dim, *out = p->out + t * p->dim;
        floats squares = {0};
        for (long i = 0; i < p->dim; i += LANES) {
            floats v = LOAD(floats, residual + i);
            if (p->x) {
                v += LOAD(floats, p->x + t * p->dim + i);
                STORE(residual + i, v);
            }
            squares += v * v;
        }
        const float scale = 1.0f / __builtin_sqrtf(sum_of(squares) / (float)p->dim + p->eps);
        for (long i = 0; i < p->dim; i += LANES)
            STORE(out + i, LOAD(floats, residual + i) * scale * LOAD(floats, p->weight + i));
    }
}

/* residual += x (unless x is null); out = RMS norm of residual. dim is a multiple of 16. */
void kvtier_norm(float *x, float *residual, const float *weight, float *out, long tokens, long dim, float eps,
                 int threads) {
    Norm p = {x, residual, out, weight, tokens, dim, eps};
    run(norm_tokens, &p, tokens, 1, threads, way_of(threads, tokens * dim, tokens));
}

typedef struct {
    const float *gate_up;
    float *out;
    long tokens, dim;
} Gate;

static void gate_tokens(const void *data, long begin, long end, int thread) {
    const Gate *p = data;
    (void)thread;
    for (long t = begin; t < end; ++t) {
        const float *gate = p->gate_up + 2 * t * p->dim, *up = gate + p->dim;
        for (long i = 0; i < p->dim; i += LANES) {
            const floats g = LOAD(floats, gate + i);
            STORE(p->out + t * p->dim + i, g / (exp_of(-g) + 1.0f) * LOAD(floats, up + i));
        }
    }
}

/* out = silu(gate) * up. dim is a multiple of 16. */
void kvtier_gate(const float *gate_up, float *out, long tokens, long dim, int threads) {
    Gate p = {gate_up, out, tokens, dim};
    run(gate_tokens, &p, tokens, 1, threads, way_of(threads, tokens * dim, tokens));
}

typedef struct {
    float *qkv; /* [tokens][heads + 2 kv_heads][dim] */
    const float *cos, *sin;
    float *cache;
    const int64_t *slots;
    long tokens, heads, kv_heads, dim, block_tokens, block_stride, token_stride, v_offset;
} Rotation;

static void rotate_tokens(const void *data, long begin, long end, int thread) {
    const Rotation *p = data;
    const long half = p->dim / 2, kv_dim = p->kv_heads * p->dim;
    (void)thread;
    for (long t = begin; t < end; ++t) {
        float *head = p->qkv + t * (p->heads + 2 * p->kv_heads) * p->dim, *k = head + p->heads * p->dim;
        for (long h = 0; h < p->heads + p->kv_heads; ++h, head += p->dim)
            for (long i = 0; i < half; i += LANES) {
                const floats c = LOAD(floats, p->cos + t * half + i), s = LOAD(floats, p->sin + t * half + i);
                const floats left = LOAD(floats, head + i), right = LOAD(floats, head + half + i);
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
    const int way = way_of(threads, sizes[0] * (sizes[1] + 2 * sizes[2]) * sizes[3], sizes[0]);
    Rotation p = {qkv,      cos,      sin,      cache,    slots,    sizes[0], sizes[1],
                  sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7]};
    run(rotate_tokens, &p, p.tokens, 1, threads, way);
}

#include "native_draw.h"
