/* What the kernels of matrix products and of gates tell those that are made of them. */
#include "vector.h"

typedef struct {
    int64_t in, out;
    int dtype, y_dtype;
} Matrix;

/* y = x W^T + bias. w: [out, in]; bias: [out] or null; x: [rows, in]; y: [rows, out] in y_dtype, the others in dtype. */
int torchplug_linear(const Matrix *matrix, const char *w, const char *bias, const char *x, char *y, int64_t rows, int threads);

/* out = silu(gate) * up. x: [rows, 2 * size], gate and up side by side; out: [rows, size]. */
int torchplug_silu_and_mul(const char *x, char *out, int64_t rows, int64_t size, int threads, int dtype);
