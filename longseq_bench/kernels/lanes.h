// What the kernels for CPUs share: vectors as wide as the processor's registers, and number types.

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vec __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), may_alias));

static const float LN2 = 0.693147180559945f;
static const float NEVER = -1e30f;  // below every real score

struct bfloat16 {
    uint16_t bits;
};

struct Tensor {
    char *data;
    int64_t batch, head, token;  // strides in elements; head_dim is contiguous
};

INLINE float wide(float x) { return x; }
INLINE float wide(bfloat16 x) {
    union { uint32_t i; float f; } u = {(uint32_t)x.bits << 16};
    return u.f;
}
#if defined(__FLT16_MAX__)
INLINE float wide(_Float16 x) { return (float)x; }
extern "C" int has_float16() { return 1; }
typedef _Float16 half;
#else
extern "C" int has_float16() { return 0; }
typedef float half;  // not called
#endif

INLINE vec splat(float x) { return x - (vec){0}; }
// Returns b where a is NaN.
INLINE vec larger(vec a, vec b) { return a > b ? a : b; }

// 2^x: exactly 0 below 2^-126, NaN for NaN. Chebyshev fit of degree 6 on [-1/2, 1/2]; its error, 3e-9, is below
// rounding.
INLINE vec exp2v(vec x) {
    const vec magic = splat(12582912.f), low = splat(-126.f);
    vec c = larger(low, x), t = c + magic, f = c - (t - magic);
    vec p = splat(1.54697320e-4f) * f + 1.34004322e-3f;
    p = p * f + 9.61802560e-3f;
    p = p * f + 5.55032721e-2f;
    p = p * f + 2.40226512e-1f;
    p = p * f + 6.93147207e-1f;
    p = p * f + 1.0f;
    p = (vec)((ivec)p + ((ivec)t << 23));
    p = x < low ? (vec){0} : p;
    return x == x ? p : x;
}

// cap tanh(s / cap), NaN for NaN. Near 0 the exponentials cancel; there is its series.
INLINE vec capped(vec s, float cap) {
    const vec zero = {0}, x = s / cap, y = x * x, size = x < zero ? -x : x;
    const vec e = exp2v(size * (-2 / LN2)), large = (1 - e) / (1 + e);
    vec series = y * (62.f / 2835) - 17.f / 315;
    series = (series * y + 2.f / 15) * y - 1.f / 3;
    series = x + x * y * series;
    return cap * (size < splat(0.25f) ? series : x < zero ? -large : large);
}
