/* The compiled part of the conductor: what a decision computes for every prefill worker, in one pass, and which row of
 * the index a block has.
 *
 * Optional: services/conductor/core/survey.py has the first with arrays and table.py the second with a dictionary, and
 * they explain it. Both come to the same numbers bit for bit, so operations are in the same order here as there, and
 * must not be contracted (-ffp-contract=off).
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { API = 3 };

/* -- the survey ---------------------------------------------------------------------------------------------------- */

/* Rows of a board's cells; see _prefill_cells in board.py. */
enum { BEHIND, FIRST_END, FIRST_LEAST, UNEXPLAINED_END, FIXED, TOKEN, SQUARE, LINK_FIXED, LINK_BYTE, SINCE, TAUGHT,
       CELLS };

/* Rows of the answer; see survey.py. */
enum { OWN, PREFILL, RANKED, QUEUE, DELAYS, YIELDS, ALONE, REST, PULL, BOUND, ANSWERS };

typedef struct {
    /* the prompt */
    double now, since, tokens, covered;
    /* the board */
    double block_tokens, block_bytes;
    /* the order of queues */
    double stretch, most;
    /* the policy */
    double margin, late, behind, trust, regard, fetch_gain, beside;
} Terms;

typedef struct {
    const double *ranks, *lefts, *spares; /* of one worker's queue; ``step`` apart */
    Py_ssize_t step, length;
    double front, front_rank; /* seconds left of the one that is computed, and its rank */
    double count;             /* requests in the queue */
} Queue;

typedef struct {
    double queue, delayed, yields;
} Line;

static double least(double one, double other) { return one < other ? one : other; }
static double greatest(double one, double other) { return one > other ? one : other; }

static double rank_of(const Terms *t, double since, double left) { return since + least(t->stretch * left, t->most); }

/* Where a prompt comes that needs so many seconds. */
static Line line_of(const Terms *t, const Queue *q, double prefill, int is_due)
{
    double rank = rank_of(t, t->since, prefill);
    Line line = {0.0, 0.0, 0.0};
    if (is_due) {
        double behind = -INFINITY, limit = prefill + t->margin;
        for (Py_ssize_t i = 0; i < q->length; i++) {
            double spare = q->spares[i * q->step];
            if (spare < limit && spare > -t->late)
                behind = greatest(behind, i ? q->ranks[i * q->step] : q->front_rank);
        }
        if (behind > rank)
            line.yields = behind + t->behind - rank;
        rank += line.yields;
    }
    double ahead = 0.0;
    if (q->front_rank <= rank) {
        line.queue += q->front;
        ahead += 1.0;
    }
    for (Py_ssize_t i = 1; i < q->length; i++) {
        if (q->ranks[i * q->step] <= rank) {
            line.queue += q->lefts[i * q->step];
            ahead += 1.0;
        }
    }
    line.delayed = q->count - ahead;
    return line;
}

static double seconds(double fixed, double token, double square, double tokens, double hit)
{
    return fixed + (tokens - hit) * (token + square * (tokens + hit));
}

/* Fills the row of leading blocks. Returns -1 with an exception. */
static int fill_own(double *own, Py_ssize_t count, PyObject *blocks, PyObject *places)
{
    Py_ssize_t at = 0;
    PyObject *worker, *number;
    for (Py_ssize_t i = 0; i < count; i++)
        own[i] = 0.0;
    while (PyDict_Next(blocks, &at, &worker, &number)) {
        PyObject *found = PyDict_GetItemWithError(places, worker);
        if (!found) {
            if (PyErr_Occurred())
                return -1;
            continue;
        }
        Py_ssize_t place = PyLong_AsSsize_t(found);
        double value = PyLong_AsDouble(number);
        if (PyErr_Occurred())
            return -1;
        if (place < 0 || place >= count) {
            PyErr_SetString(PyExc_ValueError, "a place that is not on the board");
            return -1;
        }
        own[place] = value;
    }
    return 0;
}

/* Overwrites ranked[place] by what it is ranked by, {place: seconds}. Returns -1 with an exception. */
static int fill_ranked(double *ranked, Py_ssize_t count, PyObject *seconds_of)
{
    Py_ssize_t at = 0;
    PyObject *key, *value;
    for (Py_ssize_t i = 0; i < count; i++)
        ranked[i] = NAN;
    while (PyDict_Next(seconds_of, &at, &key, &value)) {
        Py_ssize_t place = PyLong_AsSsize_t(key);
        double taken = PyFloat_AsDouble(value);
        if (PyErr_Occurred())
            return -1;
        if (place < 0 || place >= count) {
            PyErr_SetString(PyExc_ValueError, "a place that is not on the board");
            return -1;
        }
        ranked[place] = taken;
    }
    return 0;
}

/* Whether the sizes of a board's arrays can be computed at all. Returns -1 with an exception where not. */
static int check_sizes(Py_ssize_t workers, Py_ssize_t room)
{
    if (workers >= 0 && workers <= PY_SSIZE_T_MAX / 8 / CELLS && room >= 1
        && room <= PY_SSIZE_T_MAX / 24 / (workers + 1))
        return 0;
    PyErr_SetString(PyExc_ValueError, "a board that no memory could hold, or whose queues have no room");
    return -1;
}

#define DOUBLES "d"
#define INT64S "lq" /* either is what C calls it on some platform */

/* A contiguous matrix of cells of 8 bytes, in one of ``formats`` of Python's struct; or -1 with an exception. */
static int get_matrix(PyObject *from, Py_buffer *view, const char *formats, Py_ssize_t cells, int flags)
{
    if (PyObject_GetBuffer(from, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | flags))
        return -1;
    const char *format = view->format;
    if (view->itemsize != 8 || view->len < cells * 8 || !format || !format[0] || format[1]
        || !strchr(formats, format[0])) {
        PyErr_Format(PyExc_ValueError, "an array of %zd bytes of \"%s\", expected %zd cells of \"%s\"", view->len,
                     format ? format : "B", cells, formats);
        PyBuffer_Release(view);
        return -1;
    }
    return 0;
}

PyDoc_STRVAR(fill_survey_doc,
"fill_survey(cells, queues, room, lengths, counts, answers, own, places, ranked, known, terms)\n--\n\n"
"Fills ``answers``, doubles[10][workers], for a board of ``cells``, double[11][workers], and ``queues``,\n"
"double[3][room][workers]; see services/conductor/core/survey.py. Answers whether anybody is due, the longest queue,\n"
"the least cost, and the time to the first token where it would be best if everybody held all.");

static PyObject *fill_survey(PyObject *self, PyObject *args)
{
    PyObject *cells_from, *queues_from, *lengths_from, *counts_from, *answers_from, *blocks, *places, *ranked, *known;
    Py_ssize_t room;
    Terms t;
    double fixed = 0.0, token = 0.0, square = 0.0;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOnOOOO!O!O!O(ddddddddddddddd)", &cells_from, &queues_from, &room, &lengths_from,
                          &counts_from, &answers_from, &PyDict_Type, &blocks, &PyDict_Type, &places, &PyDict_Type,
                          &ranked, &known, &t.now, &t.since, &t.tokens, &t.covered, &t.block_tokens, &t.block_bytes,
                          &t.stretch, &t.most, &t.margin, &t.late, &t.behind, &t.trust, &t.regard, &t.fetch_gain,
                          &t.beside))
        return NULL;
    if (known != Py_None && !PyArg_ParseTuple(known, "ddd", &fixed, &token, &square))
        return NULL;
    const Py_ssize_t n = PyDict_GET_SIZE(places);
    Py_buffer cells, queues, lengths, counts, answers;
    PyObject *result = NULL;
    if (check_sizes(n, room) || get_matrix(cells_from, &cells, DOUBLES, CELLS * n, 0))
        return NULL;
    if (get_matrix(queues_from, &queues, DOUBLES, 3 * room * n, 0))
        goto no_queues;
    if (get_matrix(lengths_from, &lengths, INT64S, n, 0))
        goto no_lengths;
    if (get_matrix(counts_from, &counts, DOUBLES, n, 0))
        goto no_counts;
    if (get_matrix(answers_from, &answers, DOUBLES, ANSWERS * n, PyBUF_WRITABLE))
        goto no_answers;

    const double *cell = cells.buf, *queue = queues.buf, *count = counts.buf;
    const int64_t *length = lengths.buf;
    double *answer = answers.buf;
    if (fill_own(answer + OWN * n, n, blocks, places) || fill_ranked(answer + RANKED * n, n, ranked))
        goto done;
    int is_due = 0;
    for (Py_ssize_t w = 0; w < n; w++) {
        if (length[w] < 1 || length[w] > room) {
            PyErr_SetString(PyExc_ValueError, "a queue that is longer than its room");
            goto done;
        }
        for (Py_ssize_t i = 0; i < length[w] && !is_due; i++)
            is_due = queue[(2 * room + i) * n + w] < INFINITY;
    }
    const int may_pull = t.covered > 0;
    double longest = -INFINITY, cheapest = INFINITY, best = INFINITY, held = INFINITY;
    for (Py_ssize_t w = 0; w < n; w++) {
        const double *c = cell + w;
        double own = answer[OWN * n + w], ranked_by = answer[RANKED * n + w];
        int is_known = known != Py_None && t.now - c[TAUGHT * n] > t.trust;
        double hit = own * t.block_tokens;
        double prefill = seconds(c[FIXED * n], c[TOKEN * n], c[SQUARE * n], t.tokens, hit);
        if (is_known)
            prefill = least(prefill, seconds(fixed, token, square, t.tokens, hit));
        Queue q = {queue + w, queue + room * n + w, queue + 2 * room * n + w, n, length[w], 0.0, 0.0, count[w]};
        q.front = greatest(c[FIRST_END * n] - t.now, c[FIRST_LEAST * n])
            + greatest(c[UNEXPLAINED_END * n] - t.now, 0.0);
        q.front_rank = rank_of(&t, c[SINCE * n], q.front);
        double ranked_s = isnan(ranked_by) ? prefill : ranked_by;
        Line line = line_of(&t, &q, ranked_s, is_due);
        double delays = line.delayed * prefill, alone = line.queue + prefill + t.regard * delays;
        answer[PREFILL * n + w] = prefill;
        answer[RANKED * n + w] = ranked_s;
        answer[QUEUE * n + w] = line.queue;
        answer[DELAYS * n + w] = delays;
        answer[YIELDS * n + w] = line.yields;
        answer[ALONE * n + w] = alone;
        longest = greatest(longest, line.queue);
        cheapest = least(cheapest, alone);
        if (!may_pull)
            continue;
        double all = greatest(own, t.covered), all_hit = all * t.block_tokens;
        double rest = seconds(c[FIXED * n], c[TOKEN * n], c[SQUARE * n], t.tokens, all_hit);
        if (is_known)
            rest = least(rest, seconds(fixed, token, square, t.tokens, all_hit));
        Line rest_line = line_of(&t, &q, isnan(ranked_by) ? rest : ranked_by, is_due);
        double pull = c[LINK_FIXED * n] + c[LINK_BYTE * n] * ((all - own) * t.block_bytes);
        double matters = rest * (1.0 + t.regard * rest_line.delayed);
        int is_worth = prefill - rest >= t.fetch_gain * greatest(pull - rest_line.queue, t.beside * pull);
        answer[REST * n + w] = rest;
        answer[PULL * n + w] = pull;
        answer[BOUND * n + w] = is_worth ? greatest(rest_line.queue, pull) + matters : INFINITY;
        if (rest_line.queue + matters < best) {
            best = rest_line.queue + matters;
            held = rest_line.queue + rest;
        }
    }
    result = Py_BuildValue("Oddd", is_due ? Py_True : Py_False, longest, cheapest, held);
done:
    PyBuffer_Release(&answers);
no_answers:
    PyBuffer_Release(&counts);
no_counts:
    PyBuffer_Release(&lengths);
no_lengths:
    PyBuffer_Release(&queues);
no_queues:
    PyBuffer_Release(&cells);
    return result;
}

PyDoc_STRVAR(write_doc,
"write(cells, queues, room, lengths, counts, workers, place, row, waiting, spare_s)\n--\n\n"
"Writes all that is known of the worker at ``place``; see board.py. ``waiting`` has less than ``room`` of\n"
"(rank, seconds of computing, seconds to spare).");

static PyObject *write_worker(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 10 || !PyTuple_Check(args[7]) || PyTuple_GET_SIZE(args[7]) != CELLS || !PyTuple_Check(args[8])) {
        PyErr_SetString(PyExc_TypeError, "write(cells, queues, room, lengths, counts, workers, place, row, waiting, "
                                         "spare_s)");
        return NULL;
    }
    const Py_ssize_t room = PyLong_AsSsize_t(args[2]), n = PyLong_AsSsize_t(args[5]), w = PyLong_AsSsize_t(args[6]);
    const Py_ssize_t length = 1 + PyTuple_GET_SIZE(args[8]);
    const double spare = PyFloat_AsDouble(args[9]);
    if (PyErr_Occurred())
        return NULL;
    if (w < 0 || w >= n || length > room) {
        PyErr_SetString(PyExc_ValueError, "a place or a queue that is not on the board");
        return NULL;
    }
    Py_buffer cells, queues, lengths, counts;
    PyObject *result = NULL;
    if (check_sizes(n, room) || get_matrix(args[0], &cells, DOUBLES, CELLS * n, PyBUF_WRITABLE))
        return NULL;
    if (get_matrix(args[1], &queues, DOUBLES, 3 * room * n, PyBUF_WRITABLE))
        goto no_queues;
    if (get_matrix(args[3], &lengths, INT64S, n, PyBUF_WRITABLE))
        goto no_lengths;
    if (get_matrix(args[4], &counts, DOUBLES, n, PyBUF_WRITABLE))
        goto no_counts;
    double *cell = cells.buf, *queue = queues.buf, *ranks = queue + w, *lefts = ranks + room * n,
           *spares = lefts + room * n, *count = counts.buf;
    int64_t *known = lengths.buf;
    for (Py_ssize_t i = 0; i < CELLS; i++)
        cell[i * n + w] = PyFloat_AsDouble(PyTuple_GET_ITEM(args[7], i));
    spares[0] = spare;
    for (Py_ssize_t i = 1; i < length && !PyErr_Occurred(); i++) {
        PyObject *one = PyTuple_GET_ITEM(args[8], i - 1);
        if (!PyTuple_Check(one) || PyTuple_GET_SIZE(one) != 3) {
            PyErr_SetString(PyExc_TypeError, "who waits has three numbers");
            break;
        }
        ranks[i * n] = PyFloat_AsDouble(PyTuple_GET_ITEM(one, 0));
        lefts[i * n] = PyFloat_AsDouble(PyTuple_GET_ITEM(one, 1));
        spares[i * n] = PyFloat_AsDouble(PyTuple_GET_ITEM(one, 2));
    }
    if (PyErr_Occurred())
        goto done;
    for (Py_ssize_t i = length; i < known[w] && i < room; i++)
        ranks[i * n] = spares[i * n] = INFINITY, lefts[i * n] = 0.0;
    known[w] = length;
    count[w] = (double)length - (cell[SINCE * n + w] == INFINITY);
    result = Py_None;
    Py_INCREF(result);
done:
    PyBuffer_Release(&counts);
no_counts:
    PyBuffer_Release(&lengths);
no_lengths:
    PyBuffer_Release(&queues);
no_queues:
    PyBuffer_Release(&cells);
    return result;
}

/* -- {fingerprint: row} ------------------------------------------------------------------------------------------ */

/* Open addressing, linear probing. A place follows from the leading bits of the product, so a table that doubles is
 * read and written from its beginning to its end; and a question for many blocks asks for the memory of those to come
 * before it looks at the first, which is what takes the time in a dictionary of millions. */
typedef struct {
    uint64_t print; /* NOBODY where there is none */
    int64_t row;
} Entry;

typedef struct {
    PyObject_HEAD
    Entry *entries;
    int bits; /* 2^bits entries */
    Py_ssize_t used;
} Table;

static const uint64_t NOBODY = UINT64_MAX;
enum { FEWEST_BITS = 4, AHEAD = 16 };

static size_t home_of(const Table *self, uint64_t print)
{
    return (size_t)((print * UINT64_C(0x9E3779B97F4A7C15)) >> (64 - self->bits));
}

/* Where it is, or where it would be put. */
static Entry *find(const Table *self, uint64_t print)
{
    size_t mask = ((size_t)1 << self->bits) - 1, at = home_of(self, print);
    while (self->entries[at].print != print && self->entries[at].print != NOBODY)
        at = (at + 1) & mask;
    return &self->entries[at];
}

static Entry *empty_entries(int bits)
{
    size_t nbytes = sizeof(Entry) << bits;
    Entry *entries = PyMem_RawMalloc(nbytes);
    if (entries)
        memset(entries, 0xff, nbytes);
    else
        PyErr_NoMemory();
    return entries;
}

/* Room for one more; seven of ten places are taken at the most. Returns -1 with an exception. */
static int make_room(Table *self)
{
    size_t places = (size_t)1 << self->bits;
    if ((size_t)(self->used + 1) * 10 <= places * 7)
        return 0;
    Entry *old = self->entries, *entries = empty_entries(self->bits + 1);
    if (!entries)
        return -1;
    self->entries = entries;
    self->bits++;
    for (size_t i = 0; i < places; i++)
        if (old[i].print != NOBODY)
            *find(self, old[i].print) = old[i];
    PyMem_RawFree(old);
    return 0;
}

static void drop(Table *self, uint64_t print)
{
    size_t mask = ((size_t)1 << self->bits) - 1;
    Entry *found = find(self, print);
    if (found->print == NOBODY)
        return;
    self->used--;
    size_t hole = (size_t)(found - self->entries);
    for (size_t at = (hole + 1) & mask; self->entries[at].print != NOBODY; at = (at + 1) & mask) {
        size_t home = home_of(self, self->entries[at].print);
        if (((at - home) & mask) >= ((at - hole) & mask)) { /* the hole is on its way from home */
            self->entries[hole] = self->entries[at];
            hole = at;
        }
    }
    self->entries[hole].print = NOBODY;
}

/* A fingerprint. Returns -1 with an exception. */
static int get_print(PyObject *from, uint64_t *print)
{
    *print = PyLong_AsUnsignedLongLong(from);
    if (*print == NOBODY) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "no fingerprint has 64 bits");
        return -1;
    }
    return 0;
}

/* The fingerprints of an iterable, to be freed; NULL with an exception. */
static uint64_t *get_prints(PyObject *blocks, Py_ssize_t *count)
{
    PyObject *list = PySequence_Fast(blocks, "blocks are no sequence");
    if (!list)
        return NULL;
    *count = PySequence_Fast_GET_SIZE(list);
    uint64_t *prints = PyMem_Malloc(sizeof(uint64_t) * (size_t)(*count + 1));
    for (Py_ssize_t i = 0; prints && i < *count; i++) {
        if (get_print(PySequence_Fast_GET_ITEM(list, i), &prints[i])) {
            PyMem_Free(prints);
            Py_DECREF(list);
            return NULL;
        }
    }
    Py_DECREF(list);
    if (!prints)
        PyErr_NoMemory();
    return prints;
}

static void ask_ahead(const Table *self, const uint64_t *prints, Py_ssize_t count, Py_ssize_t at)
{
#if defined(__GNUC__)
    if (at < count)
        __builtin_prefetch(&self->entries[home_of(self, prints[at])]);
#else
    (void)self, (void)prints, (void)count, (void)at;
#endif
}

PyDoc_STRVAR(rows_doc, "rows(blocks)\n--\n\nThe row of each, None where there is none.");

static PyObject *table_rows(Table *self, PyObject *blocks)
{
    Py_ssize_t count;
    uint64_t *prints = get_prints(blocks, &count);
    PyObject *rows = prints ? PyList_New(count) : NULL, *number = NULL;
    int64_t last = -1;
    for (Py_ssize_t i = 0; i < AHEAD && rows; i++)
        ask_ahead(self, prints, count, i);
    for (Py_ssize_t i = 0; rows && i < count; i++) {
        ask_ahead(self, prints, count, i + AHEAD);
        const Entry *found = find(self, prints[i]);
        if (found->print == NOBODY) {
            Py_INCREF(Py_None);
            PyList_SET_ITEM(rows, i, Py_None);
            continue;
        }
        if (!number || found->row != last) { /* neighbours mostly share a row */
            Py_XSETREF(number, PyLong_FromLongLong(found->row));
            last = found->row;
        }
        if (!number) {
            Py_CLEAR(rows);
        } else {
            Py_INCREF(number);
            PyList_SET_ITEM(rows, i, number);
        }
    }
    Py_XDECREF(number);
    PyMem_Free(prints);
    return rows;
}

PyDoc_STRVAR(stretches_doc,
"stretches(prints)\n--\n\n"
"[(place of the first block, row)] of stretches of blocks of one row, until the first that has none: its row is 0.\n"
"``prints`` is a buffer of 64-bit integers.");

static PyObject *table_stretches(Table *self, PyObject *from)
{
    Py_buffer view;
    if (PyObject_GetBuffer(from, &view, PyBUF_SIMPLE))
        return NULL;
    const uint64_t *prints = view.buf;
    Py_ssize_t count = view.len / (Py_ssize_t)sizeof(uint64_t);
    PyObject *stretches = PyList_New(0);
    int64_t last = -1;
    for (Py_ssize_t i = 0; i < AHEAD && stretches; i++)
        ask_ahead(self, prints, count, i);
    for (Py_ssize_t i = 0; stretches && i < count && last; i++) {
        ask_ahead(self, prints, count, i + AHEAD);
        const Entry *found = find(self, prints[i]);
        int64_t row = found->print == NOBODY ? 0 : found->row;
        if (row == last)
            continue;
        last = row;
        PyObject *stretch = Py_BuildValue("nL", i, (long long)row);
        if (!stretch || PyList_Append(stretches, stretch))
            Py_CLEAR(stretches);
        Py_XDECREF(stretch);
    }
    PyBuffer_Release(&view);
    return stretches;
}

PyDoc_STRVAR(put_doc, "put(blocks, row)\n--\n\nThey have this row from now on.");

static PyObject *table_put(Table *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "put(blocks, row)");
        return NULL;
    }
    Py_ssize_t count;
    int64_t row = PyLong_AsLongLong(args[1]);
    if (row == -1 && PyErr_Occurred())
        return NULL;
    uint64_t *prints = get_prints(args[0], &count);
    if (!prints)
        return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (make_room(self)) {
            PyMem_Free(prints);
            return NULL;
        }
        ask_ahead(self, prints, count, i + AHEAD);
        Entry *found = find(self, prints[i]);
        self->used += found->print == NOBODY;
        *found = (Entry){prints[i], row};
    }
    PyMem_Free(prints);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(drop_doc, "drop(blocks)\n--\n\nThey have no row any more.");

static PyObject *table_drop(Table *self, PyObject *blocks)
{
    Py_ssize_t count;
    uint64_t *prints = get_prints(blocks, &count);
    if (!prints)
        return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        ask_ahead(self, prints, count, i + AHEAD);
        drop(self, prints[i]);
    }
    PyMem_Free(prints);
    Py_RETURN_NONE;
}

/* Goes over a table by the places where its blocks are at home. Those never change but by doubling, when each becomes
 * two neighbours; so nobody is passed over or met twice for being moved or for the table having grown. */
typedef struct {
    PyObject_HEAD
    Table *table; /* NULL when all was seen */
    uint64_t seen; /* homes, as the leading bits of products are: before this one everybody was met */
    uint64_t count;
} Sweep;

static PyTypeObject SweepType;

PyDoc_STRVAR(sweep_doc, "sweep(count)\n--\n\nAll blocks, of ``count`` places at a time.");

static PyObject *table_sweep(Table *self, PyObject *from)
{
    Py_ssize_t count = PyLong_AsSsize_t(from);
    if (count < 1) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "no places at a time");
        return NULL;
    }
    Sweep *sweep = PyObject_New(Sweep, &SweepType);
    if (sweep) {
        sweep->table = (Table *)Py_NewRef(self);
        sweep->seen = 0;
        sweep->count = (uint64_t)count;
    }
    return (PyObject *)sweep;
}

static void sweep_dealloc(Sweep *self)
{
    Py_XDECREF(self->table);
    PyObject_Free(self);
}

static PyObject *sweep_next(Sweep *self)
{
    Table *table = self->table;
    if (!table)
        return NULL;
    PyObject *blocks = PyList_New(0);
    if (!blocks)
        return NULL;
    const size_t places = (size_t)1 << table->bits, mask = places - 1, start = (size_t)(self->seen >> (64 - table->bits));
    const size_t end = self->count < places - start ? start + (size_t)self->count : places;
    /* beyond the end are those who did not find their home empty */
    for (size_t at = start; at < end || table->entries[at & mask].print != NOBODY; at++) {
        uint64_t print = table->entries[at & mask].print;
        if (print == NOBODY)
            continue;
        size_t away = (at - home_of(table, print)) & mask;
        if (at < start + away || at - away >= end)
            continue;
        PyObject *block = PyLong_FromUnsignedLongLong(print);
        if (!block || PyList_Append(blocks, block)) {
            Py_XDECREF(block);
            Py_DECREF(blocks);
            return NULL;
        }
        Py_DECREF(block);
    }
    if (end == places)
        Py_CLEAR(self->table);
    else
        self->seen = (uint64_t)end << (64 - table->bits);
    return blocks;
}

static PyTypeObject SweepType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "services.conductor.core._native.Sweep",
    .tp_basicsize = sizeof(Sweep),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)sweep_dealloc,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = (iternextfunc)sweep_next,
};

static PyObject *table_sizeof(Table *self, PyObject *nothing)
{
    (void)nothing;
    return PyLong_FromSize_t(sizeof(Table) + (sizeof(Entry) << self->bits));
}

static Py_ssize_t table_length(Table *self) { return self->used; }

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "", names))
        return NULL;
    Table *self = (Table *)type->tp_alloc(type, 0);
    if (self) {
        self->bits = FEWEST_BITS;
        self->entries = empty_entries(FEWEST_BITS);
        if (!self->entries)
            Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static void table_dealloc(Table *self)
{
    PyMem_RawFree(self->entries);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef table_methods[] = {
    {"rows", (PyCFunction)table_rows, METH_O, rows_doc},
    {"stretches", (PyCFunction)table_stretches, METH_O, stretches_doc},
    {"put", (PyCFunction)(void (*)(void))table_put, METH_FASTCALL, put_doc},
    {"drop", (PyCFunction)table_drop, METH_O, drop_doc},
    {"sweep", (PyCFunction)table_sweep, METH_O, sweep_doc},
    {"__sizeof__", (PyCFunction)table_sizeof, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PySequenceMethods table_as_sequence = {.sq_length = (lenfunc)table_length};

PyDoc_STRVAR(table_doc, "Table()\n--\n\n{fingerprint: row}; see services/conductor/core/table.py.");

static PyTypeObject TableType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "services.conductor.core._native.Table",
    .tp_doc = table_doc,
    .tp_basicsize = sizeof(Table),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = table_new,
    .tp_dealloc = (destructor)table_dealloc,
    .tp_methods = table_methods,
    .tp_as_sequence = &table_as_sequence,
};

static PyMethodDef methods[] = {
    {"fill_survey", fill_survey, METH_VARARGS, fill_survey_doc},
    {"write", (PyCFunction)(void (*)(void))write_worker, METH_FASTCALL, write_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "services.conductor.core._native",
    .m_doc = "The compiled part of the conductor; see services/conductor/core/native.py.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made && (PyModule_AddIntConstant(made, "API", API) || PyModule_AddType(made, &TableType)
                 || PyType_Ready(&SweepType)))
        Py_CLEAR(made);
    return made;
}
