// The learned policy: its work for each request (kvtier.index.learned, kvtier.index.tracker) and its shadow.
//
// Functions that take nodes become built-in functions of Python, bound to their state by a capsule. A call of such a
// function takes 0.05 us; a call through ctypes takes 0.5 us (measured on an EPYC, 2026-11-19). The code uses only
// CPython's stable ABI (PEP 384), which is declared here. The build therefore needs no Python headers, and works with
// all supported versions of CPython. Each part has an equivalent in Python, which makes the same decisions.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// ---- Python's stable ABI --------------------------------------------------------------------------------------------

typedef struct _object PyObject;
typedef intptr_t Py_ssize_t;
typedef struct {
    const char *name;
    void *function;
    int flags;
    const char *doc;
} PyMethodDef;
enum { METH_NOARGS = 4, METH_O = 8, METH_FASTCALL = 128 };

extern PyObject _Py_NoneStruct;
extern void Py_IncRef(PyObject *), Py_DecRef(PyObject *);
extern PyObject *PyCFunction_NewEx(PyMethodDef *, PyObject *, PyObject *);
extern PyObject *PyCapsule_New(void *, const char *, void (*)(PyObject *));
extern void *PyCapsule_GetPointer(PyObject *, const char *), *PyMem_Malloc(size_t), *PyMem_Realloc(void *, size_t);
extern void PyMem_Free(void *);
extern PyObject *PyErr_NoMemory(void), *PyErr_Occurred(void);
extern PyObject *PyObject_GetAttr(PyObject *, PyObject *), *PyObject_CallMethodObjArgs(PyObject *, PyObject *, ...);
extern int PyObject_SetAttr(PyObject *, PyObject *, PyObject *);
extern PyObject *PyUnicode_InternFromString(const char *), *PyBytes_FromStringAndSize(const char *, Py_ssize_t);
extern PyObject *PyLong_FromLongLong(long long), *PyFloat_FromDouble(double), *PyBool_FromLong(long);
extern long long PyLong_AsLongLong(PyObject *);
extern double PyFloat_AsDouble(PyObject *);
extern PyObject *PyTuple_New(Py_ssize_t), *PyTuple_GetItem(PyObject *, Py_ssize_t);
extern int PyTuple_SetItem(PyObject *, Py_ssize_t, PyObject *);
extern Py_ssize_t PyTuple_Size(PyObject *), PyList_Size(PyObject *);
extern PyObject *PyList_GetItem(PyObject *, Py_ssize_t), *PyDict_GetItemWithError(PyObject *, PyObject *);
extern PyObject *PyList_New(Py_ssize_t);
extern int PyList_Append(PyObject *, PyObject *), PyDict_SetItem(PyObject *, PyObject *, PyObject *);
extern int PyDict_DelItem(PyObject *, PyObject *);
extern Py_ssize_t PyDict_Size(PyObject *), PyObject_Hash(PyObject *);

#define NONE (&_Py_NoneStruct)

static struct {
    PyObject *usage, *touch, *used, *lost, *parent, *node, *num_blocks, *start, *key, *began, *num_matched, *chain,
        *salt, *cells, *labels, *numbers, *cell, *domain, *key_at, *zero;
} names;

static int find_names(void) {
    if (names.zero) return 1;
    const char *texts[] = {"usage", "touch",       "used",  "lost", "parent", "node",   "num_blocks", "start",  "key",
                           "began", "num_matched", "chain", "salt", "cells",  "labels", "numbers",    "cell", "domain",
                           "key_at"};
    PyObject **each = &names.usage;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (!(each[i] = PyUnicode_InternFromString(texts[i]))) return 0;
    return (names.zero = PyLong_FromLongLong(0)) != NULL;
}

// Set an item of a tuple, and take over the reference to `object`. Returns 0 after an error, or if an argument is NULL.
static int set_item_of(PyObject *tuple, Py_ssize_t at, PyObject *object) {
    if (tuple && object) return !PyTuple_SetItem(tuple, at, object);
    if (object) Py_DecRef(object);
    return 0;
}

static int64_t int_of(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    if (!value) return -1;
    int64_t number = PyLong_AsLongLong(value);
    Py_DecRef(value);
    return number;
}

// Make room for `count` elements of `size` bytes. A capacity that grows at least doubles. Returns 0 if out of memory.
static int reserve(void **data, int64_t *capacity, int64_t count, size_t size) {
    if (count <= *capacity) return 1;
    int64_t wanted = 2 * *capacity > count ? 2 * *capacity : count < 16 ? 16 : count;
    void *grown = PyMem_Realloc(*data, (size_t)wanted * size);
    if (!grown) return 0;
    *data = grown, *capacity = wanted;
    return 1;
}
#define RESERVE(array, capacity, count) reserve((void **)&(array), &(capacity), count, sizeof *(array))

// ---- state that Python and C share: TrackerState in native.py ----------------------------------------------------

enum { NUM_BUCKETS = 28, MAX_CELLS = 256, MAX_USES = 4 };
enum { BLOCKS_BIT = 3, NUMBER_BIT = 23, MAX_GHOST = (1 << 20) - 1 };

typedef struct {
    double now, lowest;
    int64_t version, is_lru, capacity;
    int64_t next, oldest, frontier, num_in_lru;
    int64_t num_requests, num_blocks, num_hits, num_lru_hits, until_fit;
    int64_t num_touches, ring, max_runs, guard_requests, running;
    int32_t *left;
    const double *ends, *values, *floors, *rises_until;
    const int64_t *uses_bin;
} Tracker;

// Return the bucket of an age: the number of ends that the age has reached. The last end is infinite.
static int bucket_of(const double *ends, double age) {
    int low = 0, high = NUM_BUCKETS - 1;
    while (low < high) {
        int middle = (low + high) / 2;
        if (age < ends[middle])
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

// The last step of kvtier.index.reuse.gittins: the best ratio for each of `num_rows` classes and each first bucket.
void kvtier_best_ratios(int64_t num_rows, const double *hits, const double *seconds, double *best) {
    for (int64_t row = 0; row < num_rows; row++, hits += NUM_BUCKETS + 1, seconds += NUM_BUCKETS + 1)
        for (int first = 0; first < NUM_BUCKETS; first++) {
            double most = 0.0;
            for (int stop = first + 1; stop <= NUM_BUCKETS; stop++) {
                double spent = seconds[stop] - seconds[first];
                double ratio = (hits[stop] - hits[first]) / (spent > 1e-300 ? spent : 1e-300);
                most = ratio > most ? ratio : most;
            }
            *best++ = most;
        }
}

#include "native_policy.h"
#include "native_tracker.h"
#include "native_shadow.h"
