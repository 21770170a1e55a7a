/* The most probable token of each row of logits. */
#include "vector.h"

#include <math.h>

#define CHUNK 8192

/* The greatest of `count` elements; NaN if there is one. */
INLINE float greatest_of(const char *x, int64_t count, int dtype)
{
    vec most = splat(-INFINITY);
    ivec nan = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const vec value = load(x, i, dtype);
        most = pick(value > most, value, most);
        nan |= value != value;
    }
    float found = max_of(most);
    for (int lane = 0; lane < LANES; lane++)
        found = nan[lane] ? NAN : found;
    for (; i < count; i++) {
        const float value = get(x, i, dtype);
        found = value > found || value != value ? value : found;
    }
    return found;
}

INLINE void argmax(const char *x, int64_t rows, int64_t size, int64_t *out, int threads, int dtype)
{
    const int64_t chunks = (size + CHUNK - 1) / CHUNK;
    #pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const char *logits = at(x, row * size, dtype);
        float most = -INFINITY;
        int64_t where = 0;
        for (int64_t chunk = 0; chunk < chunks && where >= 0; chunk++) {
            const int64_t start = chunk * CHUNK, count = size - start < CHUNK ? size - start : CHUNK;
            const float found = greatest_of(at(logits, start, dtype), count, dtype);
            if (found != found)
                where = -1;
            else if (found > most) {
                most = found;
                where = start;
                while (get(logits, where, dtype) != found)
                    where++;
            }
        }
        out[row] = where;
    }
}

/* out[row] = the first index of the greatest of x[row], -1 where there is a NaN. x: [rows, size]. */
EXPORT int torchplug_argmax(const char *x, int64_t rows, int64_t size, int64_t *out, int threads, int dtype)
{
    if (rows == 1)
        threads = 1;
    BY_DTYPE(dtype, argmax(x, rows, size, out, threads, FLOAT32), argmax(x, rows, size, out, threads, BFLOAT16));
    return 0;
}
