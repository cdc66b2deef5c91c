// kvtier.index.learned_shadow.LearnedShadow without its fits. Hits and observations are the same, in the same order.

typedef struct {
    int64_t place;
    int32_t at;  // index of the mark's entry
} Queued;

static int is_before_queued(const Queued *a, const Queued *b) { return a->place < b->place; }
HEAP(Queued, queued)

typedef struct {
    Queued *heap;
    int64_t size, capacity;
} MarkQueue;

// All that is known about a mark. The entry is freed when no cache holds the mark and its last use is forgotten.
typedef struct {
    uint64_t mark;
    double time, weight;
    int64_t place;
    int32_t uses, cell, num_holders, is_known;
    int32_t older, newer;  // neighbours in the order of the last uses; `newer` also links free entries
} MarkEntry;

typedef struct {
    double cell, age, weight;
} Ended;

enum { NUM_MARK_CELLS = 48, NUM_NEW = 4, NUM_OUTPUT = 3 };  // 48: 4 `uses` x 4 `new` x 3 `output` (always 0 here)

typedef struct {
    int num_sizes;
    int64_t *sizes, *num_held, max_marks, num_marks, place;
    const double *ends, *values;
    const int64_t *uses_bin;
    MarkEntry *entries;
    int64_t *held;  // by entry and cache: place of the last use if the cache holds the mark, or 0
    int64_t num_entries, entries_capacity, held_capacity, table_size;
    int32_t *table, free_entry, oldest, newest;
    MarkQueue (*queues)[NUM_MARK_CELLS];
    Ended *ended[2];  // [0]: marks that were forgotten, [1]: marks that were used again
    int64_t num_ended[2], ended_capacity[2];
    int32_t *request;
    int64_t request_capacity, live;
} Shadow;

// ---- marks ----------------------------------------------------------------------------------------------------------

static int64_t home_of_mark(const Shadow *shadow, uint64_t mark) {
    return (int64_t)(mark * 0x9E3779B97F4A7C15u >> 24) & (shadow->table_size - 1);
}

static int64_t find_mark(const Shadow *shadow, uint64_t mark) {
    int64_t at = home_of_mark(shadow, mark);
    while (shadow->table[at] >= 0 && shadow->entries[shadow->table[at]].mark != mark)
        at = (at + 1) & (shadow->table_size - 1);
    return at;
}

static int grow_marks(Shadow *shadow) {
    int64_t size = shadow->table_size ? 2 * shadow->table_size : 64;
    int32_t *table = PyMem_Malloc((size_t)size * sizeof *table);
    if (!table) return 0;
    memset(table, 0xff, (size_t)size * sizeof *table);
    PyMem_Free(shadow->table);
    shadow->table = table, shadow->table_size = size;
    for (int64_t at = 0; at < shadow->num_entries; at++)
        if (shadow->entries[at].is_known || shadow->entries[at].num_holders)
            table[find_mark(shadow, shadow->entries[at].mark)] = (int32_t)at;
    return 1;
}

static void free_entry(Shadow *shadow, int32_t at) {
    MarkEntry *entry = &shadow->entries[at];
    if (entry->is_known || entry->num_holders) return;
    int64_t mask = shadow->table_size - 1, hole = find_mark(shadow, entry->mark), next = hole;
    shadow->table[hole] = -1;
    while (shadow->table[next = (next + 1) & mask] >= 0) {
        int64_t home = home_of_mark(shadow, shadow->entries[shadow->table[next]].mark);
        if (((next - home) & mask) < ((next - hole) & mask)) continue;
        shadow->table[hole] = shadow->table[next];
        shadow->table[hole = next] = -1;
    }
    entry->newer = shadow->free_entry;
    shadow->free_entry = at;
    shadow->live--;
}

// Return the entry of a mark. Adds an entry for a new mark. Returns -1 if out of memory.
static int32_t entry_of(Shadow *shadow, uint64_t mark) {
    if (2 * shadow->live >= shadow->table_size && !grow_marks(shadow)) return -1;
    int64_t at = find_mark(shadow, mark);
    if (shadow->table[at] >= 0) return shadow->table[at];
    int32_t entry = shadow->free_entry;
    if (entry >= 0) {
        shadow->free_entry = shadow->entries[entry].newer;
    } else {
        int64_t count = shadow->num_entries + 1;
        if (!RESERVE(shadow->entries, shadow->entries_capacity, count) ||
            !RESERVE(shadow->held, shadow->held_capacity, count * shadow->num_sizes))
            return -1;
        entry = (int32_t)shadow->num_entries++;
    }
    shadow->entries[entry] = (MarkEntry){.mark = mark, .older = -1, .newer = -1};
    memset(shadow->held + (int64_t)entry * shadow->num_sizes, 0, (size_t)shadow->num_sizes * 8);
    shadow->table[at] = entry;
    shadow->live++;
    return entry;
}

// Record the end of a mark's last use: the mark is used again, or forgotten. Returns 0 if out of memory.
static int end_use(Shadow *shadow, int32_t at, double now, int is_use) {
    MarkEntry *entry = &shadow->entries[at];
    int64_t number = shadow->num_ended[is_use]++;
    if (!RESERVE(shadow->ended[is_use], shadow->ended_capacity[is_use], number + 1)) return 0;
    double age = now - entry->time;
    shadow->ended[is_use][number] = (Ended){entry->cell, age > 0.0 ? age : 0.0, entry->weight};
    if (entry->older >= 0)
        shadow->entries[entry->older].newer = entry->newer;
    else
        shadow->oldest = entry->newer;
    if (entry->newer >= 0)
        shadow->entries[entry->newer].older = entry->older;
    else
        shadow->newest = entry->older;
    entry->is_known = 0;
    shadow->num_marks--;
    return 1;
}

// LearnedShadow._use. Sets `request` to the entries of the marks. Returns 0 if out of memory.
static int use_marks(Shadow *shadow, const uint64_t *marks, int64_t count, double now, int new_label) {
    double weight = pow((double)count, -0.5);
    shadow->place += count;
    if (!RESERVE(shadow->request, shadow->request_capacity, count)) return 0;
    for (int64_t depth = count - 1; depth >= 0; depth--) {
        int32_t at = entry_of(shadow, marks[depth]), uses = 0;
        if (at < 0) return 0;
        MarkEntry *entry = &shadow->entries[at];
        if (entry->is_known) {
            if (!end_use(shadow, at, now, 1)) return 0;
            uses = entry->uses < MAX_USES ? entry->uses + 1 : MAX_USES;
        }
        entry->time = now, entry->weight = weight, entry->place = shadow->place - depth, entry->uses = uses;
        entry->cell = ((int32_t)shadow->uses_bin[uses] * NUM_NEW + new_label) * NUM_OUTPUT;
        entry->is_known = 1, entry->older = shadow->newest, entry->newer = -1;
        if (shadow->newest >= 0)
            shadow->entries[shadow->newest].newer = at;
        else
            shadow->oldest = at;
        shadow->newest = at;
        shadow->num_marks++;
        shadow->request[depth] = at;
    }
    while (shadow->num_marks > shadow->max_marks && shadow->num_marks > count) {
        int32_t oldest = shadow->oldest;
        if (!end_use(shadow, oldest, now, 0)) return 0;
        free_entry(shadow, oldest);
    }
    return 1;
}

// ---- caches ---------------------------------------------------------------------------------------------------------

static int64_t *place_in(const Shadow *shadow, int32_t at, int cache) {
    return &shadow->held[(int64_t)at * shadow->num_sizes + cache];
}

static void evict_mark(Shadow *shadow, int cache, double now) {
    MarkQueue *from = NULL;
    double lowest = 0.0;
    for (int cell = 0; cell < NUM_MARK_CELLS; cell++) {
        MarkQueue *queue = &shadow->queues[cache][cell];
        while (queue->size && *place_in(shadow, queue->heap[0].at, cache) != queue->heap[0].place)
            queued_pop(queue->heap, &queue->size);
        if (!queue->size) continue;
        double value = 0.0, age = now - shadow->entries[queue->heap[0].at].time;
        if (shadow->values) value = shadow->values[cell * NUM_BUCKETS + bucket_of(shadow->ends, age)];
        if (!from || value < lowest || (value == lowest && queue->heap[0].place < from->heap[0].place))
            from = queue, lowest = value;
    }
    int32_t at = from->heap[0].at;
    queued_pop(from->heap, &from->size);
    *place_in(shadow, at, cache) = 0;
    shadow->num_held[cache]--;
    shadow->entries[at].num_holders--;
    free_entry(shadow, at);
}

// MarkCache.use. Returns 0 if out of memory.
static int use_in_cache(Shadow *shadow, int cache, int64_t count, double now) {
    for (int64_t i = 0; i < count; i++) {
        int32_t at = shadow->request[i];
        MarkEntry *entry = &shadow->entries[at];
        MarkQueue *queue = &shadow->queues[cache][entry->cell];
        int64_t *place = place_in(shadow, at, cache);
        if (!*place) shadow->num_held[cache]++, entry->num_holders++;
        *place = entry->place;
        if (!RESERVE(queue->heap, queue->capacity, queue->size + 1)) return 0;
        queue->heap[queue->size] = (Queued){entry->place, at};
        queued_up(queue->heap, queue->size++);
        if (queue->size > 64 + 2 * shadow->sizes[cache]) {
            int64_t kept = 0;
            for (int64_t k = 0; k < queue->size; k++)
                if (*place_in(shadow, queue->heap[k].at, cache) == queue->heap[k].place)
                    queue->heap[kept++] = queue->heap[k];
            queue->size = kept;
            queued_order(queue->heap, kept);
        }
    }
    while (shadow->num_held[cache] > shadow->sizes[cache]) evict_mark(shadow, cache, now);
    return 1;
}

static int64_t num_leading(const Shadow *shadow, int cache, const uint64_t *marks, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        int32_t at = shadow->table_size ? shadow->table[find_mark(shadow, marks[i])] : -1;
        if (at < 0 || !*place_in(shadow, at, cache)) return i;
    }
    return count;
}

// ---- functions ------------------------------------------------------------------------------------------------------

static const char SHADOW[] = "kvtier.index.shadow";

// play(first, count, stops, marks, times, labels, values, hits, until_fit): play requests from number `first` on, up to
// the next fit. The marks of request i are marks[stops[i - 1]..stops[i]]. `hits` gets one row per mark and one column
// per cache. All arguments are numbers or addresses; `values` is 0 before the first fit. Returns the number of the next
// request.
static PyObject *shadow_play(PyObject *self, PyObject *const *arguments, Py_ssize_t num_arguments) {
    Shadow *shadow = PyCapsule_GetPointer(self, SHADOW);
    int64_t numbers[9] = {0};
    for (int i = 0; i < 9 && i < num_arguments; i++) numbers[i] = PyLong_AsLongLong(arguments[i]);
    if (PyErr_Occurred()) return NULL;
    const int64_t *stops = (int64_t *)(intptr_t)numbers[2], *labels = (int64_t *)(intptr_t)numbers[5];
    const uint64_t *marks = (uint64_t *)(intptr_t)numbers[3];
    const double *times = (double *)(intptr_t)numbers[4];
    uint8_t *hits = (uint8_t *)(intptr_t)numbers[7];
    int64_t next = numbers[0], last = numbers[1] - next < numbers[8] ? numbers[1] : next + numbers[8];
    shadow->values = (double *)(intptr_t)numbers[6];
    for (; next < last; next++) {
        int64_t start = next ? stops[next - 1] : 0, length = stops[next] - start;
        for (int cache = 0; cache < shadow->num_sizes; cache++) {
            int64_t found = num_leading(shadow, cache, marks + start, length);
            for (int64_t number = 0; number < length; number++)
                hits[(start + number) * shadow->num_sizes + cache] = number < found;
        }
        if (!use_marks(shadow, marks + start, length, times[next], (int)labels[next])) return PyErr_NoMemory();
        for (int cache = 0; cache < shadow->num_sizes; cache++)
            if (!use_in_cache(shadow, cache, length, times[next])) return PyErr_NoMemory();
    }
    return PyLong_FromLongLong(next);
}

// take(now): return three arrays of `Ended` as bytes: marks that were used again, forgotten marks, and all others.
static PyObject *shadow_take(PyObject *self, PyObject *now_object) {
    Shadow *shadow = PyCapsule_GetPointer(self, SHADOW);
    double now = PyFloat_AsDouble(now_object);
    PyObject *parts = PyTuple_New(3);
    Ended *open = PyMem_Malloc((size_t)(shadow->num_marks + 1) * sizeof *open);
    if (!parts || !open) return PyErr_NoMemory();
    int64_t count = 0;
    for (int32_t at = shadow->oldest; at >= 0; at = shadow->entries[at].newer) {
        double age = now - shadow->entries[at].time;
        open[count++] = (Ended){shadow->entries[at].cell, age > 0.0 ? age : 0.0, shadow->entries[at].weight};
    }
    for (int is_use = 0; is_use < 2; is_use++) {
        Py_ssize_t size = shadow->num_ended[is_use] * (Py_ssize_t)sizeof(Ended);
        PyTuple_SetItem(parts, 1 - is_use, PyBytes_FromStringAndSize((char *)shadow->ended[is_use], size));
        shadow->num_ended[is_use] = 0;
    }
    PyTuple_SetItem(parts, 2, PyBytes_FromStringAndSize((char *)open, count * (Py_ssize_t)sizeof *open));
    PyMem_Free(open);
    return parts;
}

// num_held(): return the number of marks in each cache as bytes.
static PyObject *shadow_num_held(PyObject *self, PyObject *none) {
    const Shadow *shadow = PyCapsule_GetPointer(self, SHADOW);
    (void)none;
    return PyBytes_FromStringAndSize((char *)shadow->num_held, shadow->num_sizes * 8);
}

static void free_shadow(PyObject *self) {
    Shadow *shadow = PyCapsule_GetPointer(self, SHADOW);
    for (int cache = 0; shadow->queues && cache < shadow->num_sizes; cache++)
        for (int cell = 0; cell < NUM_MARK_CELLS; cell++) PyMem_Free(shadow->queues[cache][cell].heap);
    void *parts[] = {shadow->sizes, shadow->num_held, shadow->queues,   shadow->entries,  shadow->held,
                     shadow->table, shadow->request,  shadow->ended[0], shadow->ended[1], shadow};
    for (int i = 0; i < 10; i++) PyMem_Free(parts[i]);
}

// Return play, take and num_held of a new shadow with `num_sizes` caches.
PyObject *kvtier_shadow(int64_t num_sizes, const int64_t *sizes, int64_t max_marks, int64_t place, const double *ends,
                        const int64_t *uses_bin) {
    static PyMethodDef methods[] = {{"play", shadow_play, METH_FASTCALL, NULL},
                                    {"take", shadow_take, METH_O, NULL},
                                    {"num_held", shadow_num_held, METH_NOARGS, NULL}};
    Shadow *shadow = PyMem_Malloc(sizeof *shadow);
    if (!shadow) return PyErr_NoMemory();
    *shadow = (Shadow){.num_sizes = (int)num_sizes, .max_marks = max_marks, .place = place, .ends = ends,
                       .uses_bin = uses_bin, .free_entry = -1, .oldest = -1, .newest = -1};
    PyObject *capsule = PyCapsule_New(shadow, SHADOW, free_shadow);
    size_t size = (size_t)num_sizes;
    shadow->sizes = PyMem_Malloc(size * sizeof *shadow->sizes);
    shadow->num_held = PyMem_Malloc(size * sizeof *shadow->num_held);
    shadow->queues = PyMem_Malloc(size * sizeof *shadow->queues);
    if (!capsule || !shadow->sizes || !shadow->num_held || !shadow->queues) return PyErr_NoMemory();
    memcpy(shadow->sizes, sizes, size * sizeof *sizes);
    memset(shadow->num_held, 0, size * sizeof *shadow->num_held);
    memset(shadow->queues, 0, size * sizeof *shadow->queues);
    return bind(capsule, methods, 3);
}
