/* The experts of a mixture in one call: one expert after another its tokens are gathered, go through two products and a gate, and
   in the end each token's experts are added up in the order in which it chose them.

   The threads share every product; dealing whole experts to them was no faster for any number of tokens. */
#include <stdlib.h>

#include "products.h"

typedef struct {
    Matrix gate_up, down;
    int64_t slots;
} Experts;

typedef struct {
    const char *w13, *b13, *w2, *b2, *x;
    int64_t top_k;
} Layer;

/* The tokens of `count` picks through one slot: scratch holds them, gate and up, and their product; out: [count, hidden]. */
static void run_slot(const Experts *experts, const Layer *layer, int64_t slot, const int64_t *picks, int64_t count, char *scratch,
                     char *out, int threads)
{
    const int dtype = experts->down.dtype;
    const int64_t size = size_of(dtype), hidden = experts->down.out, inner = experts->down.in;
    const int64_t row = hidden * size;
    char *gate_up = scratch + count * row, *gated = gate_up + count * 2 * inner * size;
    for (int64_t i = 0; i < count; i++)
        memcpy(scratch + i * row, layer->x + picks[i] / layer->top_k * row, row);
    torchplug_linear(&experts->gate_up, layer->w13 + slot * 2 * inner * row, layer->b13 ? layer->b13 + slot * 2 * inner * size : 0,
                     scratch, gate_up, count, threads);
    torchplug_silu_and_mul(gate_up, gated, count, inner, threads, dtype);
    torchplug_linear(&experts->down, layer->w2 + slot * inner * row, layer->b2 ? layer->b2 + slot * row : 0, gated, out, count,
                     threads);
}

/* y[t] = the sum over token t's picks of weight * row; places: where the row of a pick is, -1 for none. */
INLINE void combine(const char *rows, const int64_t *places, const float *weights, char *y, int64_t tokens, int64_t top_k,
                    int64_t hidden, int threads, int dtype)
{
    const int64_t bytes = hidden * size_of(dtype);
    #pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && tokens * top_k * hidden > 65536)
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t i = 0; i < hidden; i += LANES) {
            const int64_t left = hidden - i;
            vec sum = {0};
            for (int64_t pick = token * top_k; pick < (token + 1) * top_k; pick++)
                if (places[pick] >= 0) {
                    const char *from = rows + places[pick] * bytes;
                    const vec value = left < LANES ? load_some(from, i, left, dtype) : load(from, i, dtype);
                    sum += splat(weights[pick]) * value;
                }
            if (left < LANES)
                store_some(y + token * bytes, i, left, sum, dtype);
            else
                store(y + token * bytes, i, sum, dtype);
        }
}

/* x, y: [tokens, hidden]; slots, weights: [tokens, top_k], a slot outside of the layer's giving nothing; w13: [slots, 2 * inner,
   hidden], w2: [slots, hidden, inner], b13 and b2 the same without the last dimension, or null. Not 0: no memory. */
EXPORT int torchplug_experts(const Experts *experts, const char *w13, const char *b13, const char *w2, const char *b2, const char *x,
                             const int64_t *slots, const float *weights, char *y, int64_t tokens, int64_t top_k, int threads)
{
    const Layer layer = {w13, b13, w2, b2, x, top_k};
    const int64_t picks = tokens * top_k, hidden = experts->down.out, inner = experts->down.in;
    const int64_t size = size_of(experts->down.dtype);
    int64_t *starts = calloc(experts->slots + 1 + 2 * picks, sizeof *starts);
    if (!starts)
        return 1;
    int64_t *order = starts + experts->slots + 1, *places = order + picks;
    for (int64_t pick = 0; pick < picks; pick++)
        if (slots[pick] >= 0 && slots[pick] < experts->slots)
            starts[slots[pick] + 1]++;
    int64_t most = 0;
    for (int64_t slot = 0; slot < experts->slots; slot++) {
        most = starts[slot + 1] > most ? starts[slot + 1] : most;
        starts[slot + 1] += starts[slot];
    }
    char *scratch = malloc((most * (hidden + 3 * inner) + picks * hidden) * size + 1);
    if (!scratch) {
        free(starts);
        return 1;
    }
    char *rows = scratch + most * (hidden + 3 * inner) * size;
    for (int64_t pick = 0; pick < picks; pick++) {
        const int known = slots[pick] >= 0 && slots[pick] < experts->slots;
        places[pick] = known ? starts[slots[pick]]++ : -1;
        if (known)
            order[places[pick]] = pick;
    }
    /* By now starts[slot] is where slot + 1 starts. */
    for (int64_t slot = 0, start = 0; slot < experts->slots; start = starts[slot++])
        if (starts[slot] > start)
            run_slot(experts, &layer, slot, order + start, starts[slot] - start, scratch, rows + start * hidden * size, threads);
    BY_DTYPE(experts->down.dtype, combine(rows, places, weights, y, tokens, top_k, hidden, threads, FLOAT32),
             combine(rows, places, weights, y, tokens, top_k, hidden, threads, BFLOAT16));
    free(starts), free(scratch);
    return 0;
}
