/* Vectors of the width that the processor has, in the vector extensions of GCC, so that one source serves AVX-512, AVX2 and
   NEON; only the dot product of bfloat16 and the sum of several vectors have forms of their own for AVX-512.

   Tensors come as bytes with a dtype. The functions here are inlined with a constant dtype: see BY_DTYPE. */
#ifndef TORCHPLUG_VECTOR_H
#define TORCHPLUG_VECTOR_H

#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define AVX512 1
#include <immintrin.h>
#if defined(__AVX512BF16__)
#define AVX512_BFLOAT16 1
#endif
#endif

#if defined(AVX512)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
#define LANES (BYTES / 4) /* floats of a vector */

typedef float vec __attribute__((vector_size(BYTES)));
typedef int32_t ivec __attribute__((vector_size(BYTES)));
typedef uint32_t uvec __attribute__((vector_size(BYTES)));
typedef uint16_t half __attribute__((vector_size(BYTES / 2))); /* as many bfloat16 as a vec has floats */

enum { FLOAT32, BFLOAT16 };

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#define UNROLL _Pragma("GCC unroll 16")

/* Two copies of a function, one for each dtype that tensors have here. */
#define BY_DTYPE(dtype, call_float32, call_bfloat16) \
    do { \
        if ((dtype) == BFLOAT16) \
            call_bfloat16; \
        else \
            call_float32; \
    } while (0)

INLINE int64_t size_of(int dtype) { return dtype == BFLOAT16 ? 2 : 4; }

INLINE const char *at(const void *p, int64_t i, int dtype) { return (const char *)p + i * size_of(dtype); }

INLINE float widen(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* To nearest, ties to even; a NaN stays one. */
INLINE uint16_t narrow(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value)
        return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE float get(const void *p, int64_t i, int dtype)
{
    return dtype == BFLOAT16 ? widen(((const uint16_t *)p)[i]) : ((const float *)p)[i];
}

INLINE void put(void *p, int64_t i, float value, int dtype)
{
    if (dtype == BFLOAT16)
        ((uint16_t *)p)[i] = narrow(value);
    else
        ((float *)p)[i] = value;
}

INLINE vec splat(float value) { return value - (vec){}; }

/* LANES elements from the i-th on, as floats. */
INLINE vec load(const void *p, int64_t i, int dtype)
{
    vec value;
    if (dtype == BFLOAT16) {
        half raw;
        memcpy(&raw, at(p, i, dtype), sizeof raw);
        value = (vec)(__builtin_convertvector(raw, uvec) << 16);
    } else
        memcpy(&value, at(p, i, dtype), sizeof value);
    return value;
}

INLINE void store(void *p, int64_t i, vec value, int dtype)
{
    void *to = (void *)at(p, i, dtype);
    if (dtype == FLOAT32) {
        memcpy(to, &value, sizeof value);
        return;
    }
#if defined(AVX512_BFLOAT16)
    __m256bh narrowed = _mm512_cvtneps_pbh((__m512)value);
    memcpy(to, &narrowed, sizeof narrowed);
#else
    uvec bits = (uvec)value;
    uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uvec nan = (uvec)(value != value);
    half narrowed = __builtin_convertvector((rounded & ~nan) | (((bits >> 16) | 0x40) & nan), half);
    memcpy(to, &narrowed, sizeof narrowed);
#endif
}

/* The same for the last `count` < LANES elements of a row; what is missing reads as 0. */
INLINE vec load_some(const void *p, int64_t i, int64_t count, int dtype)
{
    char row[BYTES] = {0};
    memcpy(row, at(p, i, dtype), count * size_of(dtype));
    return load(row, 0, dtype);
}

INLINE void store_some(void *p, int64_t i, int64_t count, vec value, int dtype)
{
    char row[BYTES];
    store(row, 0, value, dtype);
    memcpy((void *)at(p, i, dtype), row, count * size_of(dtype));
}

/* A raw vector of BYTES / size_of(dtype) elements, for `dot`. */
INLINE uvec raw(const void *p)
{
    uvec value;
    memcpy(&value, p, sizeof value);
    return value;
}

INLINE uvec raw_some(const void *p, int64_t bytes)
{
#if defined(AVX512)
    return (uvec)_mm512_maskz_loadu_epi16((__mmask32)((1ull << (bytes / 2)) - 1), p);
#else
    uvec value = {0};
    memcpy(&value, p, bytes);
    return value;
#endif
}

/* sum + the products of a and b, in which lane they fall being no matter. */
INLINE vec dot(vec sum, uvec a, uvec b, int dtype)
{
    if (dtype == FLOAT32)
        return sum + (vec)a * (vec)b;
#if defined(AVX512_BFLOAT16)
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    sum += (vec)(a << 16) * (vec)(b << 16);
    return sum + (vec)(a & 0xffff0000u) * (vec)(b & 0xffff0000u);
#endif
}

INLINE float sum_of(vec v)
{
#if defined(AVX512)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float sum = 0;
    for (int i = 0; i < LANES; i++)
        sum += v[i];
    return sum;
#endif
}

INLINE float max_of(vec v)
{
    float most = v[0];
    for (int i = 1; i < LANES; i++)
        most = v[i] > most ? v[i] : most;
    return most;
}

INLINE float dot_of(const char *a, const char *b, int64_t bytes, int dtype)
{
    vec sum = {0};
    int64_t k = 0;
    for (; k + BYTES <= bytes; k += BYTES)
        sum = dot(sum, raw(a + k), raw(b + k), dtype);
    if (k < bytes)
        sum = dot(sum, raw_some(a + k, bytes - k), raw_some(b + k, bytes - k), dtype);
    return sum_of(sum);
}

/* out[i] = the sum of v[i]. */
INLINE void sums_of(float *out, const vec *v, int count)
{
#if defined(AVX512)
    if (count == 8) {
        /* Transposed by halves: 24 instructions, where 8 sums would take 56. */
        __m512 pairs[4], fours[2];
        UNROLL for (int i = 0; i < 4; i++)
        {
            const __m512 a = (__m512)v[2 * i], b = (__m512)v[2 * i + 1];
            pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        }
        UNROLL for (int i = 0; i < 2; i++)
        {
            const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
            fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
        }
        __m512 sum = _mm512_add_ps(_mm512_shuffle_f32x4(fours[0], fours[1], 0x88), _mm512_shuffle_f32x4(fours[0], fours[1], 0xdd));
        sum = _mm512_add_ps(sum, _mm512_shuffle_f32x4(sum, sum, 0xb1)); /* lanes of four: first, first, second, second */
        _mm256_storeu_ps(out, _mm512_castps512_ps256(_mm512_shuffle_f32x4(sum, sum, 0x08)));
        return;
    }
#endif
    UNROLL for (int i = 0; i < count; i++) out[i] = sum_of(v[i]);
}

INLINE vec pick(ivec mask, vec yes, vec no) { return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask)); }

/* e^x to 2 units in the last place up to 88, where it stays; 0 below -87; NaN for NaN. Cody and Waite's reduction to
   [-ln 2 / 2, ln 2 / 2], then Taylor's polynomial of degree 7. */
INLINE vec exp_of(vec x)
{
    const vec low = splat(-87.0f), high = splat(88.0f);
    vec bounded = pick(x < low, low, x);
    bounded = pick(bounded > high, high, bounded);
    vec n = bounded * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: rounds to an integer */
    ivec power = (ivec)n;
    n -= 12582912.0f;
    vec r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = r * 1.98412698e-4f + 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 5.0e-1f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    vec value = (vec)((ivec)p + (power << 23));
    return pick(x != x, x, pick(x < low, (vec){0}, value));
}

#endif
