// The same steps as in kvtier.index.learned.Learned, with the same order of ties. The place of a removed candidate in
// the pool is free at once. Entries that still refer to this candidate are recognised by its sequence number.

typedef struct {
    int64_t used, number;  // logical time of the last use, sequence number
    PyObject *node;        // a reference, or NULL for a free place
    double since;          // time of the last use
    int64_t lowest;        // in `tidy`: 1 + index of the lowest entry for this youngest candidate
    int32_t cell, next_free;
} Candidate;

typedef struct {
    int64_t used, number;
    int32_t at;  // place in the pool
} Waiting;

typedef struct {
    double value;
    int64_t used, number;
    double until;    // time at which the value changes
    int64_t id;      // number of this entry
    int32_t at;      // place of the candidate in the pool, or -1 for all young candidates of the class
    int32_t cell;    // class, or -1 in the entry for the youngest candidate
    int32_t of_cell; // class, in both cases
} Item;

typedef struct {
    double time;
    int32_t cell;
} Timer;

typedef struct {
    Waiting *heap, *young;
    int64_t size, heap_capacity, num_young, young_capacity, count;
    int64_t item, floor;  // ids of these entries in the heap of values, or 0
    double item_value;
    int64_t item_number;  // sequence number of the entry's candidate
    int64_t lowest;       // in `tidy`: 1 + index of the lowest entry for a withdrawn youngest candidate
    double timer;
    int exists, is_dirty;
} Queue;

typedef struct {
    Tracker *tracker;
    PyObject *owner;  // keeps `tracker` alive
    Candidate *pool;
    int64_t num_places, pool_capacity, num_candidates;
    int32_t free_place;
    int32_t *table;  // hash table: place of a node's candidate, or -1
    int64_t table_size;
    Queue queues[MAX_CELLS];
    int32_t order[MAX_CELLS], dirty[MAX_CELLS];
    int num_queues, num_dirty;
    Item *items;
    int64_t num_items, items_capacity;
    Timer *timers;
    int64_t num_timers, timers_capacity;
    int64_t next, next_item, version;
} Policy;

static const char POLICY[] = "kvtier.index.policy";

// ---- heaps ----------------------------------------------------------------------------------------------------------

static int is_before_waiting(const Waiting *a, const Waiting *b) {
    return a->used != b->used ? a->used < b->used : a->number < b->number;
}

static int is_before_item(const Item *a, const Item *b) {
    if (a->value != b->value) return a->value < b->value;
    if (a->used != b->used) return a->used < b->used;
    if (a->number != b->number) return a->number < b->number;
    if (a->until != b->until) return a->until < b->until;
    return a->cell < b->cell;
}

static int is_before_timer(const Timer *a, const Timer *b) {
    return a->time != b->time ? a->time < b->time : a->cell < b->cell;
}

#define HEAP(Type, name)                                                                       \
    static void name##_up(Type *heap, int64_t at) {                                            \
        Type moved = heap[at];                                                                 \
        while (at && is_before_##name(&moved, &heap[(at - 1) / 2])) {                          \
            heap[at] = heap[(at - 1) / 2];                                                     \
            at = (at - 1) / 2;                                                                 \
        }                                                                                      \
        heap[at] = moved;                                                                      \
    }                                                                                          \
    static void name##_down(Type *heap, int64_t size, int64_t at) {                            \
        Type moved = heap[at];                                                                 \
        for (int64_t child; (child = 2 * at + 1) < size; at = child) {                         \
            if (child + 1 < size && is_before_##name(&heap[child + 1], &heap[child])) child++; \
            if (!is_before_##name(&heap[child], &moved)) break;                                \
            heap[at] = heap[child];                                                            \
        }                                                                                      \
        heap[at] = moved;                                                                      \
    }                                                                                          \
    static void name##_pop(Type *heap, int64_t *size) {                                        \
        if (--*size) {                                                                         \
            heap[0] = heap[*size];                                                             \
            name##_down(heap, *size, 0);                                                       \
        }                                                                                      \
    }                                                                                          \
    static void name##_order(Type *heap, int64_t size) {                                       \
        for (int64_t at = size / 2; at-- > 0;) name##_down(heap, size, at);                    \
    }
HEAP(Waiting, waiting)
HEAP(Item, item)
HEAP(Timer, timer)

// ---- candidates by node: linear probing -----------------------------------------------------------------------------

static int64_t home_of(const Policy *policy, const PyObject *node) {
    return (int64_t)(((uint64_t)(uintptr_t)node >> 4) * 0x9E3779B97F4A7C15u >> 20) & (policy->table_size - 1);
}

// Return the index of a node's candidate in the table, or the index of the free entry for it.
static int64_t find(const Policy *policy, const PyObject *node) {
    int64_t at = home_of(policy, node);
    while (policy->table[at] >= 0 && policy->pool[policy->table[at]].node != node)
        at = (at + 1) & (policy->table_size - 1);
    return at;
}

static int grow_table(Policy *policy) {
    int64_t size = policy->table_size ? 2 * policy->table_size : 64;
    int32_t *table = PyMem_Malloc((size_t)size * sizeof *table);
    if (!table) return 0;
    memset(table, 0xff, (size_t)size * sizeof *table);
    PyMem_Free(policy->table);
    policy->table = table, policy->table_size = size;
    for (int64_t place = 0; place < policy->num_places; place++)
        if (policy->pool[place].node) table[find(policy, policy->pool[place].node)] = (int32_t)place;
    return 1;
}

static void forget(Policy *policy, int64_t at) {
    int64_t mask = policy->table_size - 1;
    for (int64_t hole = at, next = at;;) {
        policy->table[hole] = -1;
        for (;;) {
            next = (next + 1) & mask;
            if (policy->table[next] < 0) return;
            int64_t home = home_of(policy, policy->pool[policy->table[next]].node);
            if (((next - home) & mask) >= ((next - hole) & mask)) break;
        }
        policy->table[hole] = policy->table[next];
        hole = next;
    }
}

// ---- classes --------------------------------------------------------------------------------------------------------

static int is_removed(const Policy *policy, int32_t at, int64_t number) {
    return policy->pool[at].number != number || !policy->pool[at].node;
}

static void keep_present(const Policy *policy, Waiting *entries, int64_t *size) {
    int64_t kept = 0;
    for (int64_t i = 0; i < *size; i++)
        if (!is_removed(policy, entries[i].at, entries[i].number)) entries[kept++] = entries[i];
    *size = kept;
}

static const Waiting *oldest_of(const Policy *policy, Queue *queue) {
    while (queue->size && is_removed(policy, queue->heap[0].at, queue->heap[0].number))
        waiting_pop(queue->heap, &queue->size);
    return queue->size ? queue->heap : NULL;
}

static void mark_dirty(Policy *policy, int cell) {
    if (!policy->queues[cell].is_dirty) policy->dirty[policy->num_dirty++] = cell;
    policy->queues[cell].is_dirty = 1;
}

static Item item_of(Policy *policy, const Waiting *waiting, int cell) {
    const Tracker *tracker = policy->tracker;
    const Candidate *candidate = &policy->pool[waiting->at];
    int64_t id = ++policy->next_item;
    Item item = {0.0, waiting->used, waiting->number, INFINITY, id, waiting->at, cell, candidate->cell};
    if (!tracker->is_lru) {
        int bucket = bucket_of(tracker->ends, tracker->now - candidate->since);
        item.value = tracker->values[candidate->cell * NUM_BUCKETS + bucket];
        item.until = candidate->since + tracker->ends[bucket];
    }
    return item;
}

static int push_item(Policy *policy, const Item *item) {
    if (!RESERVE(policy->items, policy->items_capacity, policy->num_items + 1)) return 0;
    policy->items[policy->num_items] = *item;
    item_up(policy->items, policy->num_items++);
    return 1;
}

static void replace_first(Policy *policy, const Item *item) {
    policy->items[0] = *item;
    item_down(policy->items, policy->num_items, 0);
}

static void set_item(Queue *queue, const Item *item) {
    queue->item = item->id, queue->item_value = item->value, queue->item_number = item->number;
}

static int set_timer(Policy *policy, int cell, double time) {
    if (time >= policy->queues[cell].timer) return 1;
    policy->queues[cell].timer = time;
    if (!RESERVE(policy->timers, policy->timers_capacity, policy->num_timers + 1)) return 0;
    policy->timers[policy->num_timers] = (Timer){time, cell};
    timer_up(policy->timers, policy->num_timers++);
    return 1;
}

static int add_floor(Policy *policy, int cell) {
    Queue *queue = &policy->queues[cell];
    if (queue->floor || !queue->num_young) return 1;
    double floor = policy->tracker->is_lru ? INFINITY : policy->tracker->floors[cell];
    if (floor == INFINITY) {
        queue->num_young = 0;
        return 1;
    }
    Item item = {floor, 0, ++policy->next, INFINITY, ++policy->next_item, -1, cell, cell};
    queue->floor = item.id;
    return push_item(policy, &item);
}

static int replace_floor(Policy *policy, int64_t id, int cell) {
    Queue *queue = &policy->queues[cell];
    item_pop(policy->items, &policy->num_items);
    if (queue->floor != id) return 1;
    queue->floor = 0;
    while (queue->num_young) {
        const Waiting *last = &queue->young[queue->num_young - 1];
        if (!is_removed(policy, last->at, last->number)) break;
        queue->num_young--;
    }
    if (!queue->num_young) return 1;
    const Waiting *youngest = &queue->young[queue->num_young - 1];
    const Tracker *tracker = policy->tracker;
    if (tracker->now - policy->pool[youngest->at].since >= tracker->rises_until[cell]) {
        queue->num_young = 0;
        return 1;
    }
    Item item = item_of(policy, youngest, -1);
    return push_item(policy, &item);
}

static int replace_oldest(Policy *policy, int cell) {
    Queue *queue = &policy->queues[cell];
    const Waiting *oldest = oldest_of(policy, queue);
    if (!oldest) {
        queue->item = 0;
        item_pop(policy->items, &policy->num_items);
        return 1;
    }
    Item item = item_of(policy, oldest, cell);
    set_item(queue, &item);
    replace_first(policy, &item);
    return set_timer(policy, cell, item.until);
}

// Return `lowest` of a youngest candidate. All youngest candidates of a class that were withdrawn share one.
static int64_t *lowest_of(Policy *policy, const Item *item) {
    int is_gone = is_removed(policy, item->at, item->number);
    return is_gone ? &policy->queues[item->of_cell].lowest : &policy->pool[item->at].lowest;
}

// Drop entries that `victim` does not need.
static void tidy(Policy *policy) {
    Item *items = policy->items;
    int64_t kept = 0, size = policy->num_items;
    for (int64_t i = 0; i < size; i++) {
        if (items[i].cell >= 0) continue;
        int64_t *lowest = lowest_of(policy, &items[i]);
        if (!*lowest || is_before_item(&items[i], &items[*lowest - 1])) *lowest = i + 1;
    }
    for (int64_t i = 0; i < size; i++) {
        const Queue *queue = &policy->queues[items[i].of_cell];
        if (items[i].cell >= 0) {
            if (items[i].id != queue->item && items[i].id != queue->floor) continue;
        } else {
            int64_t *lowest = lowest_of(policy, &items[i]);
            if (*lowest != i + 1) continue;
            *lowest = 0;
        }
        items[kept++] = items[i];
    }
    policy->num_items = kept;
    item_order(items, kept);
    policy->num_timers = 0;
    for (int i = 0; i < policy->num_queues; i++) {
        int cell = policy->order[i];
        if (policy->queues[cell].timer < INFINITY)
            policy->timers[policy->num_timers++] = (Timer){policy->queues[cell].timer, cell};
    }
    timer_order(policy->timers, policy->num_timers);
}

static int evaluate(Policy *policy, int cell) {
    Queue *queue = &policy->queues[cell];
    const Waiting *oldest = oldest_of(policy, queue);
    if (!oldest) return 1;
    Item item = item_of(policy, oldest, cell);
    if (!queue->item || queue->item_number != item.number || queue->item_value != item.value) {
        set_item(queue, &item);
        if (!push_item(policy, &item)) return 0;
    }
    return set_timer(policy, cell, item.until);
}

static int compare_waiting(const void *a, const void *b) {
    return is_before_waiting(a, b) ? -1 : is_before_waiting(b, a);
}

static int rebuild(Policy *policy) {
    policy->version = policy->tracker->version;
    policy->num_timers = policy->num_items = 0;
    for (int i = 0; i < policy->num_queues; i++) {
        int cell = policy->order[i];
        Queue *queue = &policy->queues[cell];
        queue->item = queue->floor = 0;
        queue->timer = INFINITY;
        if (!queue->count) continue;
        mark_dirty(policy, cell);
        if (!RESERVE(queue->young, queue->young_capacity, queue->size)) return 0;
        memcpy(queue->young, queue->heap, (size_t)queue->size * sizeof *queue->heap);
        queue->num_young = queue->size;
        keep_present(policy, queue->young, &queue->num_young);
        qsort(queue->young, (size_t)queue->num_young, sizeof *queue->young, compare_waiting);
        if (!add_floor(policy, cell)) return 0;
    }
    return 1;
}

// ---- methods --------------------------------------------------------------------------------------------------------

// Read the class, the time and the logical time of a node's last use. Returns 0 after an error.
static int read_usage(const Tracker *tracker, PyObject *node, Candidate *into) {
    PyObject *usage = PyObject_GetAttr(node, names.usage), *touch = NULL;
    if (usage && (touch = PyObject_GetAttr(usage, names.touch))) {
        into->used = int_of(usage, names.used);
        into->cell = 0, into->since = tracker->now;
        if (touch != NONE) {
            into->cell = (int32_t)PyLong_AsLongLong(PyTuple_GetItem(touch, 1));
            into->since = PyFloat_AsDouble(PyTuple_GetItem(touch, 2));
        }
        Py_DecRef(touch);
    }
    if (usage) Py_DecRef(usage);
    return usage && touch && !PyErr_Occurred() && into->cell >= 0 && into->cell < MAX_CELLS;
}

static int32_t free_place(Policy *policy) {
    int32_t place = policy->free_place;
    if (place >= 0) {
        policy->free_place = policy->pool[place].next_free;
        return place;
    }
    if (!RESERVE(policy->pool, policy->pool_capacity, policy->num_places + 1)) return -1;
    policy->pool[policy->num_places].node = NULL;
    return (int32_t)policy->num_places++;
}

static PyObject *policy_offer(PyObject *self, PyObject *node) {
    Policy *policy = PyCapsule_GetPointer(self, POLICY);
    Candidate new = {0};
    if (2 * policy->num_candidates >= policy->table_size && !grow_table(policy)) return PyErr_NoMemory();
    int64_t at = find(policy, node);
    if (policy->table[at] < 0) {
        if (!read_usage(policy->tracker, node, &new)) return NULL;
        int32_t place = free_place(policy);
        Queue *queue = &policy->queues[new.cell];
        if (place < 0 || !RESERVE(queue->heap, queue->heap_capacity, queue->size + 1) ||
            !RESERVE(queue->young, queue->young_capacity, queue->num_young + 1))
            return PyErr_NoMemory();
        if (!queue->exists) {
            queue->exists = 1, queue->timer = INFINITY;
            policy->order[policy->num_queues++] = new.cell;
        }
        new.number = ++policy->next;
        new.node = node;
        Py_IncRef(node);
        policy->pool[place] = new;
        policy->table[at] = place;
        policy->num_candidates++, queue->count++;
        Waiting waiting = {new.used, new.number, place};
        queue->heap[queue->size] = waiting;
        waiting_up(queue->heap, queue->size++);
        if (queue->heap[0].number == new.number) mark_dirty(policy, new.cell);
        if (queue->size > 64 + 2 * queue->count) {
            keep_present(policy, queue->heap, &queue->size);
            waiting_order(queue->heap, queue->size);
        }
        if (!policy->tracker->is_lru) {
            queue->young[queue->num_young++] = waiting;
            if (queue->num_young > 64 + 2 * queue->count) keep_present(policy, queue->young, &queue->num_young);
            if (!queue->floor && policy->version == policy->tracker->version && !add_floor(policy, new.cell))
                return PyErr_NoMemory();
        }
    }
    Py_IncRef(NONE);
    return NONE;
}

static PyObject *policy_withdraw(PyObject *self, PyObject *node) {
    Policy *policy = PyCapsule_GetPointer(self, POLICY);
    int64_t at = policy->table_size ? find(policy, node) : 0;
    if (policy->table_size && policy->table[at] >= 0) {
        int32_t place = policy->table[at];
        Candidate *candidate = &policy->pool[place];
        Queue *queue = &policy->queues[candidate->cell];
        forget(policy, at);
        candidate->node = NULL;
        candidate->next_free = policy->free_place;
        policy->free_place = place;
        policy->num_candidates--;
        if (!--queue->count) queue->size = queue->num_young = 0;
        Py_DecRef(node);
    }
    Py_IncRef(NONE);
    return NONE;
}

static PyObject *policy_contains(PyObject *self, PyObject *node) {
    const Policy *policy = PyCapsule_GetPointer(self, POLICY);
    return PyBool_FromLong(policy->table_size && policy->table[find(policy, node)] >= 0);
}

// Bring the heap of values up to date. Returns 0 if out of memory.
static int refresh(Policy *policy) {
    const Tracker *tracker = policy->tracker;
    if (policy->version != tracker->version && !rebuild(policy)) return 0;
    while (policy->num_timers && policy->timers[0].time <= tracker->now) {
        int cell = policy->timers[0].cell;
        timer_pop(policy->timers, &policy->num_timers);
        policy->queues[cell].timer = INFINITY;
        mark_dirty(policy, cell);
    }
    while (policy->num_dirty) {
        int cell = policy->dirty[--policy->num_dirty];
        policy->queues[cell].is_dirty = 0;
        if (!evaluate(policy, cell)) return 0;
    }
    int64_t most = policy->num_items > policy->num_timers ? policy->num_items : policy->num_timers;
    if (most > 64 + 4 * policy->num_queues + 2 * policy->num_candidates) tidy(policy);
    return 1;
}

static PyObject *policy_victim(PyObject *self, PyObject *none) {
    Policy *policy = PyCapsule_GetPointer(self, POLICY);
    (void)none;
    int done = refresh(policy);
    while (done && policy->num_items) {
        Item item = policy->items[0];
        if (item.at < 0) {
            done = replace_floor(policy, item.id, item.cell);
        } else if (item.cell < 0) {
            if (is_removed(policy, item.at, item.number)) {
                item_pop(policy->items, &policy->num_items);
                done = add_floor(policy, item.of_cell);
                continue;
            }
            if (item.until > policy->tracker->now) goto found;
            Waiting waiting = {item.used, item.number, item.at};
            Item again = item_of(policy, &waiting, -1);
            replace_first(policy, &again);
        } else if (policy->queues[item.cell].item != item.id) {
            item_pop(policy->items, &policy->num_items);
        } else if (is_removed(policy, item.at, item.number)) {
            done = replace_oldest(policy, item.cell);
        } else {
        found:
            policy->tracker->lowest = item.value;
            PyObject *node = policy->pool[item.at].node;
            Py_IncRef(node);
            return node;
        }
    }
    if (!done) return PyErr_NoMemory();
    Py_IncRef(NONE);
    return NONE;
}

// Return the lengths of the longest queue, the longest list of young candidates, the heap of values, and the timers.
static PyObject *policy_sizes(PyObject *self, PyObject *none) {
    const Policy *policy = PyCapsule_GetPointer(self, POLICY);
    int64_t sizes[4] = {0, 0, policy->num_items, policy->num_timers};
    (void)none;
    for (int i = 0; i < policy->num_queues; i++) {
        const Queue *queue = &policy->queues[policy->order[i]];
        if (queue->size > sizes[0]) sizes[0] = queue->size;
        if (queue->num_young > sizes[1]) sizes[1] = queue->num_young;
    }
    return PyBytes_FromStringAndSize((const char *)sizes, sizeof sizes);
}

static void free_policy(PyObject *self) {
    Policy *policy = PyCapsule_GetPointer(self, POLICY);
    for (int64_t place = 0; place < policy->num_places; place++)
        if (policy->pool[place].node) Py_DecRef(policy->pool[place].node);
    for (int i = 0; i < policy->num_queues; i++) {
        PyMem_Free(policy->queues[policy->order[i]].heap);
        PyMem_Free(policy->queues[policy->order[i]].young);
    }
    PyMem_Free(policy->pool);
    PyMem_Free(policy->table);
    PyMem_Free(policy->items);
    PyMem_Free(policy->timers);
    Py_DecRef(policy->owner);
    PyMem_Free(policy);
}

// Return a tuple with the bound methods. Takes over the reference to the capsule.
static PyObject *bind(PyObject *capsule, PyMethodDef *methods, int count) {
    PyObject *bound = capsule ? PyTuple_New(count) : NULL;
    for (int i = 0; bound && i < count; i++) {
        PyObject *function = PyCFunction_NewEx(&methods[i], capsule, NULL);
        if (function) {
            PyTuple_SetItem(bound, i, function);
        } else {
            Py_DecRef(bound);
            bound = NULL;
        }
    }
    if (capsule) Py_DecRef(capsule);
    return bound;
}

PyObject *kvtier_policy(PyObject *owner, Tracker *tracker) {
    static PyMethodDef methods[] = {{"offer", policy_offer, METH_O, NULL},
                                    {"withdraw", policy_withdraw, METH_O, NULL},
                                    {"victim", policy_victim, METH_NOARGS, NULL},
                                    {"contains", policy_contains, METH_O, NULL},
                                    {"sizes", policy_sizes, METH_NOARGS, NULL}};
    Policy *policy = find_names() ? PyMem_Malloc(sizeof *policy) : NULL;
    if (!policy) return PyErr_NoMemory();
    memset(policy, 0, sizeof *policy);
    policy->tracker = tracker, policy->owner = owner;
    policy->free_place = -1, policy->version = -1;
    Py_IncRef(owner);
    return bind(PyCapsule_New(policy, POLICY, free_policy), methods, 5);
}
