// Attention of a few queries to a KV cache, for CPUs: split-KV (Flash-Decoding).
//
// A step of decoding reads the cache once and computes little, so memory bandwidth limits it. The
// keys of a KV head are cut into splits, so that all threads have work at any batch and number of
// heads. A split is computed for all query heads of its KV head and all new tokens at once: its
// keys and values come from memory once. head_dim is in the lanes of a vector register. The results
// of splits are merged by their log-sum-exp (decode.py). Numbers of a quantised cache become float32
// in registers; a tile has one scale, which multiplies scores, and one that multiplies weights.
//
// There is no global or thread-local state: every thread calls the same function on the same
// Decode and takes splits from its counter. Shapes as in decode.py.

#include "lanes.h"

#define KEYS 64  // keys per update of the maximum: their rows stay in the second-level cache
#define ROWS 4   // rows of queries that are multiplied together

typedef vec row_vec __attribute__((aligned(4)));  // in memory: part of a row
typedef uint32_t uvec __attribute__((vector_size(4 * LANES), may_alias));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES), may_alias, aligned(2)));

struct Decode {
    int64_t dtype, dim, v_dim, batches, kv_heads, group, queries, splits;
    int64_t scale_block, scales;  // keys of a scale (a multiple of KEYS), and scales of a head
    const float *k_scale, *v_scale;
    Tensor q, k, v;
    const int64_t *first, *stop;  // keys that each query sees: first ... stop - 1
    int64_t begin, end;           // of all queries; splits cut this
    double scale, cap;            // as in native.cpp
    float *out, *lse;             // of each split: (splits, B, Hq, m, Dv) and (splits, B, Hq, m)
    float *scratch;               // working memory of all threads
    int64_t *counter;             // splits taken, and threads started
};

// A compiler converts int8 one by one.
#if LANES == 16
INLINE ivec widen(const int8_t *p) { return (ivec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
#elif LANES == 8
INLINE ivec widen(const int8_t *p) { return (ivec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
#else
INLINE ivec widen(const int8_t *p) { return (ivec){p[0], p[1], p[2], p[3]}; }
#endif
struct fp8 {  // e4m3, whose bits are those of a float32 that is 2^120 times smaller
    int8_t bits;
};
INLINE float wide(int8_t x) { return x; }
INLINE float wide(fp8 x) {
    union { int32_t i; float f; } u = {(int32_t)x.bits * (1 << 20) & (int32_t)0x87f00000};
    return u.f * 0x1p120f;
}
INLINE vec load(const int8_t *p) { return __builtin_convertvector(widen(p), vec); }
INLINE vec load(const fp8 *p) { return (vec)(widen(&p->bits) << 20 & (int32_t)0x87f00000) * 0x1p120f; }
INLINE vec load(const float *p) { return *(const row_vec *)p; }
INLINE vec load(const bfloat16 *p) {
    return (vec)(__builtin_convertvector(*(const hvec *)p, uvec) << 16);
}
#if defined(__FLT16_MAX__)
typedef _Float16 f16vec __attribute__((vector_size(2 * LANES), may_alias, aligned(2)));
#if LANES == 16
INLINE vec load(const _Float16 *p) { return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
#elif LANES == 8 && defined(__F16C__)
INLINE vec load(const _Float16 *p) { return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
#else
INLINE vec load(const _Float16 *p) { return __builtin_convertvector(*(const f16vec *)p, vec); }
#endif
#endif

// Load 2 LANES numbers: neighbours, or of bfloat16 those at even places and those at odd ones, which takes half
// the instructions. Queries and outputs have the same order meanwhile (place()).
template <typename T> INLINE void load_two(const T *p, vec &a, vec &b) {
    a = load(p);
    b = load(p + LANES);
}
INLINE void load_two(const bfloat16 *p, vec &a, vec &b) {
    uvec both;
    memcpy(&both, p, sizeof both);
    a = (vec)(both << 16);
    b = (vec)(both & 0xffff0000u);
}
template <typename T> INLINE int place(int d, int dim, const T *) { return d; }
INLINE int place(int d, int dim, const bfloat16 *) {
    const int width = 2 * LANES, in = d % width;
    return d < dim / width * width ? d - in + in % 2 * LANES + in / 2 : d;
}

// [a0+a1, a2+a3, ..., b0+b1, b2+b3, ...]
#if LANES == 16
#define EVENS 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODDS 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif LANES == 8
#define EVENS 0, 2, 4, 6, 8, 10, 12, 14
#define ODDS 1, 3, 5, 7, 9, 11, 13, 15
#else
#define EVENS 0, 2, 4, 6
#define ODDS 1, 3, 5, 7
#endif
#if defined(__clang__)
INLINE vec add_neighbours(vec a, vec b) {
    return __builtin_shufflevector(a, b, EVENS) + __builtin_shufflevector(a, b, ODDS);
}
#else
INLINE vec add_neighbours(vec a, vec b) {
    return __builtin_shuffle(a, b, (ivec){EVENS}) + __builtin_shuffle(a, b, (ivec){ODDS});
}
#endif

// Lane i of the result is the sum of the lanes of a[i]. Overwrites a.
INLINE vec sums(vec *a) {
    UNROLL for (int left = LANES; left > 1; left /= 2)
        UNROLL for (int i = 0; i < left / 2; i++) a[i] = add_neighbours(a[2 * i], a[2 * i + 1]);
    return a[0];
}

INLINE float sum(vec a) {
    float total = 0;
    UNROLL for (int i = 0; i < LANES; i++) total += a[i];
    return total;
}

INLINE float largest(vec a) {
    float most = a[0];
    UNROLL for (int i = 1; i < LANES; i++) most = a[i] > most ? a[i] : most;
    return most;
}

// Fetch a row that is read after this tile: the prefetcher of the hardware stops at pages, and pauses
// when keys and values alternate.
template <typename T> INLINE void fetch(const T *row, int dims) {
    for (int d = 0; d < dims; d += 64 / (int)sizeof(T)) __builtin_prefetch(row + d, 0, 2);
}

// s[r][key] = q[r] . k[key] for R rows of q and `count` keys. Fetches the values of the keys.
template <int R, typename T>
INLINE void score(const float *q, int ldq, const T *k, int64_t ldk, int dim, const T *v,
                  int64_t ldv, int v_dim, int count, float *s) {
    const int whole = dim / LANES * LANES;
    for (int first = 0; first < count; first += LANES) {
        vec c[R][LANES];
        for (int i = 0; i < LANES; i++) {
            vec even[R], odd[R];
            UNROLL for (int r = 0; r < R; r++) even[r] = odd[r] = (vec){0};
            if (first + i < count) {
                const T *row = k + (first + i) * ldk;
                if (v) fetch(v + (first + i) * ldv, v_dim);
                int d = 0;
                for (; d + 2 * LANES <= whole; d += 2 * LANES) {
                    vec a, b;
                    load_two(row + d, a, b);
                    UNROLL for (int r = 0; r < R; r++) {
                        even[r] += a * load(q + r * ldq + d);
                        odd[r] += b * load(q + r * ldq + d + LANES);
                    }
                }
                if (d < whole) {
                    vec a = load(row + d);
                    UNROLL for (int r = 0; r < R; r++) even[r] += a * load(q + r * ldq + d);
                }
                for (d = whole; d < dim; d++)
                    UNROLL for (int r = 0; r < R; r++) odd[r][0] += wide(row[d]) * q[r * ldq + d];
            }
            UNROLL for (int r = 0; r < R; r++) c[r][i] = even[r] + odd[r];
        }
        UNROLL for (int r = 0; r < R; r++) *(row_vec *)(s + r * KEYS + first) = sums(c[r]);
    }
}

// o[r] = keep[r] o[r] + sum over keys of s[r][key] v[key], for V vectors of the dims from d on.
template <int R, int V, typename T>
INLINE void add_dims(const float *s, const float *keep, const T *v, int64_t ldv, int d, int count,
                     const T *next, int64_t ldn, float *o, int ldo) {
    vec c[R][V];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int x = 0; x < V; x++)
            c[r][x] = load(o + r * ldo + d + x * LANES) * keep[r];
    for (int key = 0; key < count; key++) {
        const T *row = v + key * ldv + d;
        if (next) fetch(next + key * ldn + d, V * LANES);
        vec a[V];
        if (V == 1) a[0] = load(row);
        UNROLL for (int x = 0; x + 1 < V; x += 2) load_two(row + x * LANES, a[x], a[x + 1]);
        UNROLL for (int x = 0; x < V; x++)
            UNROLL for (int r = 0; r < R; r++) c[r][x] += a[x] * s[r * KEYS + key];
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int x = 0; x < V; x++) *(row_vec *)(o + r * ldo + d + x * LANES) = c[r][x];
}

template <int R, typename T>
INLINE void add_values(const float *s, const float *keep, const T *v, int64_t ldv, int dim,
                       int count, const T *next, int64_t ldn, float *o, int ldo) {
    const int V = R == 1 ? 8 : 4;
    int d = 0;
    for (; d + V * LANES <= dim; d += V * LANES)
        add_dims<R, V>(s, keep, v, ldv, d, count, next, ldn, o, ldo);
    for (; d + 2 * LANES <= dim; d += 2 * LANES)
        add_dims<R, 2>(s, keep, v, ldv, d, count, next, ldn, o, ldo);
    for (; d + LANES <= dim; d += LANES) add_dims<R, 1>(s, keep, v, ldv, d, count, next, ldn, o, ldo);
    for (; d < dim; d++)
        UNROLL for (int r = 0; r < R; r++) {
            float total = o[r * ldo + d] * keep[r];
            for (int key = 0; key < count; key++) total += s[r * KEYS + key] * wide(v[key * ldv + d]);
            o[r * ldo + d] = total;
        }
}

// Turn scores of a row into weights relative to its new maximum; return the factor of older ones.
INLINE float weigh(float *s, int from, int to, int count, float *m, float *l) {
    if (from >= to) {
        for (int key = 0; key < count; key++) s[key] = 0;
        return 1;
    }
    for (int key = 0; key < from; key++) s[key] = NEVER;
    for (int key = to; key < KEYS; key++) s[key] = NEVER;
    vec all = splat(*m), total = {0};
    for (int key = 0; key < KEYS; key += LANES) all = load(s + key) > all ? load(s + key) : all;
    float most = largest(all);
    for (int key = 0; key < KEYS; key += LANES) {
        vec w = exp2v(load(s + key) - most);
        *(row_vec *)(s + key) = w;
        total += w;
    }
    float keep = *m == NEVER ? 0 : exp2v(splat(*m - most))[0];
    *l = *l * keep + sum(total);
    *m = most;
    return keep;
}

template <int R> INLINE void multiply(float *s, float factor) {
    for (int i = 0; i < R * KEYS; i += LANES) *(row_vec *)(s + i) = load(s + i) * factor;
}

// Rows of queries of one KV head are (query head of the group, new token), the token innermost.
template <int R, typename T>
INLINE void add_tile(const Decode *p, int row, const float *q, int ldq, const T *k, const T *v,
                     int64_t start, int count, const T *fetched, int dims, const T *next,
                     int64_t scale_at, float *s, float *o, float *m, float *l) {
    float keep[R];
    score<R>(q + row * ldq, ldq, k, p->k.token, p->dim, fetched, p->v.token, dims, count, s);
    if (sizeof(T) == 1) multiply<R>(s, p->k_scale[scale_at]);
    const float cap = p->cap * p->scale * 1.44269504088896f;
    for (int at = 0; cap && at < R * KEYS; at += LANES) *(row_vec *)(s + at) = capped(load(s + at), cap);
    UNROLL for (int r = 0; r < R; r++) {
        int64_t token = (row + r) % p->queries;
        int64_t from = p->first[token] - start, to = p->stop[token] - start;
        from = from < 0 ? 0 : from > count ? count : from;
        to = to < from ? from : to > count ? count : to;
        keep[r] = weigh(s + r * KEYS, from, to, count, m + row + r, l + row + r);
    }
    if (sizeof(T) == 1) multiply<R>(s, p->v_scale[scale_at]);
    add_values<R>(s, keep, v, p->v.token, p->v_dim, count, next, p->k.token, o + row * p->v_dim, p->v_dim);
}

// Q, T: types of the queries and of the cache.
template <typename Q, typename T> static void split(const Decode *p, int64_t unit, float *q, int ldq) {
    const int rows = p->group * p->queries;
    float *s = q + rows * ldq, *m = s + ROWS * KEYS, *l = m + rows, *o = l + rows;
    int64_t part = unit % p->splits, head = unit / p->splits % p->kv_heads;
    int64_t batch = unit / p->splits / p->kv_heads;
    const float scale = 1.44269504088896 * p->scale;
    for (int r = 0; r < rows; r++) {
        const Q *from = (const Q *)p->q.data + batch * p->q.batch +
                        (head * p->group + r / p->queries) * p->q.head +
                        r % p->queries * p->q.token;
        for (int d = 0; d < p->dim; d++)
            q[r * ldq + place(d, p->dim, (const T *)0)] = wide(from[d]) * scale;
        m[r] = NEVER;
        l[r] = 0;
    }
    // (splits, B, Hk, group, m): the rows of a unit are neighbours
    int64_t at = ((part * p->batches + batch) * p->kv_heads + head) * rows;
    float *out = p->out + at * p->v_dim;
    memset(o, 0, sizeof(float) * rows * p->v_dim);
    int64_t all = p->end - p->begin;
    int64_t first = p->begin + all * part / p->splits, last = p->begin + all * (part + 1) / p->splits;
    for (int64_t start = first, count; start < last; start += count) {
        count = sizeof(T) == 1 ? KEYS - start % KEYS : KEYS;
        count = last - start < count ? last - start : count;
        const int64_t scale_at =
            sizeof(T) > 1 ? 0 : (batch * p->kv_heads + head) * p->scales + start / p->scale_block;
        const T *k = (const T *)p->k.data + batch * p->k.batch + head * p->k.head + start * p->k.token;
        const T *v = (const T *)p->v.data + batch * p->v.batch + head * p->v.head + start * p->v.token;
        // an address past the end is not read
        const T *more = k + count * p->k.token, *next, *fetched;
        int dims = p->v_dim;
#define ADD(R) \
    next = r + R == rows && start + count < last ? more : 0, fetched = r == 0 ? v : 0; \
    if (v == k) { /* a latent: each block of rows fetches a part of the next keys */ \
        int from = p->dim * r / rows; \
        fetched = more + from, dims = p->dim * (r + R) / rows - from, next = 0; \
    } \
    add_tile<R>(p, r, q, ldq, k, v, start, count, fetched, dims, next, scale_at, s, o, m, l)
        int r = 0;
        for (; r + ROWS <= rows; r += ROWS) { ADD(ROWS); }
        for (; r + 2 <= rows; r += 2) { ADD(2); }
        for (; r < rows; r++) { ADD(1); }
    }
    for (int r = 0; r < rows; r++) {
        float inverse = l[r] == 0 ? 0 : 1 / l[r];
        for (int d = 0; d < p->v_dim; d++)
            out[r * p->v_dim + d] = o[r * p->v_dim + place(d, p->v_dim, (const T *)0)] * inverse;
        p->lse[at + r] = l[r] == 0 ? -INFINITY : m[r] * LN2 + logf(l[r]);
    }
}

static int padded(const Decode *p) { return (p->dim + LANES - 1) / LANES * LANES; }

extern "C" {
// Bytes of working memory that a thread needs.
int thread_bytes(const Decode *p) {
    int rows = p->group * p->queries;
    return 4 * (rows * (padded(p) + p->v_dim + 2) + ROWS * KEYS + LANES);
}

// Compute splits until none is left.
void decode(Decode *p) {
    int64_t thread = __atomic_fetch_add(p->counter + 1, 1, __ATOMIC_RELAXED);
    float *own = (float *)((char *)p->scratch + thread * thread_bytes(p));
    int64_t units = p->batches * p->kv_heads * p->splits, unit;
    while ((unit = __atomic_fetch_add(p->counter, 1, __ATOMIC_RELAXED)) < units) {
        if (p->dtype == 0) split<float, float>(p, unit, own, padded(p));
        if (p->dtype == 1) split<bfloat16, bfloat16>(p, unit, own, padded(p));
        if (p->dtype == 2) split<half, half>(p, unit, own, padded(p));
        if (p->dtype == 3) split<float, int8_t>(p, unit, own, padded(p));
        if (p->dtype == 4) split<float, fp8>(p, unit, own, padded(p));
    }
}
}
