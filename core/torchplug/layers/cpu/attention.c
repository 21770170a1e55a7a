/* Attention of one new token per request over the paged cache, read where it lies by the block table.

   A task is (request, key head, part of PART keys): it serves all query heads of that key head, so that a key is read once.
   Parts are of fixed size, whatever the batch and the threads: a request's result depends on itself only. Each part leaves its
   greatest score, the sum of its weights and the weighted sum of its values, and a second pass combines the parts of a
   request. Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018, section 3; the division into
   parts is that of Flash-Decoding (Dao et al., 2023).

   A slot of the cache is [kv_heads, head_size]. Slots that no token of the request was written to are never read. */
#include "vector.h"

#include <math.h>
#include <stdlib.h>

#define PART 128
#define HEADS 8 /* query heads at a time */

/* Where the tokens of a step are; one new token per request. */
typedef struct {
    const int32_t *tables;  /* [requests, table_width], block ids */
    const int32_t *lengths; /* [requests], tokens of each request with the new one */
    const int64_t *slots;   /* [requests], where the new key and value go */
    int64_t requests;
    int64_t table_width;
    int64_t block_size;
    int64_t window; /* only so many last tokens are seen; 0: all */
} Step;

/* An attention layer. */
typedef struct {
    int64_t kv_heads, group, head_size;
    float scale;
    int dtype;
} Layer;

typedef struct {
    const char *query, *key, *value; /* rows *_stride bytes apart */
    int64_t query_stride, key_stride, value_stride;
    char *keys, *values; /* [slots, kv_heads, head_size] */
    char *out;           /* [requests, kv_heads * group, head_size] */
    int64_t kv_heads, group, head_size;
    float scale;
} Heads;

/* totals[h][d..] += the sum over keys of weights[h][key] * value[key][d..], for `vecs` vectors of d. */
INLINE void weigh(int heads, int vecs, const char *const *value, const float *weights, int64_t count, float *totals,
                  int64_t head_size, int64_t d, int dtype)
{
    vec total[HEADS][4];
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int i = 0; i < vecs; i++)
            total[h][i] = (vec){0};
    for (int64_t j = 0; j < count; j++)
        UNROLL for (int i = 0; i < vecs; i++) {
            const vec v = load(value[j], d + i * LANES, dtype);
            UNROLL for (int h = 0; h < heads; h++)
                total[h][i] += v * weights[h * PART + j];
        }
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int i = 0; i < vecs; i++)
            store(totals, h * head_size + d + i * LANES, total[h][i], FLOAT32);
}

INLINE void weigh_rest(const char *const *value, const float *weights, int64_t count, float *totals, int64_t d, int64_t elements,
                       int dtype)
{
    vec total = {0};
    for (int64_t j = 0; j < count; j++)
        total += load_some(value[j], d, elements, dtype) * weights[j];
    store_some(totals, d, elements, total, FLOAT32);
}

/* scores[0..8] = query . key[0..8] */
INLINE void score8(const char *query, const char *const *key, int64_t bytes, float *scores, int dtype)
{
    vec sum[8] = {0};
    int64_t k = 0;
    for (; k + BYTES <= bytes; k += BYTES) {
        const uvec a = raw(query + k);
        UNROLL for (int j = 0; j < 8; j++)
            sum[j] = dot(sum[j], a, raw(key[j] + k), dtype);
    }
    if (k < bytes) {
        const uvec a = raw_some(query + k, bytes - k);
        UNROLL for (int j = 0; j < 8; j++)
            sum[j] = dot(sum[j], a, raw_some(key[j] + k, bytes - k), dtype);
    }
    sums_of(scores, sum, 8);
}

/* `heads` query heads on `count` <= PART keys: totals [heads, head_size], and the greatest score and the sum of weights of each
   head. key and value have 8 more entries that may be read. */
INLINE void attend_part(int64_t heads, const char *query, const char *const *key, const char *const *value, int64_t count,
                        int64_t head_size, float scale, float *totals, float *greatest, float *sums, int dtype)
{
    float weights[HEADS * PART];
    const int64_t bytes = head_size * size_of(dtype);
    for (int64_t h = 0; h < heads; h++) {
        float *row = weights + h * PART;
        for (int64_t j = 0; j < count; j += 8)
            score8(query + h * bytes, key + j, bytes, row + j, dtype);
        for (int64_t j = count; j < (count + LANES - 1) / LANES * LANES; j++)
            row[j] = -INFINITY;
        vec most = splat(-INFINITY);
        for (int64_t j = 0; j < count; j += LANES) {
            const vec score = load(row, j, FLOAT32) * scale;
            store(row, j, score, FLOAT32);
            most = pick(score > most, score, most);
        }
        greatest[h] = max_of(most);
        vec sum = {0};
        for (int64_t j = 0; j < count; j += LANES) {
            const vec weight = exp_of(load(row, j, FLOAT32) - greatest[h]);
            store(row, j, weight, FLOAT32);
            sum += weight;
        }
        sums[h] = sum_of(sum);
    }
    int64_t h = 0;
    for (; h + 4 <= heads; h += 4) {
        const float *row = weights + h * PART;
        float *to = totals + h * head_size;
        int64_t d = 0;
        for (; d + 2 * LANES <= head_size; d += 2 * LANES)
            weigh(4, 2, value, row, count, to, head_size, d, dtype);
        for (; d + LANES <= head_size; d += LANES)
            weigh(4, 1, value, row, count, to, head_size, d, dtype);
        for (int i = 0; d < head_size && i < 4; i++)
            weigh_rest(value, row + i * PART, count, to + i * head_size, d, head_size - d, dtype);
    }
    for (; h < heads; h++) {
        const float *row = weights + h * PART;
        float *to = totals + h * head_size;
        int64_t d = 0;
        for (; d + 4 * LANES <= head_size; d += 4 * LANES)
            weigh(1, 4, value, row, count, to, head_size, d, dtype);
        for (; d + LANES <= head_size; d += LANES)
            weigh(1, 1, value, row, count, to, head_size, d, dtype);
        if (d < head_size)
            weigh_rest(value, row, count, to, d, head_size - d, dtype);
    }
}

/* What one task leaves for each query head, in `parts`: greatest score, sum of weights, totals [head_size]. */
INLINE void run_task(const Step *step, const Heads *heads, int64_t request, int64_t kv_head, int64_t part, float *left, int dtype)
{
    const int64_t head_bytes = heads->head_size * size_of(dtype), slot_bytes = heads->kv_heads * head_bytes;
    const int64_t length = step->lengths[request];
    const int64_t first = step->window && length > step->window ? length - step->window : 0;
    const int64_t start = first + part * PART, count = length - start < PART ? length - start : PART;
    const int32_t *table = step->tables + request * step->table_width;
    if (start + count == length) {
        /* The new key is in this part, and only this task reads it. */
        const int64_t slot = step->slots[request] * slot_bytes + kv_head * head_bytes;
        memcpy(heads->keys + slot, heads->key + request * heads->key_stride + kv_head * head_bytes, head_bytes);
        memcpy(heads->values + slot, heads->value + request * heads->value_stride + kv_head * head_bytes, head_bytes);
    }
    const char *key[PART + 8], *value[PART + 8];
    int64_t block = start / step->block_size, offset = start % step->block_size;
    for (int64_t j = 0; j < count; j++) {
        const int64_t slot = ((int64_t)table[block] * step->block_size + offset) * slot_bytes + kv_head * head_bytes;
        key[j] = heads->keys + slot;
        value[j] = heads->values + slot;
        /* Heads of other tasks lie between, which keeps the processor from fetching ahead on its own. */
        for (int64_t k = 0; k < head_bytes; k += 64) {
            __builtin_prefetch(key[j] + k, 0, 2);
            __builtin_prefetch(value[j] + k, 0, 2);
        }
        if (++offset == step->block_size)
            block++, offset = 0;
    }
    for (int64_t j = count; j < (count + 7) / 8 * 8; j++)
        key[j] = key[count - 1];
    const char *query = heads->query + request * heads->query_stride + kv_head * heads->group * head_bytes;
    const int64_t width = heads->head_size + 2;
    for (int64_t h = 0; h < heads->group; h += HEADS) {
        const int64_t some = heads->group - h < HEADS ? heads->group - h : HEADS;
        float totals[HEADS * heads->head_size], greatest[HEADS], sums[HEADS];
        attend_part(some, query + h * head_bytes, key, value, count, heads->head_size, heads->scale, totals, greatest, sums, dtype);
        for (int64_t i = 0; i < some; i++) {
            float *to = left + (h + i) * width;
            to[0] = greatest[i];
            to[1] = sums[i];
            memcpy(to + 2, totals + i * heads->head_size, heads->head_size * 4);
        }
    }
}

/* Combine the `parts` of one query head, `stride` floats apart, into out [head_size]. */
INLINE void combine(const float *left, int64_t parts, int64_t stride, int64_t head_size, char *out, int dtype)
{
    float greatest = left[0];
    for (int64_t p = 1; p < parts; p++)
        greatest = left[p * stride] > greatest ? left[p * stride] : greatest;
    float total[head_size], sum = 0;
    memset(total, 0, sizeof total);
    for (int64_t p = 0; p < parts; p++) {
        const float *part = left + p * stride;
        const float factor = exp_of(splat(part[0] - greatest))[0];
        sum += part[1] * factor;
        for (int64_t d = 0; d < head_size; d++)
            total[d] += part[2 + d] * factor;
    }
    for (int64_t d = 0; d < head_size; d++)
        put(out, d, total[d] / sum, dtype);
}

INLINE int64_t parts_of(const Step *step, int64_t request)
{
    const int64_t length = step->lengths[request];
    return ((step->window && length > step->window ? step->window : length) + PART - 1) / PART;
}

INLINE void decode(const Step *step, const Heads *heads, float *left, int64_t most_parts, int threads, int dtype)
{
    const int64_t part_size = heads->group * (heads->head_size + 2), head_bytes = heads->head_size * size_of(dtype);
    #pragma omp parallel num_threads(threads) if (threads > 1)
    {
        #pragma omp for collapse(3) schedule(dynamic, 1)
        for (int64_t request = 0; request < step->requests; request++)
            for (int64_t kv_head = 0; kv_head < heads->kv_heads; kv_head++)
                for (int64_t part = 0; part < most_parts; part++)
                    if (part < parts_of(step, request))
                        run_task(step, heads, request, kv_head, part,
                                 left + ((request * heads->kv_heads + kv_head) * most_parts + part) * part_size, dtype);
        #pragma omp for collapse(2) schedule(static)
        for (int64_t request = 0; request < step->requests; request++)
            for (int64_t kv_head = 0; kv_head < heads->kv_heads; kv_head++)
                for (int64_t h = 0; h < heads->group; h++)
                    combine(left + (request * heads->kv_heads + kv_head) * most_parts * part_size + h * (heads->head_size + 2),
                            parts_of(step, request), part_size, heads->head_size,
                            heads->out + ((request * heads->kv_heads + kv_head) * heads->group + h) * head_bytes, dtype);
    }
}

/* Store each request's new key and value, and attend its query to what it has. Returns 0, or 1 without memory. */
EXPORT int torchplug_paged_attention(const Step *step, const Layer *layer, const char *query, int64_t query_stride, const char *key,
                                     int64_t key_stride, const char *value, int64_t value_stride, char *keys, char *values, char *out,
                                     int threads)
{
    const Heads heads = {query,  key, value,           query_stride, key_stride,       value_stride, keys,
                         values, out, layer->kv_heads, layer->group, layer->head_size, layer->scale};
    int64_t most_parts = 0;
    for (int64_t request = 0; request < step->requests; request++)
        most_parts = parts_of(step, request) > most_parts ? parts_of(step, request) : most_parts;
    const int64_t tasks = step->requests * heads.kv_heads * most_parts;
    if (tasks == 0)
        return 0;
    float *left = malloc(tasks * heads.group * (heads.head_size + 2) * sizeof(float));
    if (!left)
        return 1;
    if (tasks == 1)
        threads = 1;
    BY_DTYPE(layer->dtype, decode(step, &heads, left, most_parts, threads, FLOAT32),
             decode(step, &heads, left, most_parts, threads, BFLOAT16));
    free(left);
    return 0;
}
