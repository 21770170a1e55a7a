"""Linear layers under the names that vLLM authors know, fused where several projections read the same input.

This release runs in one process: tensor-parallel size 1, every layer holds its whole weight. `ColumnParallelLinear` and
`RowParallelLinear` name which side a sharded run would split. `forward` returns one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchplug.layers import onednn
from torchplug.layers.cpu import kernels
from torchplug.layers.cpu.kernels import Product


class Linear(nn.Module):
    """`x @ weight.T + bias`.

    Args:
        in_features: Size of the last dimension of the input.
        out_features: Size of the last dimension of the result.
        bias: Whether there is a bias.

    `weight` is [out_features, in_features] and `bias` [out_features], in the default dtype at construction, not
    initialised: weights come from a checkpoint. `forward` takes [..., in_features] and gives [..., out_features].
    """

    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

        self._product: Product = F.linear

    def forward(self, x: Tensor) -> Tensor:
        # Attribute access to a parameter costs 1 us, as much as a tenth of a small product.
        parameters = self._parameters
        return self._product(x, parameters["weight"], parameters.get("bias"))  # type: ignore[arg-type]

    def process_weights_after_loading(self) -> None:
        """Choose how to multiply here, and put the weight into the layout for it; called once by the loader.

        The native kernel reads the weight as it is. Where there is none but oneDNN is, `weight` is replaced by a packed
        one (there is no second copy): it keeps its shape and dtype, and `weight.to_dense()` gives the plain matrix.
        """
        native = kernels.linear(self.weight)
        if native is not None:
            self._product = native
            return
        packed = onednn.packed(self.weight)
        if packed is not None:
            self.weight = nn.Parameter(packed, requires_grad=False)
            self._product = onednn.linear

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class ColumnParallelLinear(Linear):
    """A projection whose output features a sharded run would split: each output feature belongs to one rank."""


class RowParallelLinear(Linear):
    """A projection whose input features a sharded run would split: its input comes from a column-parallel layer."""


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several projections of one input as one matrix product; the results lie side by side in the last dimension.

    Args:
        in_features: Size of the input.
        out_features_list: Output size of each projection, in the order of the result.
        bias: Whether the projections have biases.
    """

    def __init__(self, in_features: int, out_features_list: Sequence[int], bias: bool = False) -> None:
        super().__init__(in_features, sum(out_features_list), bias)
        self.out_features_list = tuple(out_features_list)
        self._starts = (0, *accumulate(self.out_features_list))

    def weight_loader(self, param: Tensor, tensor: Tensor, shard_id: int | str | None = None) -> None:
        """Fill one projection's rows of `param` (weight or bias), or all of them where `shard_id` is None.

        Args:
            param: `self.weight` or `self.bias`.
            tensor: The projection's own weight or bias, or the fused one.
            shard_id: Place of the projection in `out_features_list`.

        Raises ValueError where the shape does not fit; `load_weights` reports it with the tensor's name.
        """
        target = param if shard_id is None else self._rows(param, shard_id)
        if target.shape != tensor.shape:
            raise ValueError(f"expected shape {list(target.shape)}, found {list(tensor.shape)}")
        target.copy_(tensor)

    def _rows(self, param: Tensor, shard_id: int | str) -> Tensor:
        if not isinstance(shard_id, int) or not 0 <= shard_id < len(self.out_features_list):
            raise ValueError(f"expected a projection 0 to {len(self.out_features_list) - 1}, found {shard_id!r}")
        return param.narrow(0, self._starts[shard_id], self.out_features_list[shard_id])


class QKVParallelLinear(MergedColumnParallelLinear):
    """Query, key and value projections of attention as one matrix product.

    Args:
        hidden_size: Size of the input.
        head_size: Size of one head; need not be hidden_size / num_heads.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; None for as many as query heads.
        bias: Whether the projections have biases.

    The result is [..., (num_heads + 2 * num_kv_heads) * head_size]: all query heads, then all key heads, then all value
    heads. `q_size` and `kv_size` are the widths to split it by. Shards are named 0, 1, 2 or "q", "k", "v".
    """

    def __init__(
        self, hidden_size: int, head_size: int, num_heads: int, num_kv_heads: int | None = None, bias: bool = False
    ) -> None:
        self_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        q_size, kv_size = num_heads * head_size, self_kv_heads * head_size
        super().__init__(hidden_size, (q_size, kv_size, kv_size), bias)
        self.head_size = head_size
        self.num_heads = num_heads
        self.num_kv_heads = self_kv_heads
        self.q_size = q_size
        self.kv_size = kv_size

    def _rows(self, param: Tensor, shard_id: int | str) -> Tensor:
        return super()._rows(
            param, {"q": 0, "k": 1, "v": 2}.get(shard_id, shard_id) if isinstance(shard_id, str) else shard_id
        )
