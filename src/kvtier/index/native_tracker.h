// The work of kvtier.index.tracker for each request: enter (with TouchLog.use and .add), take_ghosts and add_ghost.

typedef struct {
    Tracker *tracker;
    PyObject *owner;  // keeps `tracker` alive
    // Observations since the last `take`, as in TouchLog: class and number of blocks of each new touch, number and used
    // blocks of each old touch, and four numbers per request.
    int64_t *started, *ended;
    double *requests;
    int64_t num_started, started_capacity, num_ended, ended_capacity, num_requests, requests_capacity;
    // For the current request: its path (last node first), and its runs (number of the previous touch, blocks).
    PyObject **path, *root;
    int64_t *runs;
    int64_t path_capacity, num_runs, runs_capacity;
} Log;

static const char LOG[] = "kvtier.index.log";

static int add_run(Log *log, int64_t number, int64_t count) {
    if (!RESERVE(log->runs, log->runs_capacity, log->num_runs + 2)) return 0;
    log->runs[log->num_runs++] = number;
    log->runs[log->num_runs++] = count;
    return 1;
}

// TouchLog.use for `log->runs`. Returns -1 if out of memory.
static int64_t use_runs(Log *log, int64_t limit) {
    Tracker *t = log->tracker;
    int64_t hits = 0, at = 0, oldest = t->next - t->num_touches;
    int64_t frontier = t->frontier > oldest ? t->frontier : oldest;
    if (!RESERVE(log->ended, log->ended_capacity, log->num_ended + log->num_runs)) return -1;
    for (int64_t i = 0; i < log->num_runs; i += 2) {
        int64_t number = log->runs[i], count = log->runs[i + 1];
        if (number >= frontier && at == hits && hits < limit) hits += count;
        at += count;
        if (number < oldest || number >= t->next) continue;
        int32_t *left = &t->left[number % t->ring];
        if (!*left) continue;
        if (*left < count) count = *left;
        *left -= (int32_t)count;
        log->ended[log->num_ended++] = number;
        log->ended[log->num_ended++] = count;
        if (number >= frontier) t->num_in_lru -= count;
    }
    return hits;
}

// TouchLog.add. Returns 0 if out of memory.
static int add_touches(Log *log, int64_t first, double now, double began) {
    Tracker *t = log->tracker;
    if (!RESERVE(log->requests, log->requests_capacity, log->num_requests + 4)) return 0;
    for (int64_t i = first + 1; i < log->num_started; i += 2) {
        t->left[t->next++ % t->ring] = (int32_t)log->started[i];
        t->num_in_lru += log->started[i];
    }
    double numbers[] = {now, began, (double)log->num_started, (double)log->num_ended};
    memcpy(log->requests + log->num_requests, numbers, sizeof numbers);
    log->num_requests += 4;
    while (t->num_in_lru > t->capacity) t->num_in_lru -= t->left[t->frontier++ % t->ring];
    return 1;
}

// Return the cell of a class, or -1 after an error. Classes that do not exist yet are added by the tracker.
static int64_t cell_of(PyObject *owner, PyObject *numbers, int64_t uses, const int64_t *uses_bin, PyObject *labels) {
    PyObject *key = PyTuple_New(1 + PyTuple_Size(labels)), *bin = key ? PyLong_FromLongLong(uses_bin[uses]) : NULL;
    if (!bin) return -1;
    PyTuple_SetItem(key, 0, bin);
    for (Py_ssize_t i = 0; i < PyTuple_Size(labels); i++) {
        PyObject *label = PyTuple_GetItem(labels, i);
        Py_IncRef(label);
        PyTuple_SetItem(key, i + 1, label);
    }
    PyObject *number = PyDict_GetItemWithError(numbers, key);
    Py_DecRef(key);
    if (number) return PyLong_AsLongLong(number);
    if (PyErr_Occurred() || !(bin = PyLong_FromLongLong(uses))) return -1;
    number = PyObject_CallMethodObjArgs(owner, names.cell, bin, labels, NULL);
    Py_DecRef(bin);
    if (!number) return -1;
    int64_t cell = PyLong_AsLongLong(number);
    Py_DecRef(number);
    return cell;
}

static PyObject *new_touch(int64_t number, int64_t cell, double now, int64_t uses) {
    PyObject *items[] = {PyLong_FromLongLong(number), PyLong_FromLongLong(cell), PyFloat_FromDouble(now),
                         PyLong_FromLongLong(uses)};
    PyObject *touch = PyTuple_New(4);
    for (int i = 0; touch && i < 4; i++) PyTuple_SetItem(touch, i, items[i]);
    return touch;
}

// Facts about a request and its blocks.
typedef struct {
    int64_t matched, fresh_from, again, stop;
    double now;
    PyObject *tracker, *labels, *numbers;
} Request;

// Start new touches for the nodes in `path`, and collect their previous touches in `runs`. Returns 0 after an error.
static int touch_path(Log *log, const Request *request, int64_t length) {
    Tracker *t = log->tracker;
    int64_t first = log->num_started, cell = -1, number = t->next - 1, run_uses = -1, last = -1;
    PyObject *run = NULL;
    int done = 1;
    if (!RESERVE(log->started, log->started_capacity, first + 2 * t->max_runs)) return 0;
    for (int64_t i = length - 1; i >= 0 && done; i--) {
        PyObject *node = log->path[i], *usage = PyObject_GetAttr(node, names.usage);
        PyObject *touch = usage ? PyObject_GetAttr(usage, names.touch) : NULL;
        int64_t num_blocks = int_of(node, names.num_blocks), start, old = -1, uses = 0;
        done = touch != NULL;
        if (!done) {
        } else if (touch != NONE) {
            old = PyLong_AsLongLong(PyTuple_GetItem(touch, 0));
            uses = PyLong_AsLongLong(PyTuple_GetItem(touch, 3));
            uses += uses < MAX_USES;
        } else if ((start = int_of(node, names.start)) < request->matched) {
            old = t->running, uses = 1;
        } else {
            uses = 2 * start + num_blocks < 2 * request->fresh_from ? request->again : 0;
        }
        if (done && old >= 0) {
            if (old == last)
                log->runs[log->num_runs - 1] += num_blocks;
            else
                done = add_run(log, last = old, num_blocks);
        }
        if (done && uses != run_uses) {
            int64_t this = cell_of(request->tracker, request->numbers, uses, t->uses_bin, request->labels);
            if (this != cell && log->num_started < first + 2 * t->max_runs) {
                cell = this, number++;
                log->started[log->num_started++] = cell;
                log->started[log->num_started++] = 0;
            }
            if (run) Py_DecRef(run);
            run = this < 0 ? NULL : new_touch(number, cell, request->now, run_uses = uses);
            done = run != NULL;
        }
        if (done) {
            log->started[log->num_started - 1] += num_blocks;
            done = !PyObject_SetAttr(usage, names.touch, run) && !PyObject_SetAttr(usage, names.lost, names.zero);
        }
        if (touch) Py_DecRef(touch);
        if (usage) Py_DecRef(usage);
    }
    if (run) Py_DecRef(run);
    return done;
}

// Append the ghosts of a request, as in `Returned`, to `runs`. Returns 0 after an error.
static int add_ghosts(Log *log, PyObject *ghosts) {
    for (Py_ssize_t i = 0; i < PyList_Size(ghosts); i += 2) {
        int64_t number = PyLong_AsLongLong(PyList_GetItem(ghosts, i));
        int64_t count = PyLong_AsLongLong(PyList_GetItem(ghosts, i + 1));
        if (log->num_runs && log->runs[log->num_runs - 2] == number)
            log->runs[log->num_runs - 1] += count;
        else if (!add_run(log, number, count))
            return 0;
    }
    return 1;
}

// Fill `path` with the nodes of a lease, last node first. Returns their number, or -1 after an error.
static int64_t find_path(Log *log, PyObject *lease) {
    int64_t length = 0;
    PyObject *node = PyObject_GetAttr(lease, names.node), *parent;
    while (node && (parent = PyObject_GetAttr(node, names.parent))) {
        Py_DecRef(node);  // the child of this node, or the lease, holds a reference too
        if (parent == NONE) {
            Py_DecRef(parent);
            log->root = node;
            return length;
        }
        if (!RESERVE(log->path, log->path_capacity, length + 1)) break;
        log->path[length++] = node;
        node = parent;
    }
    return -1;
}

static PyObject *labels_of(PyObject *cells, PyObject *lease, PyObject *head, int64_t new_tokens, PyObject *outcome) {
    PyObject *chain = PyObject_GetAttr(lease, names.chain), *salt = NULL, *key = NULL, *tokens = NULL, *labels = NULL;
    if (chain && (salt = PyObject_GetAttr(chain, names.salt)) && (key = PyObject_GetAttr(head, names.key)) &&
        (tokens = PyLong_FromLongLong(new_tokens)))
        labels = PyObject_CallMethodObjArgs(cells, names.labels, salt, key, tokens, outcome, NULL);
    PyObject *used[] = {chain, salt, key, tokens};
    for (int i = 0; i < 4; i++)
        if (used[i]) Py_DecRef(used[i]);
    return labels;
}

static int read_request(Request *request, PyObject *lease, PyObject *returned) {
    PyObject *began = PyObject_GetAttr(lease, names.began);
    request->matched = request->fresh_from = int_of(lease, names.num_matched);
    request->stop = began ? PyLong_AsLongLong(PyTuple_GetItem(began, 1)) : 0;
    if (returned != NONE) {
        request->fresh_from = PyLong_AsLongLong(PyTuple_GetItem(returned, 0));
        request->again = PyLong_AsLongLong(PyTuple_GetItem(returned, 1));
    }
    if (began) Py_DecRef(began);
    return !PyErr_Occurred();
}

static double began_of(PyObject *lease) {
    PyObject *began = PyObject_GetAttr(lease, names.began);
    double time = began ? PyFloat_AsDouble(PyTuple_GetItem(began, 0)) : 0.0;
    if (began) Py_DecRef(began);
    return time;
}

// enter(tracker, block_tokens, lease, returned, outcome)
static PyObject *log_enter(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    Log *log = PyCapsule_GetPointer(self, LOG);
    Tracker *t = log->tracker;
    PyObject *tracker = arguments[0], *lease = arguments[2], *returned = arguments[3];
    Request request = {.now = t->now, .tracker = tracker};
    int64_t length = find_path(log, lease), first = log->num_started, hits = -1;
    (void)count;
    if (length <= 0) return length ? NULL : PyBool_FromLong(0);
    if (!read_request(&request, lease, returned)) return NULL;
    int64_t new_tokens = (request.stop - request.fresh_from) * PyLong_AsLongLong(arguments[1]);
    PyObject *cells = PyObject_GetAttr(tracker, names.cells);
    log->num_runs = 0;
    if (cells && (request.numbers = PyObject_GetAttr(cells, names.numbers)) &&
        (request.labels = labels_of(cells, lease, log->path[length - 1], new_tokens, arguments[4])) &&
        touch_path(log, &request, length) &&
        (returned == NONE || add_ghosts(log, PyTuple_GetItem(returned, 2))))
        hits = use_runs(log, request.fresh_from);
    if (cells) Py_DecRef(cells);
    if (request.labels) Py_DecRef(request.labels);
    if (request.numbers) Py_DecRef(request.numbers);
    if (hits < 0 || !add_touches(log, first, request.now, began_of(lease)))
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    t->num_requests++, t->until_fit--;
    t->num_blocks += request.stop, t->num_hits += request.matched, t->num_lru_hits += hits;
    return PyBool_FromLong(t->num_requests >= t->guard_requests || t->until_fit <= 0);
}

// ---- ghosts ---------------------------------------------------------------------------------------------------------

// Return hash((domain, key, block)) as an object. Takes over the references to `key` and `block`.
static PyObject *ghost_name(PyObject *domain, PyObject *key, PyObject *block) {
    PyObject *parts = PyTuple_New(3), *name = NULL;
    Py_IncRef(domain);
    int done = set_item_of(parts, 0, domain);
    done &= set_item_of(parts, 1, key);
    done &= set_item_of(parts, 2, block);
    Py_ssize_t hash = done ? PyObject_Hash(parts) : -1;
    if (hash != -1 || !PyErr_Occurred()) name = PyLong_FromLongLong(hash);
    if (parts) Py_DecRef(parts);
    return name;
}

static int append_pair(PyObject *list, int64_t number, int64_t count) {
    int64_t pair[] = {number, count};
    for (int i = 0; i < 2; i++) {
        PyObject *item = PyLong_FromLongLong(pair[i]);
        int done = item && !PyList_Append(list, item);
        if (item) Py_DecRef(item);
        if (!done) return 0;
    }
    return 1;
}

// Return the key of a node that begins with `block`: the key of `first` if it begins there, otherwise from the chain.
static PyObject *key_of(PyObject *first, PyObject *chain, int64_t block) {
    if (first && int_of(first, names.start) == block) return PyObject_GetAttr(first, names.key);
    PyObject *number = PyLong_FromLongLong(block);
    PyObject *key = number ? PyObject_CallMethodObjArgs(chain, names.key_at, number, NULL) : NULL;
    if (number) Py_DecRef(number);
    return key;
}

// Collect the ghosts of blocks [block, stop) in `ended`. Returns the end of the blocks with ghosts, or -1 on error.
static int64_t take_ghosts(const Log *log, PyObject *ghosts, PyObject *domain, PyObject *first, PyObject *chain,
                           int64_t block, int64_t stop, PyObject *ended, int64_t *again) {
    int64_t oldest = log->tracker->next - log->tracker->num_touches;
    while (block < stop && PyDict_Size(ghosts)) {
        PyObject *key = key_of(first, chain, block);
        PyObject *name = key ? ghost_name(domain, key, PyLong_FromLongLong(block)) : NULL;
        PyObject *ghost = name ? PyDict_GetItemWithError(ghosts, name) : NULL;
        int64_t packed = ghost ? PyLong_AsLongLong(ghost) : -1;
        if (ghost) PyDict_DelItem(ghosts, name);
        if (name) Py_DecRef(name);
        if (PyErr_Occurred()) return -1;
        if (!ghost || packed >> NUMBER_BIT < oldest) break;
        int64_t num_blocks = packed >> BLOCKS_BIT & MAX_GHOST;
        if (num_blocks > stop - block) num_blocks = stop - block;
        if (!append_pair(ended, packed >> NUMBER_BIT, num_blocks)) return -1;
        if (!*again) *again = (packed & 7) + 1;
        block += num_blocks;
    }
    return block;
}

// returned(ghosts, lease): take_ghosts of kvtier.index.tracker.
static PyObject *log_returned(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    Log *log = PyCapsule_GetPointer(self, LOG);
    PyObject *lease = arguments[1], *found = NULL;
    Request request = {0};
    (void)count;
    if (!read_request(&request, lease, NONE)) return NULL;
    int64_t block = request.matched, again = 0, length;
    if (block >= request.stop) goto none;
    if ((length = find_path(log, lease)) < 0) return NULL;
    // The path contains the last node first. Find the last node that begins before `block`, and the node below it.
    int64_t at = 0;
    while (at < length && int_of(log->path[at], names.start) >= block) at++;
    PyObject *first = at ? log->path[at - 1] : NULL, *node = at < length ? log->path[at] : NULL;
    PyObject *any = node ? node : first;
    if (!any) any = log->root;
    PyObject *domain = PyObject_GetAttr(any, names.domain), *chain = PyObject_GetAttr(lease, names.chain);
    PyObject *ended = PyList_New(0), *usage = node ? PyObject_GetAttr(node, names.usage) : NULL;
    PyObject *touch = usage ? PyObject_GetAttr(usage, names.touch) : NULL;
    int done = domain && chain && ended && (!node || touch);
    int64_t lost = usage ? int_of(usage, names.lost) : 0;
    if (done && lost && touch != NONE && int_of(node, names.start) + int_of(node, names.num_blocks) == block) {
        int64_t num_blocks = lost < request.stop - block ? lost : request.stop - block;
        done = append_pair(ended, PyLong_AsLongLong(PyTuple_GetItem(touch, 0)), num_blocks);
        again = PyLong_AsLongLong(PyTuple_GetItem(touch, 3)) + 1;
        block += num_blocks;
    }
    if (done)
        block = take_ghosts(log, arguments[0], domain, first, chain, block, request.stop, ended, &again);
    done &= block >= 0 && !PyErr_Occurred();
    if (done && PyList_Size(ended)) {
        found = PyTuple_New(3);
        done = set_item_of(found, 0, PyLong_FromLongLong(block));
        done &= set_item_of(found, 1, PyLong_FromLongLong(again < MAX_USES ? again : MAX_USES));
        Py_IncRef(ended);
        done &= set_item_of(found, 2, ended);
    }
    PyObject *used[] = {domain, chain, ended, usage, touch};
    for (int i = 0; i < 5; i++)
        if (used[i]) Py_DecRef(used[i]);
    if (!done) return NULL;
    if (found) return found;
none:
    Py_IncRef(NONE);
    return NONE;
}

// remember(ghosts, node): add_ghost of kvtier.index.tracker.
static PyObject *log_remember(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    PyObject *ghosts = arguments[0], *node = arguments[1], *name = NULL, *value = NULL;
    PyObject *usage = PyObject_GetAttr(node, names.usage), *domain = PyObject_GetAttr(node, names.domain);
    PyObject *touch = usage ? PyObject_GetAttr(usage, names.touch) : NULL;
    (void)self, (void)count;
    if (touch && domain) {
        int64_t num_blocks = int_of(node, names.num_blocks) + int_of(usage, names.lost);
        int64_t number = PyLong_AsLongLong(PyTuple_GetItem(touch, 0));
        int64_t packed = number << NUMBER_BIT | (num_blocks < MAX_GHOST ? num_blocks : MAX_GHOST) << BLOCKS_BIT;
        value = PyLong_FromLongLong(packed | PyLong_AsLongLong(PyTuple_GetItem(touch, 3)));
        name = ghost_name(domain, PyObject_GetAttr(node, names.key), PyObject_GetAttr(node, names.start));
    }
    int done = name && value && !PyErr_Occurred() && !PyDict_SetItem(ghosts, name, value);
    PyObject *used[] = {usage, domain, touch, name, value};
    for (int i = 0; i < 5; i++)
        if (used[i]) Py_DecRef(used[i]);
    return done ? PyLong_FromLongLong(PyDict_Size(ghosts)) : NULL;
}

// TouchLog.take: return the observations as bytes, and forget them.
static PyObject *log_take(PyObject *self, PyObject *none) {
    Log *log = PyCapsule_GetPointer(self, LOG);
    PyObject *parts = PyTuple_New(3);
    (void)none;
    if (!parts) return NULL;
    PyTuple_SetItem(parts, 0, PyBytes_FromStringAndSize((char *)log->started, log->num_started * 8));
    PyTuple_SetItem(parts, 1, PyBytes_FromStringAndSize((char *)log->ended, log->num_ended * 8));
    PyTuple_SetItem(parts, 2, PyBytes_FromStringAndSize((char *)log->requests, log->num_requests * 8));
    log->num_started = log->num_ended = log->num_requests = 0;
    return parts;
}

static void free_log(PyObject *self) {
    Log *log = PyCapsule_GetPointer(self, LOG);
    void *parts[] = {log->started, log->ended, log->requests, log->path, log->runs};
    for (int i = 0; i < 5; i++) PyMem_Free(parts[i]);
    Py_DecRef(log->owner);
    PyMem_Free(log);
}

PyObject *kvtier_log(PyObject *owner, Tracker *tracker) {
    static PyMethodDef methods[] = {{"enter", log_enter, METH_FASTCALL, NULL}, {"take", log_take, METH_NOARGS, NULL},
                                    {"returned", log_returned, METH_FASTCALL, NULL},
                                    {"remember", log_remember, METH_FASTCALL, NULL}};
    Log *log = find_names() ? PyMem_Malloc(sizeof *log) : NULL;
    if (!log) return PyErr_NoMemory();
    memset(log, 0, sizeof *log);
    log->tracker = tracker, log->owner = owner;
    Py_IncRef(owner);
    return bind(PyCapsule_New(log, LOG, free_log), methods, 4);
}
