"""Patches of an image or a video to hidden states: a convolution whose stride is its kernel, as one matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from torchplug.layers.linear import Linear


class PatchEmbed(Linear):
    """A linear map of flattened patches.

    Args:
        patch_shape: Shape of a patch as checkpoints' convolutions have it: (channels, height, width), or (channels,
            frames, height, width).
        embed_dim: Size of the result.
        bias: Whether there is a bias.

    `forward` takes [num_patches, prod(patch_shape)], values in the order of `patch_shape`, and gives [num_patches,
    embed_dim]. `weight` is [embed_dim, prod(patch_shape)]; a convolution's [embed_dim, *patch_shape] is taken as well.
    """

    def __init__(self, patch_shape: Sequence[int], embed_dim: int, bias: bool = False) -> None:
        super().__init__(prod(patch_shape), embed_dim, bias)
        self.patch_shape = tuple(patch_shape)

    def weight_loader(self, param: Tensor, tensor: Tensor) -> None:
        """Fill the weight from a convolution's or from a matrix, or the bias.

        Raises ValueError where the shape does not fit; `load_weights` reports it with the tensor's name.
        """
        shapes = [tuple(param.shape)]
        if param.dim() == 2:
            shapes.append((self.out_features, *self.patch_shape))
        if tuple(tensor.shape) not in shapes:
            raise ValueError(f"expected shape {' or '.join(str(list(s)) for s in shapes)}, found {list(tensor.shape)}")
        param.copy_(tensor.reshape(param.shape))


def image_patches(images: Tensor, patch_size: int) -> Tensor:
    """[images, channels, height, width] -> [images, num_patches, channels * patch_size ** 2], row by row, for a
    PatchEmbed. What does not fill a patch at the right and lower edge is left out, as by a convolution."""
    count, channels, height, width = images.shape
    rows, columns = height // patch_size, width // patch_size
    images = images[..., : rows * patch_size, : columns * patch_size]
    split = images.reshape(count, channels, rows, patch_size, columns, patch_size)
    return split.permute(0, 2, 4, 1, 3, 5).reshape(count, rows * columns, channels * patch_size**2)
