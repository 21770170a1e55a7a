/* What stands between the matrix products of a block: root-mean-square norm, gated activation, rotary positions. Each reads
   and writes its rows once, computes in float32 and rounds once. */
#include "products.h"

#include <math.h>

#define WORTH_A_THREAD 16384 /* elements; a parallel region costs about 2 us */

INLINE vec load_part(const void *p, int64_t i, int64_t left, int dtype)
{
    return left >= LANES ? load(p, i, dtype) : load_some(p, i, left, dtype);
}

INLINE void store_part(void *p, int64_t i, int64_t left, vec value, int dtype)
{
    if (left >= LANES)
        store(p, i, value, dtype);
    else
        store_some(p, i, left, value, dtype);
}

INLINE void norm_row(const void *x, const void *residual, const void *weight, void *out, void *summed, int64_t size, float eps,
                     int dtype)
{
    vec squares = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        vec value = load_part(x, i, size - i, dtype);
        if (residual) {
            value += load_part(residual, i, size - i, dtype);
            store_part(summed, i, size - i, value, dtype);
            value = load_part(summed, i, size - i, dtype); /* what the next block will read, rounded */
        }
        squares += value * value;
    }
    const float factor = 1.0f / sqrtf(sum_of(squares) / (float)size + eps);
    if (residual)
        x = summed;
    for (int64_t i = 0; i < size; i += LANES) {
        const vec value = load_part(x, i, size - i, dtype) * factor * load_part(weight, i, size - i, dtype);
        store_part(out, i, size - i, value, dtype);
    }
}

INLINE void rms_norm(const char *x, int64_t outer, int64_t inner, int64_t outer_stride, int64_t inner_stride, const char *residual,
                     const char *weight, char *out, char *summed, int64_t size, float eps, int threads, int dtype)
{
    const int64_t bytes = size * size_of(dtype);
    #pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < outer * inner; row++)
        norm_row(x + row / inner * outer_stride + row % inner * inner_stride, residual ? residual + row * bytes : 0, weight,
                 out + row * bytes, summed ? summed + row * bytes : 0, size, eps, dtype);
}

typedef struct {
    int64_t size;
    float eps;
    int dtype;
} Norm;

/* out = norm(x) * weight; with a residual, summed = x + residual and out = norm(summed) * weight. x: [outer, inner, size] with
   strides in bytes; the others [outer, inner, size] without gaps. */
EXPORT int torchplug_rms_norm(const Norm *norm, const char *weight, const char *x, int64_t outer, int64_t inner,
                               int64_t outer_stride, int64_t inner_stride, const char *residual, char *out, char *summed, int threads)
{
    const int64_t size = norm->size;
    if (outer * inner * size < WORTH_A_THREAD)
        threads = 1;
    BY_DTYPE(norm->dtype,
             rms_norm(x, outer, inner, outer_stride, inner_stride, residual, weight, out, summed, size, norm->eps, threads, FLOAT32),
             rms_norm(x, outer, inner, outer_stride, inner_stride, residual, weight, out, summed, size, norm->eps, threads, BFLOAT16));
    return 0;
}

INLINE void silu_and_mul(const char *x, char *out, int64_t rows, int64_t size, int threads, int dtype)
{
    const int64_t bytes = size * size_of(dtype);
    #pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const char *gate = x + row * 2 * bytes, *up = gate + bytes;
        for (int64_t i = 0; i < size; i += LANES) {
            const vec g = load_part(gate, i, size - i, dtype);
            const vec value = g / (exp_of(-g) + 1.0f) * load_part(up, i, size - i, dtype);
            store_part(out + row * bytes, i, size - i, value, dtype);
        }
    }
}

/* out = silu(x[:, :size]) * x[:, size:]; x: [rows, 2 * size], out: [rows, size]. */
EXPORT int torchplug_silu_and_mul(const char *x, char *out, int64_t rows, int64_t size, int threads, int dtype)
{
    if (rows * size < WORTH_A_THREAD)
        threads = 1;
    BY_DTYPE(dtype, silu_and_mul(x, out, rows, size, threads, FLOAT32), silu_and_mul(x, out, rows, size, threads, BFLOAT16));
    return 0;
}

INLINE void rotation(const int64_t *positions, const float *frequencies, char *cos_out, char *sin_out, int64_t rows, int64_t pairs,
                     float scaling, int interleaved, int threads, int dtype)
{
    #pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t pair = 0; pair < pairs; pair++) {
            const float angle = (float)positions[row] * frequencies[pair];
            const float c = cosf(angle) * scaling, s = sinf(angle) * scaling;
            const int64_t first = row * 2 * pairs + (interleaved ? 2 * pair : pair);
            const int64_t second = first + (interleaved ? 1 : pairs);
            put(cos_out, first, c, dtype), put(cos_out, second, c, dtype);
            put(sin_out, first, -s, dtype), put(sin_out, second, s, dtype);
        }
}

typedef struct {
    int64_t pairs;
    float scaling;
    int interleaved, dtype;
} Rotary;

/* cos and sin [rows, 2 * pairs] of positions * frequencies, times the scaling, for each member of a pair; sin with the sign of
   what it multiplies. */
EXPORT int torchplug_rotation(const Rotary *rotary, const int64_t *positions, const float *frequencies, char *cos_out, char *sin_out,
                              int64_t rows, int threads)
{
    if (rows * rotary->pairs < WORTH_A_THREAD / 64) /* a sine costs that much more than a sum */
        threads = 1;
    BY_DTYPE(rotary->dtype,
             rotation(positions, frequencies, cos_out, sin_out, rows, rotary->pairs, rotary->scaling, rotary->interleaved, threads,
                      FLOAT32),
             rotation(positions, frequencies, cos_out, sin_out, rows, rotary->pairs, rotary->scaling, rotary->interleaved, threads,
                      BFLOAT16));
    return 0;
}

INLINE void turn_head(const char *x, const char *cos, const char *sin, char *out, int64_t rotary_dim, int64_t head_size,
                      int interleaved, int dtype)
{
    if (interleaved)
        for (int64_t i = 0; i < rotary_dim; i += 2) {
            const float a = get(x, i, dtype), b = get(x, i + 1, dtype);
            put(out, i, a * get(cos, i, dtype) + b * get(sin, i, dtype), dtype);
            put(out, i + 1, b * get(cos, i + 1, dtype) + a * get(sin, i + 1, dtype), dtype);
        }
    else {
        const int64_t half_dim = rotary_dim / 2;
        for (int64_t i = 0; i < half_dim; i += LANES) {
            const int64_t left = half_dim - i;
            const vec a = load_part(x, i, left, dtype), b = load_part(x, half_dim + i, left, dtype);
            store_part(out, i, left, a * load_part(cos, i, left, dtype) + b * load_part(sin, i, left, dtype), dtype);
            store_part(out, half_dim + i, left,
                       b * load_part(cos, half_dim + i, left, dtype) + a * load_part(sin, half_dim + i, left, dtype), dtype);
        }
    }
    memcpy((char *)at(out, rotary_dim, dtype), at(x, rotary_dim, dtype), (head_size - rotary_dim) * size_of(dtype));
}

INLINE void rotary(const char *x, int64_t x_stride, const char *cos, const char *sin, char *out, int64_t rows, int64_t heads,
                   int64_t head_size, int64_t rotary_dim, int interleaved, int threads, int dtype)
{
    const int64_t head_bytes = head_size * size_of(dtype), turn_bytes = rotary_dim * size_of(dtype);
    #pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t h = 0; h < heads; h++)
            turn_head(x + row * x_stride + h * head_bytes, cos + row * turn_bytes, sin + row * turn_bytes,
                      out + (row * heads + h) * head_bytes, rotary_dim, head_size, interleaved, dtype);
}

/* x: [rows, heads * head_size], rows x_stride bytes apart; cos, sin: [rows, rotary_dim]; out: [rows, heads * head_size]. */
EXPORT int torchplug_rotary(const char *x, int64_t x_stride, const char *cos, const char *sin, char *out, int64_t rows,
                             int64_t heads, int64_t head_size, int64_t rotary_dim, int interleaved, int threads, int dtype)
{
    if (rows * heads * head_size < WORTH_A_THREAD)
        threads = 1;
    BY_DTYPE(dtype, rotary(x, x_stride, cos, sin, out, rows, heads, head_size, rotary_dim, interleaved, threads, FLOAT32),
             rotary(x, x_stride, cos, sin, out, rows, heads, head_size, rotary_dim, interleaved, threads, BFLOAT16));
    return 0;
}
