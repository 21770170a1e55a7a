"""The native product against F.linear on plain rows and against oneDNN's packed weight, at the shapes of two models.

Each call reads another of several weights, 100 MB in all, as a step of a model does. Rounds are interleaved; the figure
is the median, in microseconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import click
import torch
import torch.nn.functional as F
from torch import Tensor
from torchplug.layers import onednn
from torchplug.layers.cpu import kernels

SHAPES = {
    "Qwen2-0.5B": [(1152, 896), (896, 896), (9728, 896), (896, 4864), (151936, 896)],
    "8 layers of 512": [(1024, 512), (512, 512), (2816, 512), (512, 1408), (32000, 512)],
}
ROWS = (1, 2, 4, 8, 16, 32, 128, 512, 4096)


def measure(out_features: int, in_features: int, rows: int, dtype: torch.dtype, seconds: float) -> list[float]:
    """Median microseconds of: plain rows, packed, native."""
    size = out_features * in_features * dtype.itemsize
    weights = [torch.randn(out_features, in_features).to(dtype) for _ in range(max(1, min(24, int(100e6 / size))))]
    packed = [onednn.packed(weight) for weight in weights]
    native = kernels.linear(weights[0])
    if native is None or packed[0] is None:
        raise click.ClickException("this machine has no native kernels or no oneDNN to compare")
    x = torch.randn(rows, in_features).to(dtype)
    ways: list[tuple[Callable[[Tensor, Tensor, None], Tensor], list[Tensor]]] = [
        (F.linear, weights),
        (onednn.linear, packed),
        (native, weights),
    ]
    times: list[list[float]] = [[] for _ in ways]
    began = time.perf_counter()
    while time.perf_counter() - began < seconds or len(times[0]) < 3:
        for found, (product, each) in zip(times, ways, strict=True):
            for weight in each[:4]:
                start = time.perf_counter()
                product(x, weight, None)
                found.append(time.perf_counter() - start)
        for each in (weights, packed):
            each.append(each.pop(0))
    return [statistics.median(found) * 1e6 for found in times]


@click.command()
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16")
@click.option("--seconds", type=float, default=0.4, help="For each shape and number of rows.")
@torch.inference_mode()
def main(dtype: str, seconds: float) -> None:
    kernels.MOST_ROWS = max(ROWS)
    for model, shapes in SHAPES.items():
        click.echo(f"{model}, {dtype}, {torch.get_num_threads()} threads: plain rows / packed / native")
        for out_features, in_features in shapes:
            cells = []
            for rows in ROWS:
                if rows * out_features > 80_000_000:
                    continue
                found = measure(out_features, in_features, rows, getattr(torch, dtype), seconds)
                cells.append(f"{rows}: " + " / ".join(f"{each:.0f}" for each in found))
            click.echo(f"  [{out_features}, {in_features}]  " + "   ".join(cells))


if __name__ == "__main__":
    main()
