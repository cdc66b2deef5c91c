/* Sampling with temperature, top-p and min-p, included by native.c. Draws one token per row of logits, as sampling.py
 * does with torch. Weights are float32, and their sums are double. The result of a row depends only on that row.
 */
typedef double doubles __attribute__((vector_size(8 * LANES)));
enum { CHUNK = 256 };

typedef struct {
    float temperature, min_p;
    double top_p, uniform; /* if top_p is 1, the draw is from all tokens, in vocabulary order */
} RowParams;

typedef struct {
    float *logits;   /* [rows][vocab]; overwritten with the weights */
    uint64_t *heaps; /* [rows][vocab]; high half: bits of the weight, low half: complement of the token */
    const RowParams *params;
    int64_t *chosen;
    long rows, vocab;
} Draw;

INLINE double sum_of_doubles(doubles v) {
    double sum = 0;
    for (int i = 0; i < LANES; ++i) sum += v[i];
    return sum;
}

INLINE float weight_of(uint64_t entry) {
    const uint32_t bits = (uint32_t)(entry >> 32);
    float weight;
    memcpy(&weight, &bits, sizeof weight);
    return weight;
}

/* Replace x by exp((x - max) / temperature), or by 0 if the result is below exp(-87). Return the sum, or -1 if there is
 * no distribution because x contains NaN or +inf, or only -inf. */
static double weigh(float *x, long vocab, float temperature) {
    floats tops = LOAD(floats, x);
    ints nans = {0};
    for (long i = 0; i < vocab; i += LANES) {
        const floats v = LOAD(floats, x + i);
        const ints more = v > tops;
        nans |= v != v;
        tops = (floats)(((ints)v & more) | ((ints)tops & ~more));
    }
    float top = tops[0];
    for (int i = 1; i < LANES; ++i) top = tops[i] > top ? tops[i] : top;
    int any_nan = 0;
    for (int i = 0; i < LANES; ++i) any_nan |= nans[i];
    if (any_nan || !__builtin_isfinite(top)) return -1;
    doubles sums = {0};
    for (long i = 0; i < vocab; i += LANES) {
        const floats scaled = (LOAD(floats, x + i) - top) / temperature;
        const floats weight = (floats)((ints)exp_of(scaled) & (scaled > -87));
        STORE(x + i, weight);
        sums += __builtin_convertvector(weight, doubles);
    }
    return sum_of_doubles(sums);
}

/* Draw from all tokens in vocabulary order. Find the chunk that contains the target, then the token in the chunk. */
static int64_t draw_from_all(const float *weights, long vocab, const RowParams *params, double total) {
    if (params->min_p > 0) {
        total = 0;
        for (long i = 0; i < vocab; ++i) total += weights[i] >= params->min_p ? weights[i] : 0;
    }
    const double target = params->uniform * total;
    double before = 0;
    int64_t last = 0;
    for (long chunk = 0; chunk < vocab; chunk += CHUNK) {
        const long end = chunk + CHUNK < vocab ? chunk + CHUNK : vocab;
        doubles sums = {0};
        for (long i = chunk; i < end; i += LANES) {
            const floats v = LOAD(floats, weights + i);
            sums += __builtin_convertvector((floats)((ints)v & (v >= params->min_p)), doubles);
        }
        const double after = before + sum_of_doubles(sums);
        for (long i = chunk; after > target && i < end; ++i) {
            if (weights[i] < params->min_p || weights[i] == 0) continue;
            last = i;
            if ((before += weights[i]) > target) return i;
        }
        before = after;
    }
    return last; /* the target is past the last token because of rounding */
}

static void sift(uint64_t *heap, long length, long at) {
    for (long child; (child = 2 * at + 1) < length; at = child) {
        if (child + 1 < length && heap[child + 1] > heap[child]) ++child;
        if (heap[at] >= heap[child]) return;
        const uint64_t swapped = heap[at];
        heap[at] = heap[child], heap[child] = swapped;
    }
}

/* Draw from the heaviest tokens whose weights sum to top_p * total. Tokens lighter than (1 - top_p) * total / vocab are
 * never among the heaviest and are skipped; the factor 1 - 1e-6 is a margin for rounding.
 *
 *   heap  [ remaining ......... | taken, the heaviest last ]
 *         0                   left                        count
 */
static int64_t draw_from_top(const float *weights, long vocab, const RowParams *params, double total, uint64_t *heap) {
    const double mass = params->top_p * total;
    const float cut = (float)((1 - params->top_p) * total / (double)vocab * (1 - 1e-6));
    long count = 0;
    for (long i = 0; i < vocab; i += LANES) {
        const ints heavy = LOAD(floats, weights + i) >= cut;
        int any = 0;
        for (int j = 0; j < LANES; ++j) any |= heavy[j];
        for (int j = 0; any && j < LANES; ++j)
            if (heavy[j]) {
                uint32_t bits;
                memcpy(&bits, weights + i + j, sizeof bits);
                heap[count++] = (uint64_t)bits << 32 | ~(uint32_t)(i + j);
            }
    }
    for (long at = count / 2; at-- > 0;) sift(heap, count, at);
    long left = count;
    double reached = 0, kept = 0;
    while (left > 0 && reached < mass) {
        const uint64_t heaviest = heap[0];
        const float weight = weight_of(heaviest);
        reached += weight;
        kept += weight >= params->min_p ? weight : 0;
        heap[0] = heap[--left];
        heap[left] = heaviest;
        sift(heap, left, 0);
    }
    const double target = params->uniform * kept;
    double before = 0;
    long at = count;
    while (--at > left && (before += weight_of(heap[at]) >= params->min_p ? weight_of(heap[at]) : 0) <= target) {
    }
    return (int64_t)~(uint32_t)heap[at];
}

static void draw_rows(const void *data, long begin, long end, int thread) {
    const Draw *p = data;
    (void)thread;
    for (long row = begin; row < end; ++row) {
        float *weights = p->logits + row * p->vocab;
        const RowParams *params = p->params + row;
        const double total = weigh(weights, p->vocab, params->temperature);
        uint64_t *heap = p->heaps + row * p->vocab;
        p->chosen[row] = total < 0           ? -1
                         : params->top_p < 1 ? draw_from_top(weights, p->vocab, params, total, heap)
                                             : draw_from_all(weights, p->vocab, params, total);
    }
}

/* Draw one token per row, or -1 if the row has no distribution. Overwrites the logits. vocab is a multiple of 16. */
void kvtier_draw(float *logits, uint64_t *heaps, const RowParams *params, int64_t *chosen, long rows, long vocab,
                 int threads) {
    Draw p = {logits, heaps, params, chosen, rows, vocab};
    run(draw_rows, &p, rows, 1, threads, rows < 2 ? ALONE : way_of(threads, rows * vocab, rows));
}
