/* y = x W^T + bias over row-major W [out, in], as it lies in a checkpoint.

   Both operands run along `in`, so a product is a dot product of rows and nothing has to be rearranged. A tile of 8 rows of W
   is brought into the first-level cache once and multiplied with all rows of x, 3 at a time: 24 accumulators of the 32 registers
   of AVX-512, 12 of the 16 of AVX2. Meanwhile the next tile is fetched, spread over the first groups of rows. Every output is summed
   in one order, whatever the number of rows: a request's result does not depend on its batch. */
#include "products.h"

#if defined(AVX512)
#define TILE 8
#else
#define TILE 4
#endif
#define GROUP 3
#define SLICE_BYTES 2048         /* of each of the tile's rows: a slice of the tile stays in the first-level cache */
#define BLOCK_BYTES (384 * 1024) /* of x: stays in the second-level cache */
#define BLOCK_ROWS 512

/* sums[i][j] = x[i] . w[j] over `bytes` bytes of each row, added to what is there with `add`; fetches as much from each of
   `fetched` rows at `ahead`. */
INLINE void multiply(int rows, const char *x, int64_t x_stride, const char *w, int64_t w_stride, int64_t bytes,
                     const char *ahead, int fetched, float *sums, int add, int dtype)
{
    vec sum[GROUP][TILE];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < TILE; j++)
            sum[i][j] = (vec){0};
    int64_t k = 0;
    for (; k + BYTES <= bytes; k += BYTES) {
        uvec a[GROUP];
        UNROLL for (int i = 0; i < rows; i++)
            a[i] = raw(x + i * x_stride + k);
        UNROLL for (int j = 0; j < TILE; j++) {
            uvec b = raw(w + j * w_stride + k);
            UNROLL for (int i = 0; i < rows; i++)
                sum[i][j] = dot(sum[i][j], a[i], b, dtype);
        }
        UNROLL for (int j = 0; j < fetched; j++)
            __builtin_prefetch(ahead + j * w_stride + k, 0, 2 /* into the second level */);
    }
    if (k < bytes) {
        uvec a[GROUP];
        UNROLL for (int i = 0; i < rows; i++)
            a[i] = raw_some(x + i * x_stride + k, bytes - k);
        UNROLL for (int j = 0; j < TILE; j++) {
            uvec b = raw_some(w + j * w_stride + k, bytes - k);
            UNROLL for (int i = 0; i < rows; i++)
                sum[i][j] = dot(sum[i][j], a[i], b, dtype);
        }
    }
    UNROLL for (int i = 0; i < rows; i++) {
        float found[TILE];
        sums_of(found, sum[i], TILE);
        for (int j = 0; j < TILE; j++)
            sums[i * TILE + j] = add ? sums[i * TILE + j] + found[j] : found[j];
    }
}

/* The same for the last, fewer than TILE rows of W. */
INLINE void multiply_rest(int64_t rows, int64_t columns, const char *x, int64_t x_stride, const char *w, int64_t w_stride,
                          int64_t bytes, float *sums, int add, int dtype)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) {
            const float found = dot_of(x + i * x_stride, w + j * w_stride, bytes, dtype);
            sums[i * TILE + j] = add ? sums[i * TILE + j] + found : found;
        }
}

/* One slice of a tile of W against `rows` rows of x, fetching the same of the next tile at `ahead` (0: none). */
INLINE void multiply_slice(int64_t rows, const char *x, int64_t x_stride, const char *w, int64_t w_stride, int64_t bytes,
                           const char *ahead, float *sums, int add, int dtype)
{
    const int64_t groups = (rows + GROUP - 1) / GROUP;
    const int share = groups == 1 ? TILE : groups <= 3 ? TILE / 2 : groups <= 7 ? TILE / 4 : 1;
    int left = ahead ? TILE : 0;
#define MULTIPLY(count, fetched) multiply(count, x, x_stride, w, w_stride, bytes, ahead, fetched, sums, add, dtype)
#define MULTIPLY_AND_FETCH(count) \
    do { \
        if (fetched == 0) \
            MULTIPLY(count, 0); \
        else if (fetched == TILE) \
            MULTIPLY(count, TILE); \
        else if (fetched == TILE / 2) \
            MULTIPLY(count, TILE / 2); \
        else if (fetched == TILE / 4) \
            MULTIPLY(count, TILE / 4); \
        else \
            MULTIPLY(count, 1); \
    } while (0)
    while (rows > 0) {
        /* 4 rows are 2 and 2: one alone would wait for its operands. */
        const int count = rows == 4 || rows == 2 ? 2 : rows == 1 ? 1 : 3, fetched = left ? share : 0;
        if (count == 3)
            MULTIPLY_AND_FETCH(3);
        else if (count == 2)
            MULTIPLY_AND_FETCH(2);
        else
            MULTIPLY_AND_FETCH(1);
        rows -= count, x += count * x_stride, sums += count * TILE;
        left -= fetched, ahead += fetched * w_stride;
    }
}

INLINE void linear(const char *x, const char *w, const char *bias, char *y, int64_t rows, int64_t in, int64_t out,
                   int y_dtype, int threads, int dtype)
{
    const int64_t size = size_of(dtype), w_stride = in * size, x_stride = w_stride;
    int64_t block = BLOCK_BYTES / (w_stride + 1) / GROUP * GROUP;
    block = block < 8 * GROUP ? 8 * GROUP : block > BLOCK_ROWS ? BLOCK_ROWS / GROUP * GROUP : block;
    const int64_t tiles = (out + TILE - 1) / TILE;
    /* Several parts for each thread, where they are long: one that loses its core for a while does not hold up the others. */
    const int64_t parts = tiles >= 128 * threads ? 8 * threads : threads;
    #pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < parts; part++) {
        const int64_t first = tiles * part / parts, last = tiles * (part + 1) / parts;
        float sums[BLOCK_ROWS * TILE];
        for (int64_t row = 0; row < rows; row += block) {
            const int64_t count = rows - row < block ? rows - row : block;
            const char *x_block = x + row * x_stride;
            for (int64_t tile = first; tile < last; tile++) {
                const int64_t column = tile * TILE, columns = out - column < TILE ? out - column : TILE;
                const char *w_tile = w + column * w_stride;
                const char *ahead = tile + 1 < tiles && out - column >= 2 * TILE ? w_tile + TILE * w_stride : 0;
                for (int64_t k = 0; k < w_stride || k == 0; k += SLICE_BYTES) {
                    const int64_t bytes = w_stride - k < SLICE_BYTES ? w_stride - k : SLICE_BYTES;
                    if (columns == TILE)
                        multiply_slice(count, x_block + k, x_stride, w_tile + k, w_stride, bytes, ahead ? ahead + k : 0, sums, k > 0,
                                       dtype);
                    else
                        multiply_rest(count, columns, x_block + k, x_stride, w_tile + k, w_stride, bytes, sums, k > 0, dtype);
                }
                float added[TILE] = {0};
                if (bias)
                    for (int64_t j = 0; j < columns; j++)
                        added[j] = get(bias, column + j, dtype);
                for (int64_t i = 0; i < count; i++) {
                    char *to = y + ((row + i) * out + column) * size_of(y_dtype);
                    float *sum = sums + i * TILE;
                    for (int64_t j = 0; j < TILE; j++)
                        sum[j] += added[j];
#if defined(AVX512_BFLOAT16)
                    if (y_dtype == BFLOAT16 && columns == TILE) {
                        __m128bh narrowed = _mm256_cvtneps_pbh(_mm256_loadu_ps(sum));
                        memcpy(to, &narrowed, sizeof narrowed);
                        continue;
                    }
#endif
                    for (int64_t j = 0; j < columns; j++)
                        put(to, j, sum[j], y_dtype);
                }
            }
        }
    }
}

EXPORT int torchplug_linear(const Matrix *matrix, const char *w, const char *bias, const char *x, char *y, int64_t rows, int threads)
{
    BY_DTYPE(matrix->dtype, linear(x, w, bias, y, rows, matrix->in, matrix->out, matrix->y_dtype, threads, FLOAT32),
             linear(x, w, bias, y, rows, matrix->in, matrix->out, matrix->y_dtype, threads, BFLOAT16));
    return 0;
}
