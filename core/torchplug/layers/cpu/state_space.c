/* Recurrent layers over one step: every request of the flat batch continues its own state, be it by one token or by
   thousands. The scans go through the tokens in order with the state in the first-level cache, which reads and writes each
   token once; on a CPU that beats the chunked forms, which take as many products and memory for what lies between them.

   States lie in memory as [slots, ...] with any stride between slots. Rows of tensors may be strided, in bytes. */
#include "vector.h"

#include <math.h>
#include <stdlib.h>

#define MOST_TAPS 8
#define MOST_STATE 256 /* elements of a channel's state */
#define WORTH_A_THREAD 8192 /* elements; a parallel region costs about 2 us */

/* The requests of a step: tokens [first, first + length) of the flat batch; slot -1 for none; fresh starts from zero. */
typedef struct {
    const int64_t *first, *length, *slot, *fresh;
    int64_t count, tokens, threads;
} Requests;

typedef struct {
    char *memory; /* null where nothing is kept */
    int64_t stride; /* bytes from slot to slot */
    int dtype;
} States;

typedef struct {
    const char *memory;
    int64_t stride; /* bytes from row to row */
} Rows;

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

INLINE vec silu_of(vec x) { return x / (exp_of(-x) + 1.0f); }

/* 2^x for x <= 0, to 2 units in the last place; at most 1e-38 below -126. The polynomial is that of Cephes' exp2f. */
INLINE vec power_of_two(vec x)
{
#if defined(AVX512)
    const vec n = (vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const vec low = splat(-126.0f);
    x = pick(x < low, low, x);
    const vec shifted = x + 12582912.0f; /* 1.5 * 2^23: rounds to an integer */
    const vec n = shifted - 12582912.0f;
#endif
    const vec r = x - n;
    vec p = r * 1.535336188319500e-4f + 1.339887440266574e-3f;
    p = p * r + 9.618437357674640e-3f;
    p = p * r + 5.550332471162809e-2f;
    p = p * r + 2.402264791363012e-1f;
    p = p * r + 6.931472028550421e-1f;
    p = p * r + 1.0f;
#if defined(AVX512)
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return (vec)((ivec)p + ((ivec)shifted << 23));
#endif
}

/* log(1 + e^x) = max(x, 0) + log(1 + u), u = e^-|x|; log(1 + u) = 2 artanh(u / (2 + u)), its series to the 15th power. */
INLINE vec softplus_of(vec x)
{
    const vec u = exp_of(pick(x > 0.0f, -x, x));
    const vec s = u / (u + 2.0f), q = s * s;
    vec p = q * (1.0f / 15) + (1.0f / 13);
    p = p * q + (1.0f / 11);
    p = p * q + (1.0f / 9);
    p = p * q + (1.0f / 7);
    p = p * q + (1.0f / 5);
    p = p * q + (1.0f / 3);
    p = p * q + 1.0f;
    return pick(x > 0.0f, x, pick(x == x, (vec){0}, x)) + 2.0f * s * p;
}

/* -- causal convolution ------------------------------------------------------------------------------------------ */

typedef struct {
    int64_t channels, taps;
    const float *filters; /* [taps, channels] */
    const float *offset; /* [channels], or null */
    int silu, dtype;
} Convolution;

INLINE void convolve(const Convolution *conv, const Requests *requests, const States *states, const Rows *x, char *out,
                     int64_t i, int taps, int dtype)
{
    const int64_t channels = conv->channels, left = channels - i, row = channels * size_of(dtype);
    const int64_t past = channels * size_of(states->dtype);
    vec filter[MOST_TAPS], window[MOST_TAPS];
    for (int k = 0; k < taps; k++)
        filter[k] = load_part(conv->filters + k * channels, i, left, FLOAT32);
    const vec offset = conv->offset ? load_part(conv->offset, i, left, FLOAT32) : (vec){0};
    for (int64_t r = 0; r < requests->count; r++) {
        const int64_t slot = requests->slot[r], first = requests->first[r];
        char *state = states->memory && slot >= 0 ? states->memory + slot * states->stride : 0;
        for (int k = 0; k < taps - 1; k++)
            window[k] = state && !requests->fresh[r] ? load_part(state + k * past, i, left, states->dtype) : (vec){0};
        for (int64_t t = first; t < first + requests->length[r]; t++) {
            window[taps - 1] = load_part(x->memory + t * x->stride, i, left, dtype);
            vec sum = offset;
            for (int k = 0; k < taps; k++)
                sum += filter[k] * window[k];
            for (int k = 1; k < taps; k++)
                window[k - 1] = window[k];
            store_part(out + t * row, i, left, conv->silu ? silu_of(sum) : sum, dtype);
        }
        if (state)
            for (int k = 0; k < taps - 1; k++)
                store_part(state + k * past, i, left, window[k], states->dtype);
    }
}

INLINE void convolution(const Convolution *conv, const Requests *requests, const States *states, const Rows *x, char *out,
                        int dtype)
{
    const int threads = requests->tokens * conv->channels < WORTH_A_THREAD ? 1 : (int)requests->threads;
    #pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < conv->channels; i += LANES)
        switch (conv->taps) {
        case 2: convolve(conv, requests, states, x, out, i, 2, dtype); break;
        case 3: convolve(conv, requests, states, x, out, i, 3, dtype); break;
        case 4: convolve(conv, requests, states, x, out, i, 4, dtype); break;
        default: convolve(conv, requests, states, x, out, i, (int)conv->taps, dtype);
        }
}

/* out [tokens, channels] = act(offset + sum over k of filters[k] * x[t - taps + 1 + k]); the last taps - 1 inputs of a
   request become the first rows of its state. */
EXPORT int torchplug_causal_conv(const Convolution *conv, const Requests *requests, char *state, int64_t state_stride,
                                 int state_dtype, const char *x, int64_t x_stride, char *out)
{
    const States states = {state, state_stride, state_dtype};
    const Rows rows = {x, x_stride};
    BY_DTYPE(conv->dtype, convolution(conv, requests, &states, &rows, out, FLOAT32),
             convolution(conv, requests, &states, &rows, out, BFLOAT16));
    return 0;
}

/* -- what both scans share --------------------------------------------------------------------------------------- */

/* What a state's elements are filled up to: a multiple of every processor's LANES, as the caller knows none of them. */
INLINE int64_t padded(int64_t size) { return (size + 15) / 16 * 16; }

/* `count` groups of `size` elements as floats, each filled up with zeros. */
INLINE void spread_row(const char *from, float *to, int64_t count, int64_t size, int dtype)
{
    const int64_t width = padded(size);
    for (int64_t g = 0; g < count; g++)
        for (int64_t n = 0; n < width; n += LANES)
            store(to, g * width + n, n < size ? load_part(from, g * size + n, size - n, dtype) : (vec){0}, FLOAT32);
}

INLINE void load_state(float *h, const char *state, int64_t rows, int64_t size, int64_t width, int dtype)
{
    if (!state || rows < LANES || size < width)
        memset(h, 0, LANES * width * sizeof *h);
    for (int64_t row = 0; state && row < rows; row++)
        for (int64_t n = 0; n < size; n += LANES)
            store(h, row * width + n, load_part(state, row * size + n, size - n, dtype), FLOAT32);
}

INLINE void store_state(const float *h, char *state, int64_t rows, int64_t size, int64_t width, int dtype)
{
    for (int64_t row = 0; row < rows; row++)
        for (int64_t n = 0; n < size; n += LANES)
            store_part(state, row * size + n, size - n, load(h, row * width + n, FLOAT32), dtype);
}

#define TOGETHER (LANES < 8 ? LANES : 8) /* rows of the state whose sums are taken at once */

/* -- Mamba-1 ------------------------------------------------------------------------------------------------------ */

typedef struct {
    int64_t channels, size;
    const float *decay; /* [padded channels, padded size], times log2(e) */
    const float *bias; /* [channels], of the step */
    const float *skip; /* [channels] */
    int dtype;
} Selective;

INLINE void select_block(const Selective *scan, const Requests *requests, const States *states, const Rows *x, const Rows *dt,
                         const Rows *gate, const float *b, const float *c, char *out, int64_t i, int64_t width, int dtype)
{
    const int64_t channels = scan->channels, size = scan->size, left = channels - i, rows = left < LANES ? left : LANES;
    const float *decay = scan->decay + i * width;
    const vec skip = load_part(scan->skip, i, left, FLOAT32), bias = load_part(scan->bias, i, left, FLOAT32);
    float h[LANES * MOST_STATE] __attribute__((aligned(64)));
    for (int64_t r = 0; r < requests->count; r++) {
        const int64_t slot = requests->slot[r], first = requests->first[r];
        char *state = states->memory && slot >= 0
                          ? states->memory + slot * states->stride + i * size * size_of(states->dtype)
                          : 0;
        load_state(h, requests->fresh[r] ? 0 : state, rows, size, width, states->dtype);
        for (int64_t t = first; t < first + requests->length[r]; t++) {
            const vec step = softplus_of(load_part(dt->memory + t * dt->stride, i, left, dtype) + bias);
            const vec input = load_part(x->memory + t * x->stride, i, left, dtype), added = step * input;
            const float *bt = b + t * width, *ct = c + t * width;
            float y[LANES] __attribute__((aligned(64)));
            for (int q = 0; q < LANES; q += TOGETHER) {
                vec sums[TOGETHER];
                UNROLL for (int k = 0; k < TOGETHER; k++)
                {
                    const vec steps = splat(step[q + k]), inputs = splat(added[q + k]);
                    sums[k] = (vec){0};
                    for (int64_t n = 0; n < width; n += LANES) {
                        const int64_t at_n = (q + k) * width + n;
                        vec value = load(h, at_n, FLOAT32) * power_of_two(steps * load(decay, at_n, FLOAT32));
                        value += inputs * load(bt, n, FLOAT32);
                        store(h, at_n, value, FLOAT32);
                        sums[k] += value * load(ct, n, FLOAT32);
                    }
                }
                sums_of(y + q, sums, TOGETHER);
            }
            const vec result = load(y, 0, FLOAT32) + skip * input;
            const vec gates = load_part(gate->memory + t * gate->stride, i, left, dtype);
            store_part(out + t * channels * size_of(dtype), i, left, result * silu_of(gates), dtype);
        }
        if (state)
            store_state(h, state, rows, size, width, states->dtype);
    }
}

INLINE void selective(const Selective *scan, const Requests *requests, const States *states, const Rows *x, const Rows *dt,
                      const Rows *gate, const Rows *bc, float *scratch, char *out, int dtype)
{
    const int64_t size = scan->size, width = padded(size), tokens = requests->tokens;
    const int threads = tokens * scan->channels * size < WORTH_A_THREAD ? 1 : (int)requests->threads;
    float *b = scratch, *c = scratch + tokens * width;
    #pragma omp parallel num_threads(threads) if (threads > 1)
    {
        #pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; t++) {
            const char *row = bc->memory + t * bc->stride;
            spread_row(row, b + t * width, 1, size, dtype);
            spread_row(at(row, size, dtype), c + t * width, 1, size, dtype);
        }
        #pragma omp for schedule(static)
        for (int64_t i = 0; i < scan->channels; i += LANES)
            if (width == 16)
                select_block(scan, requests, states, x, dt, gate, b, c, out, i, 16, dtype);
            else
                select_block(scan, requests, states, x, dt, gate, b, c, out, i, width, dtype);
    }
}

/* out [tokens, channels] = (scan of x by softplus(dt + bias) + skip * x) * silu(gate). bc: [tokens, b then c], each `size` wide.
   x and dt have no gaps between rows. Returns 1 where there is no memory for b and c as floats. */
EXPORT int torchplug_selective_scan(const Selective *scan, const Requests *requests, char *state, int64_t state_stride,
                                    int state_dtype, const char *x, const char *dt, const char *gate, int64_t gate_stride,
                                    const char *bc, int64_t bc_stride, char *out)
{
    const int64_t row = scan->channels * size_of(scan->dtype);
    const States states = {state, state_stride, state_dtype};
    const Rows xs = {x, row}, dts = {dt, row}, gates = {gate, gate_stride}, bcs = {bc, bc_stride};
    float *scratch = malloc(2 * requests->tokens * padded(scan->size) * sizeof *scratch);
    if (!scratch)
        return 1;
    BY_DTYPE(scan->dtype, selective(scan, requests, &states, &xs, &dts, &gates, &bcs, scratch, out, FLOAT32),
             selective(scan, requests, &states, &xs, &dts, &gates, &bcs, scratch, out, BFLOAT16));
    free(scratch);
    return 0;
}

/* -- Mamba-2 ------------------------------------------------------------------------------------------------------ */

typedef struct {
    int64_t heads, head_dim, size, groups;
    const float *decay; /* [heads], times log2(e) */
    const float *bias; /* [heads], of the step */
    const float *skip; /* [heads] */
    float least, greatest; /* step */
    int dtype;
} Heads;

INLINE void head_block(const Heads *scan, const Requests *requests, const States *states, const Rows *xbc, const float *steps,
                       const float *decays, const float *b, const float *c, float *out, int64_t head, int64_t p, int64_t width,
                       int dtype)
{
    const int64_t size = scan->size, heads = scan->heads, head_dim = scan->head_dim, groups = scan->groups;
    const int64_t left = head_dim - p, rows = left < LANES ? left : LANES, group = head / (heads / groups);
    const int64_t channel = head * head_dim + p;
    float h[LANES * MOST_STATE] __attribute__((aligned(64)));
    for (int64_t r = 0; r < requests->count; r++) {
        const int64_t slot = requests->slot[r], first = requests->first[r];
        char *state = states->memory && slot >= 0
                          ? states->memory + slot * states->stride + channel * size * size_of(states->dtype)
                          : 0;
        load_state(h, requests->fresh[r] ? 0 : state, rows, size, width, states->dtype);
        for (int64_t t = first; t < first + requests->length[r]; t++) {
            const vec kept = splat(decays[t * heads + head]);
            const vec input = load_part(at(xbc->memory + t * xbc->stride, channel, dtype), 0, left, dtype);
            const vec added = input * steps[t * heads + head];
            const float *bt = b + (t * groups + group) * width, *ct = c + (t * groups + group) * width;
            float y[LANES] __attribute__((aligned(64)));
            for (int q = 0; q < LANES; q += TOGETHER) {
                vec sums[TOGETHER], inputs[TOGETHER];
                UNROLL for (int k = 0; k < TOGETHER; k++)
                {
                    sums[k] = (vec){0};
                    inputs[k] = splat(added[q + k]);
                }
                for (int64_t n = 0; n < width; n += LANES) {
                    const vec keys = load(bt, n, FLOAT32), queries = load(ct, n, FLOAT32);
                    UNROLL for (int k = 0; k < TOGETHER; k++)
                    {
                        const int64_t at_n = (q + k) * width + n;
                        const vec value = load(h, at_n, FLOAT32) * kept + inputs[k] * keys;
                        store(h, at_n, value, FLOAT32);
                        sums[k] += value * queries;
                    }
                }
                sums_of(y + q, sums, TOGETHER);
            }
            const vec result = load(y, 0, FLOAT32) + scan->skip[head] * input;
            store_part(out + t * heads * head_dim, channel, left, result, FLOAT32);
        }
        if (state)
            store_state(h, state, rows, size, width, states->dtype);
    }
}

INLINE void by_heads(const Heads *scan, const Requests *requests, const States *states, const Rows *xbc, const Rows *dt,
                     float *scratch, float *out, int dtype)
{
    const int64_t size = scan->size, width = padded(size), tokens = requests->tokens, heads = scan->heads, groups = scan->groups;
    const int threads = tokens * heads * scan->head_dim * size < 4 * WORTH_A_THREAD ? 1 : (int)requests->threads;
    const int64_t head_dim = scan->head_dim, blocks = (head_dim + LANES - 1) / LANES;
    float *b = scratch, *c = b + tokens * groups * width, *steps = c + tokens * groups * width, *decays = steps + tokens * heads;
    #pragma omp parallel num_threads(threads) if (threads > 1)
    {
        #pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; t++) {
            const char *row = at(xbc->memory + t * xbc->stride, heads * head_dim, dtype);
            spread_row(row, b + t * groups * width, groups, size, dtype);
            spread_row(at(row, groups * size, dtype), c + t * groups * width, groups, size, dtype);
            for (int64_t i = 0; i < heads; i += LANES) {
                const int64_t left = heads - i;
                vec step = softplus_of(load_part(dt->memory + t * dt->stride, i, left, dtype) +
                                       load_part(scan->bias, i, left, FLOAT32));
                const vec least = splat(scan->least), greatest = splat(scan->greatest);
                step = pick(step < least, least, step);
                step = pick(step > greatest, greatest, step);
                store_part(steps + t * heads, i, left, step, FLOAT32);
                store_part(decays + t * heads, i, left, power_of_two(step * load_part(scan->decay, i, left, FLOAT32)), FLOAT32);
            }
        }
        #pragma omp for schedule(static)
        for (int64_t block = 0; block < heads * blocks; block++) {
            const int64_t head = block / blocks, p = block % blocks * LANES;
            if (width == 64)
                head_block(scan, requests, states, xbc, steps, decays, b, c, out, head, p, 64, dtype);
            else if (width == 128)
                head_block(scan, requests, states, xbc, steps, decays, b, c, out, head, p, 128, dtype);
            else
                head_block(scan, requests, states, xbc, steps, decays, b, c, out, head, p, width, dtype);
        }
    }
}

/* out float [tokens, heads * head_dim] = scan of x by softplus(dt + bias) + skip * x. xbc: [tokens, x, b, c], b and c being
   [groups, size]. Returns 1 where there is no memory for b, c, steps and decays as floats. */
EXPORT int torchplug_ssd_scan(const Heads *scan, const Requests *requests, char *state, int64_t state_stride, int state_dtype,
                              const char *xbc, int64_t xbc_stride, const char *dt, int64_t dt_stride, float *out)
{
    const States states = {state, state_stride, state_dtype};
    const Rows rows = {xbc, xbc_stride}, dts = {dt, dt_stride};
    float *scratch = malloc(requests->tokens * 2 * (scan->groups * padded(scan->size) + scan->heads) * sizeof *scratch);
    if (!scratch)
        return 1;
    BY_DTYPE(scan->dtype, by_heads(scan, requests, &states, &rows, &dts, scratch, out, FLOAT32),
             by_heads(scan, requests, &states, &rows, &dts, scratch, out, BFLOAT16));
    free(scratch);
    return 0;
}

INLINE void gated_norm(const float *x, const Rows *gate, const char *weight, char *out, int64_t rows, int64_t groups,
                       int64_t size, float eps, int threads, int dtype)
{
    const int64_t width = groups * size;
    #pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t g = 0; g < groups; g++) {
            const float *values = x + row * width + g * size;
            const char *gates = at(gate->memory + row * gate->stride, g * size, dtype);
            const char *weights = at(weight, g * size, dtype);
            char *to = (char *)at(out, row * width + g * size, dtype);
            vec squares = {0};
            for (int64_t i = 0; i < size; i += LANES) {
                const vec value = load_part(values, i, size - i, FLOAT32) * silu_of(load_part(gates, i, size - i, dtype));
                squares += value * value;
            }
            const float factor = 1.0f / sqrtf(sum_of(squares) / (float)size + eps);
            for (int64_t i = 0; i < size; i += LANES) {
                const vec value = load_part(values, i, size - i, FLOAT32) * silu_of(load_part(gates, i, size - i, dtype));
                store_part(to, i, size - i, value * factor * load_part(weights, i, size - i, dtype), dtype);
            }
        }
}

typedef struct {
    int64_t groups, size;
    float eps;
    int dtype;
} GatedNorm;

/* out [rows, groups * size] = norm(x * silu(gate)) * weight, the norm over each group. */
EXPORT int torchplug_gated_rms_norm(const GatedNorm *norm, const char *weight, const float *x, const char *gate,
                                    int64_t gate_stride, char *out, int64_t rows, int threads)
{
    const Rows gates = {gate, gate_stride};
    if (rows * norm->groups * norm->size < WORTH_A_THREAD)
        threads = 1;
    BY_DTYPE(norm->dtype, gated_norm(x, &gates, weight, out, rows, norm->groups, norm->size, norm->eps, threads, FLOAT32),
             gated_norm(x, &gates, weight, out, rows, norm->groups, norm->size, norm->eps, threads, BFLOAT16));
    return 0;
}
