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
#define AHEAD 16  // keys between a latent that is multiplied and one that is fetched

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
struct fp8 {  // e4m3; becomes the float32 of its bits, which is 2^120 times smaller
    int8_t bits;
};
INLINE float wide(int8_t x) { return x; }
INLINE float wide(fp8 x) {
    union { int32_t i; float f; } u = {(int32_t)x.bits * (1 << 20) & (int32_t)0x87f00000};
    return u.f;
}
// The square root of what a number of a cache lacks: queries and scores have it, weights and outputs.
template <typename T> INLINE float gain(const T *) { return 1; }
INLINE float gain(const fp8 *) { return 0x1p60f; }
INLINE vec load(const int8_t *p) { return __builtin_convertvector(widen(p), vec); }
INLINE vec load(const fp8 *p) { return (vec)(widen(&p->bits) << 20 & (int32_t)0x87f00000); }
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
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif
INLINE vec add_neighbours(vec a, vec b) { return SHUFFLE(a, b, EVENS) + SHUFFLE(a, b, ODDS); }

// Lane i of the result is the sum of the lanes of a[i % N]. Overwrites a.
template <int N> INLINE vec sums(vec *a) {
    UNROLL for (int left = LANES, n = N; left > 1; left /= 2, n = n > 1 ? n / 2 : 1)
        UNROLL for (int i = 0; 2 * i < n; i++) a[i] = add_neighbours(a[2 * i], a[n > 1 ? 2 * i + 1 : 0]);
    return a[0];
}

INLINE float largest(vec a) {
    UNROLL for (int left = LANES; left > 1; left /= 2) a = larger(SHUFFLE(a, a, EVENS), SHUFFLE(a, a, ODDS));
    return a[0];
}

// Fetch a row that is read after this tile: the prefetcher of the hardware stops at pages, and pauses
// when keys and values alternate.
template <typename T> INLINE void fetch(const T *row, int dims) {
    for (int d = 0; d < dims; d += 64 / (int)sizeof(T)) __builtin_prefetch(row + d, 0, 2);
}

// The lanes of c[r * LANES] add up to q[r] . k for R rows of q.
template <int R, typename T>
INLINE void multiply_key(const float *q, int ldq, const T *k, int dim, vec *c) {
    vec even[R], odd[R];
    UNROLL for (int r = 0; r < R; r++) even[r] = odd[r] = (vec){0};
    int d = 0;
    for (; d + 2 * LANES <= dim; d += 2 * LANES) {
        vec a, b;
        load_two(k + d, a, b);
        UNROLL for (int r = 0; r < R; r++) {
            even[r] += a * load(q + r * ldq + d);
            odd[r] += b * load(q + r * ldq + d + LANES);
        }
    }
    if (d + LANES <= dim) {
        vec a = load(k + d);
        UNROLL for (int r = 0; r < R; r++) even[r] += a * load(q + r * ldq + d);
        d += LANES;
    }
    for (; d < dim; d++)
        UNROLL for (int r = 0; r < R; r++) odd[r][0] += wide(k[d]) * q[r * ldq + d];
    UNROLL for (int r = 0; r < R; r++) c[r * LANES] = even[r] + odd[r];
}

template <typename T> INLINE bool in_pairs(const T *) { return false; }
#if defined(__AVX512BF16__) && LANES == 16
// The processor multiplies pairs of bfloat16 and adds in float32: q has bfloat16, too.
INLINE bool in_pairs(const bfloat16 *) { return true; }
template <int R>
INLINE void multiply_key(const float *q, int ldq, const bfloat16 *k, int dim, vec *c) {
    vec even[R], odd[R];
    UNROLL for (int r = 0; r < R; r++) even[r] = odd[r] = (vec){0};
    auto add = [&](vec *sum, int d, __mmask32 in) __attribute__((always_inline)) {
        __m512i a = _mm512_maskz_loadu_epi16(in, k + d);
        UNROLL for (int r = 0; r < R; r++) {
            __m512i b = _mm512_maskz_loadu_epi16(in, (const bfloat16 *)(q + r * ldq) + d);
            sum[r] = (vec)_mm512_dpbf16_ps((__m512)sum[r], (__m512bh)a, (__m512bh)b);
        }
    };
    int d = 0;
    for (; d + 64 <= dim; d += 64) add(even, d, ~0u), add(odd, d + 32, ~0u);
    for (; d < dim; d += 32) add(even, d, dim - d < 32 ? (1u << (dim - d)) - 1 : ~0u);
    UNROLL for (int r = 0; r < R; r++) c[r * LANES] = even[r] + odd[r];
}
#endif

// s[r][key] = q[r] . k[key] for R rows of q and `count` keys. Fetches the values of the keys.
template <int R, typename T>
INLINE void score(const float *q, int ldq, const T *k, int64_t ldk, int dim, const T *v,
                  int64_t ldv, int v_dim, int count, float *s) {
    for (int first = 0; first < count; first += LANES) {
        vec c[R][LANES];
        for (int i = 0; i < LANES; i++)
            if (first + i < count) {
                if (v) fetch(v + (first + i) * ldv, v_dim);
                multiply_key<R>(q, ldq, k + (first + i) * ldk, dim, &c[0][i]);
            } else
                UNROLL for (int r = 0; r < R; r++) c[r][i] = (vec){0};
        UNROLL for (int r = 0; r < R; r++) *(row_vec *)(s + r * KEYS + first) = sums<LANES>(c[r]);
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
INLINE void add_values(const float *s, const float *keep, const T *v, int64_t ldv, int d, int dim,
                       int count, const T *next, int64_t ldn, float *o, int ldo) {
    const int V = R == 1 ? 8 : 4;
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

// Of q . k: a weight is a power of 2.
INLINE float factor(const Decode *p) { return p->scale * 1.44269504088896; }

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
    *l = *l * keep + sums<1>(&total)[0];
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
    multiply<R>(s, factor(p) * gain(k) * (sizeof(T) == 1 ? p->k_scale[scale_at] : 1));
    const float cap = p->cap * factor(p);
    for (int at = 0; cap && at < R * KEYS; at += LANES) *(row_vec *)(s + at) = capped(load(s + at), cap);
    UNROLL for (int r = 0; r < R; r++) {
        int64_t token = (row + r) % p->queries;
        int64_t from = p->first[token] - start, to = p->stop[token] - start;
        from = from < 0 ? 0 : from > count ? count : from;
        to = to < from ? from : to > count ? count : to;
        keep[r] = weigh(s + r * KEYS, from, to, count, m + row + r, l + row + r);
    }
    if (sizeof(T) == 1) multiply<R>(s, gain(v) * p->v_scale[scale_at]);
    add_values<R>(s, keep, v, p->v.token, 0, p->v_dim, count, next, p->k.token, o + row * p->v_dim, p->v_dim);
}

// Latents first ... last - 1 for one query, all of which it sees. Values of a few are added between
// the scores of the next few: memory works all the time. Those of both fit into the first-level
// cache; the prefetcher of the hardware would stop where other reads miss it.
template <typename T>
static void add_latents(const Decode *p, const float *q, const T *k, int64_t first, int64_t last,
                        float *s, float *o, float *m, float *l) {
    const int most = 16 / sizeof(T), N = most < LANES / 2 ? most : LANES / 2;
    const int dims = 8 * LANES;  // what add_values computes in registers
    const int64_t ld = p->k.token;
    ivec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int64_t start = first; start < last + N; start += N, k += N * ld) {
        const int64_t left = last - start;
        const int count = left < N ? left : N, before = left < 0 ? left + N : N;
        vec c[LANES];
        for (int i = 0, d = 0; i < N; i++) {
            c[i] = (vec){0};
            if (i < count) {
                fetch(k + (i + AHEAD) * ld, p->dim);
                multiply_key<1>(q, 0, k + i * ld, p->dim, &c[i]);
            }
            const int end = i + 1 < N ? p->v_dim * (i + 1) / N / dims * dims : p->v_dim;
            if (start > first)
                add_values<1>(s, s + N, k - N * ld, ld, d, end, before, (const T *)0, 0, o, 0);
            d = end;
        }
        if (count <= 0) break;
        vec x = sums<N>(c) * factor(p), weights;
        if (p->cap) x = capped(x, p->cap * factor(p));
        // the maximum so far takes part: its weight is the factor of older sums
        x = lane < count ? x : lane == N ? splat(*m) : splat(NEVER);
        *m = largest(x);
        *(row_vec *)s = x = exp2v(x - *m);
        weights = lane < count ? x : (vec){0};
        *l = *l * s[N] + sums<1>(&weights)[0];
    }
}

// Q, T: types of the queries and of the cache.
template <typename Q, typename T> static void split(const Decode *p, int64_t unit, float *q, int ldq) {
    const int rows = p->group * p->queries;
    float *s = q + rows * ldq, *m = s + ROWS * KEYS, *l = m + rows, *o = l + rows;
    int64_t part = unit % p->splits, head = unit / p->splits % p->kv_heads;
    int64_t batch = unit / p->splits / p->kv_heads;
    for (int r = 0; r < rows; r++) {
        const Q *from = (const Q *)p->q.data + batch * p->q.batch +
                        (head * p->group + r / p->queries) * p->q.head +
                        r % p->queries * p->q.token;
        if (in_pairs((const T *)0)) memcpy(q + r * ldq, from, sizeof(Q) * p->dim);
        else
            for (int d = 0; d < p->dim; d++)
                q[r * ldq + place(d, p->dim, (const T *)0)] = wide(from[d]) * gain((const T *)0);
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
        if (rows == 1 && v == k && sizeof(T) > 1 && p->v.token == p->k.token) {
            add_latents(p, q, k, first, last, s, o, m, l);
            break;
        }
        int r = 0;
        for (; r + ROWS <= rows; r += ROWS) { ADD(ROWS); }
        for (; r + 2 <= rows; r += 2) { ADD(2); }
        for (; r < rows; r++) { ADD(1); }
    }
    for (int r = 0; r < rows; r++) {
        float inverse = l[r] == 0 ? 0 : gain((const T *)0) / l[r];
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
