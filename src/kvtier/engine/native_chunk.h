/* Attention of several query tokens of one sequence, included by native.c. Reads the paged cache in place.
 *
 *   task    the queries of up to TASK_ROWS / group tokens for one KV head; row = (token, query head of the KV head)
 *   block   KEYS keys, transposed to vectors of LANES keys, so that a query element is broadcast
 *
 * For each block: scores = queries x keys, then weights = exp(score - highest score so far), then sums += weights x
 * values. Earlier sums are multiplied by exp(old highest - new highest). The blocks begin at key 0, so the result of a
 * token does not depend on how a prompt is divided into chunks. A query sees the keys up to its own position.
 */

/* QUERIES x WIDTH vectors of sums stay in registers: 24 of 32 with AVX-512, 12 of 16 otherwise. A task transposes each
 * block again, which takes 7 % of its time with 96 rows. */
enum { KEYS = 64, TASK_ROWS = 96, QUERIES = 6, WIDTH = LANES == 16 ? 4 : 2 };

typedef struct {
    const float *q;       /* [count] with stride q_stride, each [heads][dim] */
    const float *cache;   /* see Attention */
    const int32_t *table; /* blocks of the sequence */
    float *out;           /* [count][heads][dim] */
    float *scratch;       /* [threads][kvtier_chunk_scratch(dim, heads / kv_heads)] */
    long count, context, q_stride, heads, kv_heads, dim, block_tokens, block_stride, token_stride, v_offset;
    float scale;
    long tokens, tiles; /* tokens per task; tasks per KV head */
} Chunk;

/* Maximum number of rows of a task: one token may have more query heads per KV head than TASK_ROWS. */
INLINE long rows_of_task(long group) { return group > TASK_ROWS ? group : TASK_ROWS; }

/* Number of floats that a thread needs. */
long kvtier_chunk_scratch(long dim, long group) {
    return KEYS * dim + rows_of_task(group) * (2 * dim + KEYS + 2);
}

typedef struct {
    float *keys;                      /* [KEYS / LANES][dim][LANES] */
    float *q, *sums;                  /* [rows][dim] */
    float *weights, *highest, *total; /* [rows][KEYS], [rows], [rows] */
    const float *values[KEYS];
    long rows, dim;
} Task;

/* Compute the scores of `rows` queries and WIDTH vectors of keys. */
INLINE void score(const Task *t, long row, int vector, const int rows) {
    floats sum[QUERIES][WIDTH] = {{{0}}};
    const float *keys = t->keys + vector * t->dim * LANES, *q = t->q + row * t->dim;
    for (long i = 0; i < t->dim; ++i)
        _Pragma("GCC unroll 6") for (int r = 0; r < rows; ++r)
            _Pragma("GCC unroll 4") for (int v = 0; v < WIDTH; ++v)
                sum[r][v] += LOAD(floats, keys + (v * t->dim + i) * LANES) * q[r * t->dim + i];
    _Pragma("GCC unroll 6") for (int r = 0; r < rows; ++r)
        _Pragma("GCC unroll 4") for (int v = 0; v < WIDTH; ++v)
            STORE(t->weights + (row + r) * KEYS + (vector + v) * LANES, sum[r][v]);
}

/* Add the weighted values of `count` keys to the sums of `rows` queries: `width` vectors, from element `first` on. */
INLINE void add_values(const Task *t, long row, long first, int count, const int rows, const int width) {
    floats sum[QUERIES][WIDTH];
    float *sums = t->sums + row * t->dim + first;
    _Pragma("GCC unroll 6") for (int r = 0; r < rows; ++r)
        _Pragma("GCC unroll 4") for (int v = 0; v < width; ++v) sum[r][v] = LOAD(floats, sums + r * t->dim + v * LANES);
    for (int j = 0; j < count; ++j)
        _Pragma("GCC unroll 6") for (int r = 0; r < rows; ++r)
            _Pragma("GCC unroll 4") for (int v = 0; v < width; ++v)
                sum[r][v] += LOAD(floats, t->values[j] + first + v * LANES) * t->weights[(row + r) * KEYS + j];
    _Pragma("GCC unroll 6") for (int r = 0; r < rows; ++r)
        _Pragma("GCC unroll 4") for (int v = 0; v < width; ++v) STORE(sums + r * t->dim + v * LANES, sum[r][v]);
}

INLINE void add_all_values(const Task *t, long row, int count, const int rows) {
    long first = 0;
    for (; first + WIDTH * LANES <= t->dim; first += WIDTH * LANES) add_values(t, row, first, count, rows, WIDTH);
    for (; first < t->dim; first += LANES) add_values(t, row, first, count, rows, 1);
}

/* Replace the scores of a row by weights. Keys from `visible` on get the weight 0. */
static void to_weights(const Task *t, long row, int visible) {
    float *scores = t->weights + row * KEYS;
    if (visible <= 0) {
        memset(scores, 0, KEYS * sizeof(float));
        return;
    }
    for (int i = visible; i < KEYS; ++i) scores[i] = scores[0];
    float highest = t->highest[row];
    floats tops = LOAD(floats, scores);
    for (int i = LANES; i < KEYS; i += LANES) {
        const floats v = LOAD(floats, scores + i);
        const ints more = v > tops;
        tops = (floats)(((ints)v & more) | ((ints)tops & ~more));
    }
    for (int i = 0; i < LANES; ++i) highest = tops[i] > highest ? tops[i] : highest;
    const float before = exp_of((floats){t->highest[row] - highest})[0];
    floats sum = {0};
    for (int i = 0; i < KEYS; i += LANES) STORE(scores + i, exp_of(LOAD(floats, scores + i) - highest));
    for (int i = visible; i < KEYS; ++i) scores[i] = 0;
    for (int i = 0; i < KEYS; i += LANES) sum += LOAD(floats, scores + i);
    t->total[row] = t->total[row] * before + sum_of(sum);
    if (highest > t->highest[row])
        for (long i = 0; i < t->dim; i += LANES)
            STORE(t->sums + row * t->dim + i, LOAD(floats, t->sums + row * t->dim + i) * before);
    t->highest[row] = highest;
}

/* Transpose keys [first, first + count) of a KV head, and find their values. Missing keys are zeros. */
static void load_keys(const Chunk *c, Task *t, long head, long first, int count) {
    for (int j = 0; j < KEYS; ++j) {
        float *to = t->keys + j / LANES * c->dim * LANES + j % LANES;
        if (j >= count) {
            for (long i = 0; i < c->dim; ++i) to[i * LANES] = 0;
            continue;
        }
        const long at = first + j;
        const float *key = c->cache + c->table[at / c->block_tokens] * c->block_stride +
                           at % c->block_tokens * c->token_stride + head * c->dim;
        for (long i = 0; i < c->dim; ++i) to[i * LANES] = key[i];
        t->values[j] = key + c->v_offset;
    }
}

/* Compute the attention of tokens [begin, end) for one KV head. */
static void attend_tokens(const Chunk *c, float *scratch, long head, long begin, long end) {
    const long group = c->heads / c->kv_heads, dim = c->dim, past = c->context - c->count, most = rows_of_task(group);
    Task t = {.keys = scratch, .rows = (end - begin) * group, .dim = dim};
    t.q = t.keys + KEYS * dim, t.sums = t.q + most * dim, t.weights = t.sums + most * dim;
    t.highest = t.weights + most * KEYS, t.total = t.highest + most;
    memset(t.sums, 0, t.rows * dim * sizeof(float));
    for (long row = 0; row < t.rows; ++row) {
        const float *q = c->q + (begin + row / group) * c->q_stride + (head * group + row % group) * dim;
        for (long i = 0; i < dim; i += LANES) STORE(t.q + row * dim + i, LOAD(floats, q + i) * c->scale);
        t.highest[row] = -3e38f, t.total[row] = 0;
    }
    for (long first = 0; first < past + end; first += KEYS) {
        const int count = past + end - first < KEYS ? (int)(past + end - first) : KEYS;
        load_keys(c, &t, head, first, count);
        for (int vector = 0; vector < KEYS / LANES; vector += WIDTH) {
            long row = 0;
            for (; row + QUERIES <= t.rows; row += QUERIES) score(&t, row, vector, QUERIES);
            for (; row < t.rows; ++row) score(&t, row, vector, 1);
        }
        for (long row = 0; row < t.rows; ++row) {
            const long visible = past + begin + row / group + 1 - first;
            to_weights(&t, row, visible < count ? (int)visible : count);
        }
        long row = 0;
        for (; row + QUERIES <= t.rows; row += QUERIES) add_all_values(&t, row, count, QUERIES);
        for (; row < t.rows; ++row) add_all_values(&t, row, count, 1);
    }
    for (long row = 0; row < t.rows; ++row) {
        float *out = c->out + ((begin + row / group) * c->heads + head * group + row % group) * dim;
        for (long i = 0; i < dim; i += LANES) STORE(out + i, LOAD(floats, t.sums + row * dim + i) * (1 / t.total[row]));
    }
}

/* Later tiles have more keys. Take tiles from both ends in turn, so that equal shares of the tasks take equal time. */
static void attend_tasks(const void *data, long begin, long end, int thread) {
    const Chunk *c = data;
    float *scratch = c->scratch + thread * kvtier_chunk_scratch(c->dim, c->heads / c->kv_heads);
    for (long i = begin; i < end; ++i) {
        const long at = i / c->kv_heads, tile = at % 2 ? c->tiles - 1 - at / 2 : at / 2;
        const long first = tile * c->tokens, last = first + c->tokens < c->count ? first + c->tokens : c->count;
        attend_tokens(c, scratch, i % c->kv_heads, first, last);
    }
}

/* dim is a multiple of 16. sizes: the `long` fields of Chunk up to v_offset. */
void kvtier_attend_chunk(const float *q, const float *cache, const int32_t *table, float *out, float *scratch,
                         const long *sizes, float scale, int threads) {
    Chunk c = {q,        cache,    table,    out,      scratch,  sizes[0], sizes[1], sizes[2], sizes[3],
               sizes[4], sizes[5], sizes[6], sizes[7], sizes[8], sizes[9], scale,    0,        0};
    const long group = c.heads / c.kv_heads;
    c.tokens = rows_of_task(group) / group;
    c.tiles = (c.count + c.tokens - 1) / c.tokens;
    run(attend_tasks, &c, c.tiles * c.kv_heads, 1, threads, way_of(threads, GRAIN, c.count));
}
