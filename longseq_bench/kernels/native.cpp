// Attention of tiles of queries to runs of keys, forward and backward, for CPUs.
//
// FlashAttention's online softmax (arXiv 2205.14135, 2307.08691) with queries in the lanes of a
// vector register. A tile of queries is transposed once; each key is then multiplied into it in
// place, one broadcast element at a time. Keys and values are never packed or gathered, so a
// scattered row costs as much as a run of neighbours, and maxima and sums over keys need no
// shuffles.
//
// There is no global or thread-local state: every thread calls the same function on the same
// Problem and takes units of work from its counter. Shapes as in native.py.

#include "lanes.h"

#if LANES == 8
#define BATCH 4
#else
#define BATCH 8
#endif

#define VECTORS 2
#define GROUP (LANES * VECTORS)  // queries multiplied together
#define ROWS 128                 // queries of a tile
#define KEYS 128                 // keys per update of the maximum
// A smaller block would come from the heap, where a warm-up leaves pages that no peak counts.
#define SMALLEST_MAPPED (132 * 1024)

#if defined(__clang__)
#define SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, (four_ints){i, j, k, l})
#endif

typedef float four __attribute__((vector_size(16), may_alias, aligned(4)));
typedef int32_t four_ints __attribute__((vector_size(16)));

static const float LOG2E = 1.44269504088896f;

struct Problem {
    int64_t dtype, dim, batches, group, causal, wide, merge;
    float scale, cap;  // factor of q k, and soft cap of q k; 0: none
    Tensor q, k, v, out, lse, grad, dq, dk, dv;
    const int32_t *q_row, *k_row;  // row of a step; null: the step itself
    const int32_t *q_at, *k_at;    // position of a step, for causality; null: the row
    const int32_t *q_first;        // first position that a query sees; null: 0
    int64_t tiles, tile_step;
    const int32_t *tile_start, *tile_count;
    const int64_t *runs;  // of each tile: start[runs[t]] ... start[runs[t + 1] - 1]
    const int32_t *start, *count, *step;
    int64_t heads;
    const int32_t *head;
    int64_t kv_heads, parts;
    const int32_t *kv_head;
    int64_t *counter;  // units of work taken, and threads started
    uint8_t *locks;
    float *bias;  // (batches, heads of the list, runs): sums of score gradients
    char *scratch;  // working memory of all threads
};

// Working memory of a thread; sizes follow the padded head_dim.
struct Scratch {
    float *q, *o;           // transposed: q[d][row]
    float *g;               // output gradient, transposed
    float *q_row, *g_row;   // both in rows, padded to GROUP
    float *s, *t;           // scores, and gradients of them: s[key][row]
    float *k, *v;           // converted keys and values
    float *sum;             // BATCH rows of gradients
    float *m, *l, *delta;   // of each row: largest score, sum of weights, sum of out * gradient
    int32_t *at, *row, *from;  // position, row, and first position that it sees
};

struct Chunk {
    const float *k[KEYS], *v[KEYS];
    int32_t row[KEYS], at[KEYS];
    int64_t run[KEYS];
    int32_t first, last;  // the smallest and the largest position
    int count;
};

INLINE void narrow(float x, float *to) { *to = x; }
INLINE void narrow(float x, bfloat16 *to) {
    union { float f; uint32_t i; } u = {x};
    // round to nearest, ties to even; NaN stays NaN
    to->bits = x != x ? 0x7fc0 : (u.i + 0x7fff + ((u.i >> 16) & 1)) >> 16;
}
#if defined(__FLT16_MAX__)
INLINE void narrow(float x, _Float16 *to) { *to = (_Float16)x; }
#endif

INLINE vec &at(float *p, int x) { return *(vec *)(p + x * LANES); }
INLINE int up(int n, int to) { return (n + to - 1) / to * to; }

// out[j][GROUP] = sum over i of a[j][i] b[i][GROUP], for BATCH rows of a.
INLINE void rows_times(const float *const *a, const float *b, int ldb, int n, float *out, int ldo) {
    const float *p[BATCH];
    vec c[BATCH][VECTORS];
    UNROLL for (int j = 0; j < BATCH; j++) {
        p[j] = a[j];
        UNROLL for (int x = 0; x < VECTORS; x++) c[j][x] = (vec){0};
    }
    for (int i = 0; i < n; i++) {
        vec r[VECTORS];
        UNROLL for (int x = 0; x < VECTORS; x++) r[x] = *(const vec *)(b + i * ldb + x * LANES);
        UNROLL for (int j = 0; j < BATCH; j++)
            UNROLL for (int x = 0; x < VECTORS; x++) c[j][x] += p[j][i] * r[x];
    }
    UNROLL for (int j = 0; j < BATCH; j++)
        UNROLL for (int x = 0; x < VECTORS; x++) at(out + j * ldo, x) = c[j][x];
}

// out[d][GROUP] = keep out + sum over keys of a[key][d] b[key][GROUP], for BATCH d.
INLINE void columns_times(
    const float *const *a, int d, const float *b, int ldb, int n, const vec *keep, float *out,
    int ldo) {
    vec c[BATCH][VECTORS];
    UNROLL for (int j = 0; j < BATCH; j++)
        UNROLL for (int x = 0; x < VECTORS; x++) c[j][x] = at(out + (d + j) * ldo, x) * keep[x];
    for (int i = 0; i < n; i++) {
        const float *p = a[i] + d;
        vec r[VECTORS];
        UNROLL for (int x = 0; x < VECTORS; x++) r[x] = *(const vec *)(b + i * ldb + x * LANES);
        UNROLL for (int j = 0; j < BATCH; j++)
            UNROLL for (int x = 0; x < VECTORS; x++) c[j][x] += p[j] * r[x];
    }
    UNROLL for (int j = 0; j < BATCH; j++)
        UNROLL for (int x = 0; x < VECTORS; x++) at(out + (d + j) * ldo, x) = c[j][x];
}


template <class T>
INLINE T *row_of(const Tensor &t, int64_t b, int64_t h, int64_t n) {
    return (T *)t.data + b * t.batch + h * t.head + n * t.token;
}

template <class T>
INLINE void widen(const T *from, float *to, int dim, int padded) {
    for (int d = 0; d < dim; d++) to[d] = wide(from[d]);
    for (int d = dim; d < padded; d++) to[d] = 0;
}

// Loads the next keys of a tile's runs; returns false at the end. `e` and `s` are the current run and step.
INLINE bool next(const Problem &p, int64_t end, int64_t &e, int64_t &s, Chunk &c) {
    c.count = 0, c.first = INT32_MAX, c.last = -1;
    while (e < end && c.count < KEYS) {
        int64_t step = p.step ? p.step[e] : 1, first = p.start[e];
        for (; s < p.count[e] && c.count < KEYS; s++, c.count++) {
            int64_t at = first + s * step;
            c.row[c.count] = p.k_row ? p.k_row[at] : at;
            c.at[c.count] = p.k_at ? p.k_at[at] : c.row[c.count];
            c.run[c.count] = e;
            c.first = c.at[c.count] < c.first ? c.at[c.count] : c.first;
            c.last = c.at[c.count] > c.last ? c.at[c.count] : c.last;
        }
        if (s == p.count[e]) e++, s = 0;
    }
    return c.count > 0;
}


template <class T>
INLINE void load_keys(const Problem &p, int64_t b, int64_t kv, Chunk &c, Scratch &w) {
    const bool direct = sizeof(T) == sizeof(float) && p.dim % BATCH == 0;
    const int padded = up(p.dim, BATCH);
    for (int j = 0; j < c.count; j++) {
        const T *k = row_of<T>(p.k, b, kv, c.row[j]), *v = row_of<T>(p.v, b, kv, c.row[j]);
        if (direct) {
            c.k[j] = (const float *)k, c.v[j] = (const float *)v;
        } else {
            widen(k, w.k + j * padded, p.dim, padded), widen(v, w.v + j * padded, p.dim, padded);
            c.k[j] = w.k + j * padded, c.v[j] = w.v + j * padded;
        }
    }
    // full batches are multiplied; results of the padding rows are ignored
    for (int j = c.count; j < up(c.count, BATCH); j++) c.k[j] = c.k[c.count - 1], c.v[j] = c.v[c.count - 1];
}

// out[j][i] = in[i][j] for 4 by 4 elements.
INLINE void transpose_four(const float *in, int64_t ldi, float *out, int64_t ldo, float scale) {
    four a = *(const four *)in * scale, b = *(const four *)(in + ldi) * scale;
    four c = *(const four *)(in + 2 * ldi) * scale, d = *(const four *)(in + 3 * ldi) * scale;
    four e = SHUFFLE(a, b, 0, 4, 1, 5), f = SHUFFLE(c, d, 0, 4, 1, 5);
    four g = SHUFFLE(a, b, 2, 6, 3, 7), h = SHUFFLE(c, d, 2, 6, 3, 7);
    *(four *)out = SHUFFLE(e, f, 0, 1, 4, 5), *(four *)(out + ldo) = SHUFFLE(e, f, 2, 3, 6, 7);
    *(four *)(out + 2 * ldo) = SHUFFLE(g, h, 0, 1, 4, 5), *(four *)(out + 3 * ldo) = SHUFFLE(g, h, 2, 3, 6, 7);
}

// Transposes rows (count, padded to GROUP) to out[d][row]; later rows keep their values.
INLINE void transpose(const float *rows, int ld, int dim, int count, float scale, float *out) {
    for (int r = 0; r < up(count, GROUP); r += 4)
        for (int d = 0; d < up(dim, BATCH); d += 4)
            transpose_four(rows + (int64_t)r * ld + d, ld, out + (int64_t)d * ROWS + r, ROWS, scale);
}

// Loads rows and positions of a tile; q is transposed and scaled for exponents of 2.
template <class T>
INLINE int load_queries(const Problem &p, int64_t b, int64_t h, int64_t tile, int64_t part, Scratch &w) {
    const int64_t left = p.tile_count[tile] - part;
    const int count = left < ROWS ? left : ROWS, ld = up(p.dim, GROUP);
    for (int r = 0; r < up(count, GROUP); r++) {
        int64_t step = p.tile_start[tile] + (part + (r < count ? r : count - 1)) * p.tile_step;
        w.row[r] = p.q_row ? p.q_row[step] : step;
        w.at[r] = p.q_at ? p.q_at[step] : w.row[r];
        w.from[r] = p.q_first ? p.q_first[step] : 0;
    }
    for (int r = 0; r < up(count, GROUP); r++)
        widen(row_of<T>(p.q, b, h, w.row[r]), w.q_row + r * ld, p.dim, ld);
    transpose(w.q_row, ld, p.dim, count, LOG2E * p.scale, w.q);
    return count;
}

// Returns true if no query of a tile sees a key of a chunk.
INLINE bool hides(const Problem &p, const Chunk &c, const Scratch &w, int count) {
    if (!p.causal) return false;
    for (int r = 0; r < count; r++)
        if (w.at[r] >= c.first && w.from[r] <= c.last) return false;
    return true;
}

// Returns the number of a chunk's keys that a group of queries may see; `hidden`: some pairs of those are masked.
INLINE int visible(const Problem &p, const Chunk &c, const Scratch &w, int g, int count, bool &hidden) {
    hidden = false;
    if (!p.causal) return c.count;
    int last = g + GROUP < count ? g + GROUP : count, keys = c.count;
    int32_t low = w.at[g], high = w.at[g], start = w.from[g];
    for (int r = g + 1; r < last; r++) {
        low = w.at[r] < low ? w.at[r] : low;
        high = w.at[r] > high ? w.at[r] : high;
        start = w.from[r] > start ? w.from[r] : start;
    }
    while (keys && c.at[keys - 1] > high) keys--;
    for (int j = 0; j < keys; j++) hidden |= c.at[j] > low || c.at[j] < start;
    return keys;
}

// s[key][GROUP]: exponents of 2, NEVER for a masked pair.
INLINE void score(const Problem &p, const Chunk &c, const Scratch &w, int g, int keys, bool hidden, float *s, int lds) {
    for (int j = 0; j < keys; j += BATCH) rows_times(c.k + j, w.q + g, ROWS, p.dim, s + j * lds, lds);
    const float cap = p.cap * p.scale * LOG2E;
    for (int j = 0; cap && j < keys; j++)
        UNROLL for (int x = 0; x < VECTORS; x++) at(s + j * lds, x) = capped(at(s + j * lds, x), cap);
    if (!hidden) return;
    for (int j = 0; j < keys; j++)
        for (int x = 0; x < VECTORS; x++) {
            const ivec last = *(const ivec *)(w.at + g + x * LANES), first = *(const ivec *)(w.from + g + x * LANES);
            vec &now = at(s + j * lds, x);
            now = (last < c.at[j]) | (first > c.at[j]) ? splat(NEVER) : now;
        }
}


// Adds one chunk of keys to the softmax of a group of queries.
INLINE void join(const Problem &p, const Chunk &c, Scratch &w, int g, int count) {
    bool hidden;
    const int keys = visible(p, c, w, g, count, hidden);
    if (!keys) return;
    score(p, c, w, g, keys, hidden, w.s, GROUP);
    vec keep[VECTORS];
    UNROLL for (int x = 0; x < VECTORS; x++) {
        vec old = at(w.m + g, x), m = old, l = {0};
        // a NaN score is never the maximum, but makes the sums NaN
        for (int j = 0; j < keys; j++) m = larger(at(w.s + j * GROUP, x), m);
        // a row without keys so far must not get exp2(NEVER - NEVER) as a weight
        vec floor = larger(splat(NEVER / 2), m);
        keep[x] = exp2v(old - floor);
        for (int j = 0; j < keys; j++) {
            vec &s = at(w.s + j * GROUP, x);
            s = exp2v(s - floor);
            l += s;
        }
        at(w.m + g, x) = m;
        at(w.l + g, x) = at(w.l + g, x) * keep[x] + l;
    }
    for (int d = 0; d < p.dim; d += BATCH) columns_times(c.v, d, w.s, GROUP, keys, keep, w.o + g, ROWS);
}

// Starts from the softmax so far: its denominator is exp(lse), its weighted sum is out.
INLINE void begin(const Problem &p, int64_t b, int64_t h, int count, Scratch &w) {
    memset(w.o, 0, sizeof(float) * up(p.dim, BATCH) * ROWS);
    for (int r = 0; r < ROWS; r++) w.m[r] = NEVER, w.l[r] = 0;
    if (!p.merge) return;
    for (int r = 0; r < count; r++) {
        float lse = *row_of<float>(p.lse, b, h, w.row[r]);
        if (lse == -INFINITY) continue;
        const float *out = row_of<float>(p.out, b, h, w.row[r]);
        w.m[r] = lse * LOG2E, w.l[r] = 1;
        for (int d = 0; d < p.dim; d++) w.o[d * ROWS + r] = out[d];
    }
}

// Writes the tile's sums o[d][row] as rows over its queries; returns the length of a row.
INLINE int sums_as_rows(const Problem &p, int count, Scratch &w) {
    const int ld = up(p.dim, BATCH);
    for (int r = 0; r < count; r += 4)
        for (int d = 0; d < ld; d += 4)
            transpose_four(w.o + (int64_t)d * ROWS + r, ROWS, w.q_row + (int64_t)r * ld + d, ld, 1);
    return ld;
}

template <class T>
INLINE void finish(const Problem &p, int64_t b, int64_t h, int count, Scratch &w) {
    const int ld = sums_as_rows(p, count, w);
    for (int r = 0; r < count; r++) {
        // a row that sees any key has a weight of 1, or NaN
        const bool saw = !(w.l[r] <= 0.5f);
        const float share = saw ? 1 / w.l[r] : 0;
        const float *from = w.q_row + r * ld;
        float *full = row_of<float>(p.out, b, h, w.row[r]);
        T *part = row_of<T>(p.out, b, h, w.row[r]);
        if (p.wide) for (int d = 0; d < p.dim; d++) full[d] = from[d] * share;
        else for (int d = 0; d < p.dim; d++) narrow(from[d] * share, part + d);
        if (p.lse.data) *row_of<float>(p.lse, b, h, w.row[r]) = saw ? w.m[r] * LN2 + logf(w.l[r]) : -INFINITY;
    }
}

// Prefetches keys and values of some rows of the next chunk during this one: hardware does not
// predict scattered rows.
template <class T>
INLINE void prefetch(const Problem &p, int64_t b, int64_t kv, const Chunk &c, int first, int rows) {
    const int bytes = p.dim * sizeof(T), last = first + rows < c.count ? first + rows : c.count;
    for (int j = first; j < last; j++) {
        const char *k = (const char *)row_of<T>(p.k, b, kv, c.row[j]);
        const char *v = (const char *)row_of<T>(p.v, b, kv, c.row[j]);
        for (int at = 0; at < bytes; at += 64) __builtin_prefetch(k + at, 0, 2), __builtin_prefetch(v + at, 0, 2);
    }
}

template <class T>
static void forward_tile(const Problem &p, int64_t b, int64_t h, int64_t tile, Scratch &w) {
    for (int64_t part = 0; part < p.tile_count[tile]; part += ROWS) {
        const int count = load_queries<T>(p, b, h, tile, part, w);
        begin(p, b, h, count, w);
        Chunk chunks[2];
        int64_t e = p.runs[tile], s = 0;
        bool more = next(p, p.runs[tile + 1], e, s, chunks[0]);
        for (int turn = 0; more; turn ^= 1) {
            Chunk &c = chunks[turn], &then = chunks[turn ^ 1];
            more = next(p, p.runs[tile + 1], e, s, then);
            if (hides(p, c, w, count)) continue;
            load_keys<T>(p, b, h / p.group, c, w);
            for (int g = 0; g < count; g += GROUP) {
                prefetch<T>(p, b, h / p.group, then, g, GROUP);
                join(p, c, w, g, count);
            }
        }
        finish<T>(p, b, h, count, w);
    }
}

// Loads the output gradient in rows and transposed, delta = sum(out * gradient), and lse as exponents of 2.
template <class T>
INLINE void load_gradient(const Problem &p, int64_t b, int64_t h, int count, Scratch &w) {
    const int ld = up(p.dim, GROUP);
    memset(w.o, 0, sizeof(float) * up(p.dim, BATCH) * ROWS);
    for (int r = 0; r < up(count, GROUP); r++) {
        float *grad = w.g_row + r * ld, sum = 0;
        const T *out = row_of<T>(p.out, b, h, w.row[r]);
        widen(row_of<T>(p.grad, b, h, w.row[r]), grad, p.dim, ld);
        for (int d = 0; d < p.dim; d++) sum += grad[d] * wide(out[d]);
        const float lse = *row_of<float>(p.lse, b, h, w.row[r]);
        // weights are 0 for rows that see nothing and for padding rows
        w.m[r] = r < count && lse != -INFINITY ? lse * LOG2E : -2 * NEVER;
        w.delta[r] = sum;
    }
    transpose(w.g_row, ld, p.dim, count, 1, w.g);
}

// s: weights, t: gradients of the scores, both [key][ROWS], of a group of queries; dq is added to o.
INLINE void weigh(const Problem &p, const Chunk &c, Scratch &w, int g, int count) {
    bool hidden;
    const int keys = visible(p, c, w, g, count, hidden);
    score(p, c, w, g, keys, hidden, w.s + g, ROWS);
    for (int j = 0; j < keys; j += BATCH) rows_times(c.v + j, w.g + g, ROWS, p.dim, w.t + j * ROWS + g, ROWS);
    const float inverse = p.cap ? 1 / (p.cap * p.scale * LOG2E) : 0;
    for (int j = 0; j < c.count; j++)
        UNROLL for (int x = 0; x < VECTORS; x++) {
            vec &s = at(w.s + j * ROWS + g, x), &t = at(w.t + j * ROWS + g, x), share = s * inverse;
            s = j < keys ? exp2v(s - at(w.m + g, x)) : (vec){0};
            t = j < keys ? s * (t - at(w.delta + g, x)) : (vec){0};
            // the slope of the cap; that of a hidden score would be -infinity
            if (inverse) t *= larger(1 - share * share, splat(0));
        }
    const vec all[VECTORS] = {splat(1), splat(1)};
    for (int d = 0; d < p.dim; d += BATCH) columns_times(c.k, d, w.t + g, ROWS, keys, all, w.o + g, ROWS);
}

// Adds gradients of keys (t, q) or values (s, output gradient), summed over the tile's rows.
INLINE void add_rows(
    const Problem &p, const Tensor &to, int64_t b, int64_t kv, const Chunk &c, const float *weights,
    const float *rows, float scale, int count, Scratch &w) {
    const int ld = up(p.dim, GROUP);
    for (int j = 0; j < c.count; j += BATCH) {
        const float *a[BATCH];
        for (int x = 0; x < BATCH; x++) a[x] = weights + (j + x < c.count ? j + x : c.count - 1) * ROWS;
        for (int d = 0; d < ld; d += GROUP) rows_times(a, rows + d, ld, up(count, GROUP), w.sum + d, ld);
        for (int x = 0; x < BATCH && j + x < c.count; x++) {
            float *row = row_of<float>(to, b, kv, c.row[j + x]);
            uint8_t *byte = p.locks ? p.locks + (c.row[j + x] & 4095) : 0;
            while (byte && __atomic_test_and_set(byte, __ATOMIC_ACQUIRE)) {}
            for (int d = 0; d < p.dim; d++) row[d] += w.sum[x * ld + d] * scale;
            if (byte) __atomic_clear(byte, __ATOMIC_RELEASE);
        }
    }
}

template <class T>
INLINE void finish_dq(const Problem &p, int64_t b, int64_t h, int count, Scratch &w) {
    const float scale = p.scale;
    const int ld = sums_as_rows(p, count, w);
    for (int r = 0; r < count; r++) {
        const float *from = w.q_row + r * ld;
        float *full = row_of<float>(p.dq, b, h, w.row[r]);
        T *part = row_of<T>(p.dq, b, h, w.row[r]);
        for (int d = 0; d < p.dim; d++) {
            if (p.wide) full[d] = (p.merge ? full[d] : 0) + from[d] * scale;
            else narrow(from[d] * scale, part + d);
        }
    }
}

template <class T>
static void backward_tile(const Problem &p, int64_t b, int64_t index, int64_t tile, Scratch &w) {
    const int64_t h = p.head[index], kv = h / p.group, runs = p.runs[p.tiles];
    for (int64_t part = 0; part < p.tile_count[tile]; part += ROWS) {
        const int count = load_queries<T>(p, b, h, tile, part, w);
        load_gradient<T>(p, b, h, count, w);
        Chunk c;
        int64_t e = p.runs[tile], s = 0;
        while (next(p, p.runs[tile + 1], e, s, c)) {
            if (hides(p, c, w, count)) continue;
            load_keys<T>(p, b, kv, c, w);
            for (int g = 0; g < count; g += GROUP) weigh(p, c, w, g, count);
            add_rows(p, p.dv, b, kv, c, w.s, w.g_row, 1, count, w);
            add_rows(p, p.dk, b, kv, c, w.t, w.q_row, p.scale, count, w);
            // the gradient of a bias on all scores of a run
            float *bias = p.bias ? p.bias + (b * p.heads + index) * runs : 0;
            for (int j = 0; bias && j < c.count; j++) {
                float sum = 0;
                for (int r = 0; r < count; r++) sum += w.t[j * ROWS + r];
                bias[c.run[j]] += sum;
            }
        }
        finish_dq<T>(p, b, h, count, w);
    }
}

// Lays out a thread's part of the scratch space, which may be null, and returns its bytes.
static int64_t lay_out(const Problem &p, bool back, float *part, Scratch &w) {
    const int64_t dim = up(p.dim, GROUP), tile = dim * ROWS, keys = KEYS * dim;
    const bool convert = p.dtype || p.dim % BATCH;
    const int64_t s = back ? KEYS * ROWS : KEYS * GROUP;
    int64_t floats = 0;
    auto take = [&](int64_t n) { floats += n; return part ? part + floats - n : 0; };
    w.q = take(tile), w.o = take(tile), w.q_row = take(tile);
    w.g = back ? take(tile) : 0, w.g_row = back ? take(tile) : 0;
    w.s = take(s), w.t = back ? take(s) : 0;
    w.k = convert ? take(keys) : 0, w.v = convert ? take(keys) : 0;
    w.sum = take(BATCH * dim);
    w.m = take(ROWS), w.l = take(ROWS), w.delta = take(ROWS);
    w.at = (int32_t *)take(ROWS), w.row = (int32_t *)take(ROWS), w.from = (int32_t *)take(ROWS);
    const int64_t bytes = (floats * sizeof(float) + 63) / 64 * 64;
    return bytes < SMALLEST_MAPPED ? SMALLEST_MAPPED : bytes;
}

// Calls work(unit, scratch) for units of work until none is left.
template <class F>
INLINE void run_units(const Problem &p, bool back, int64_t units, F work) {
    Scratch w;
    const int64_t bytes = lay_out(p, back, 0, w), thread = __atomic_fetch_add(p.counter + 1, 1, __ATOMIC_RELAXED);
    // zeros, since unused lanes are multiplied too
    lay_out(p, back, (float *)memset(p.scratch + bytes * thread, 0, bytes), w);
    int64_t unit;
    while ((unit = __atomic_fetch_add(p.counter, 1, __ATOMIC_RELAXED)) < units) work(unit, w);
}

template <class T>
static void forward_all(const Problem &p) {
    run_units(p, false, p.batches * p.heads * p.tiles, [&](int64_t u, Scratch &w) {
        forward_tile<T>(p, u / p.tiles / p.heads, p.head[u / p.tiles % p.heads], u % p.tiles, w);
    });
}

// A unit of work is one KV head, so only one thread adds to its gradients; with `parts` > 1 it is a
// part of the head's tiles, and rows are locked.
template <class T>
static void backward_all(const Problem &p) {
    run_units(p, true, p.batches * p.kv_heads * p.parts, [&](int64_t u, Scratch &w) {
        const int64_t b = u / p.parts / p.kv_heads, kv = p.kv_head[u / p.parts % p.kv_heads];
        for (int64_t i = 0; i < p.heads; i++)
            if (p.head[i] / p.group == kv)
                for (int64_t t = u % p.parts; t < p.tiles; t += p.parts) backward_tile<T>(p, b, i, t, w);
    });
}

#define EACH(run) p->dtype == 0 ? run<float>(*p) : p->dtype == 1 ? run<bfloat16>(*p) : run<half>(*p)

extern "C" {
void forward(const Problem *p) { EACH(forward_all); }
void backward(const Problem *p) { EACH(backward_all); }
// Vector width.
int lanes() { return LANES; }
int thread_bytes(const Problem *p, int back) {
    Scratch w;
    return (int)lay_out(*p, back, 0, w);
}
// Multiplies float32 matrices that stay in the first-level cache; returns the FLOPs of a turn.
int multiply(int turns) {
    enum { INNER = 256 };
    alignas(64) static thread_local float a[BATCH * INNER], b[INNER * GROUP], out[BATCH * GROUP];
    const float *rows[BATCH];
    for (int j = 0; j < BATCH; j++) rows[j] = a + j * INNER;
    for (int i = 0; i < turns; i++) {
        rows_times(rows, b, GROUP, INNER, out, GROUP);
        __asm__ volatile("" : : "r"(out) : "memory");  // every turn is needed
    }
    return 2 * BATCH * GROUP * INNER;
}
}
