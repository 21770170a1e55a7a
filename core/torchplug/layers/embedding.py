"""Token embedding and language-model head, tied or not. One process holds the whole vocabulary in this release."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchplug.layers.linear import ColumnParallelLinear


class VocabParallelEmbedding(nn.Module):
    """Rows of a table by token id.

    Args:
        num_embeddings: Size of the vocabulary.
        embedding_dim: Size of one row.

    `weight` is [num_embeddings, embedding_dim]. `forward` takes int64 ids [...] in [0, num_embeddings) and gives [...,
    embedding_dim]; an id outside raises IndexError on CPU.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim), requires_grad=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.weight)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


class ParallelLMHead(ColumnParallelLinear):
    """Logits over the vocabulary from hidden states.

    Args:
        num_embeddings: Size of the vocabulary.
        embedding_dim: Size of the hidden states.
        bias: Whether there is a bias.
        tied_to: The embedding whose table is also the head's weight; None for a weight of its own.

    `forward` takes [..., embedding_dim] and gives [..., num_embeddings] in the hidden states' dtype.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        bias: bool = False,
        *,
        tied_to: VocabParallelEmbedding | None = None,
    ) -> None:
        super().__init__(embedding_dim, num_embeddings, bias)
        self.tied = tied_to is not None
        if tied_to is not None:
            self.weight = tied_to.weight

    def process_weights_after_loading(self) -> None:
        """A table that is shared with the embedding stays as rows: looking one up needs them, and it is kept once."""
        if not self.tied:
            super().process_weights_after_loading()
