"""How a token of a mixture-of-experts layer chooses its experts: scores, groups, the top k, and their weights.

Sources: Jiang et al., Mixtral of Experts, 2024, section 2.1 (softmax over the chosen); DeepSeek-AI, DeepSeek-V2, 2024,
section 2.2.2 (groups ranked by their best expert); DeepSeek-V3, 2024, section 2.1.2 (sigmoid scores, a bias that only
the choice sees, groups ranked by their best two).
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor, nn

from torchplug.errors import CheckpointError, Problem
from torchplug.layers.linear import Linear


class GroupScore(StrEnum):
    """What a group of experts is worth to a token."""

    MAX = "max"
    """Its best expert's score (DeepSeek-V2)."""

    TOP2_SUM = "top2_sum"
    """The sum of its best two experts' scores (DeepSeek-V3)."""


class TopKRouter(Linear):
    """The gate of a mixture of experts: logits of `num_experts`, and with `route` each token's `top_k` of them.

    Args:
        hidden_size: Width of a token.
        num_experts: Experts to choose from (logical ones).
        top_k: Experts of one token.
        scoring_func: How logits become scores: "softmax" over all experts, or "sigmoid".
        renormalize: Whether the weights of a token's experts are made to add up to 1.
        routed_scaling_factor: Factor on the weights, after that.
        num_expert_group: Groups of equally many consecutive experts. With more than 1, a token first chooses
            `topk_group` groups, and then experts of these alone.
        topk_group: Groups of one token.
        group_score: What groups are ranked by.
        correction_bias: Whether there is an `e_score_correction_bias`, float32 [num_experts], added to the scores for
            the choice but not for the weights.
        float32_logits: Whether the logits are computed in float32, whatever the model's dtype. `weight` is kept in it.
        prefix: The layer's name in the model.

    `weight` is [num_experts, hidden_size], as checkpoints have it (`gate.weight`). Scores are float32.

    Raises CheckpointError where the numbers do not fit each other.
    """

    e_score_correction_bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        scoring_func: str = "softmax",
        renormalize: bool = True,
        routed_scaling_factor: float = 1.0,
        num_expert_group: int = 1,
        topk_group: int = 1,
        group_score: GroupScore = GroupScore.MAX,
        correction_bias: bool = False,
        float32_logits: bool = False,
        prefix: str = "",
    ) -> None:
        super().__init__(hidden_size, num_experts)
        self.num_experts = num_experts
        self.top_k = top_k
        self.scoring_func = scoring_func
        self.renormalize = renormalize
        self.routed_scaling_factor = routed_scaling_factor
        self.num_expert_group = num_expert_group
        self.topk_group = topk_group
        self.group_score = GroupScore(group_score)
        self.float32_logits = float32_logits
        if float32_logits:
            self.weight = nn.Parameter(self.weight.float(), requires_grad=False)
        self.e_score_correction_bias = (
            nn.Parameter(torch.empty(num_experts, dtype=torch.float32), requires_grad=False)
            if correction_bias
            else None
        )
        if problems := list(self._misfits()):
            raise CheckpointError(f"router {prefix!r}", problems)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [num_tokens, num_experts] for x [num_tokens, hidden_size]."""
        return super().forward(x.float() if self.float32_logits else x)

    def route(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Weights float32 [num_tokens, top_k] and experts int64 [num_tokens, top_k] of each token.

        hidden_states: [num_tokens, hidden_size].
        """
        logits = self(hidden_states)
        if self.scoring_func == "softmax":
            scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
        else:
            scores = logits.float().sigmoid()
        choice = scores if self.e_score_correction_bias is None else scores + self.e_score_correction_bias
        if self.num_expert_group > 1:
            choice = self._within_groups(choice)
        weights, experts = choice.topk(self.top_k, dim=-1)
        if self.e_score_correction_bias is not None:
            weights = scores.gather(-1, experts)
        if self.renormalize:
            # Sigmoid scores may all be 0; a softmax cannot sum to so little that this changes it.
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        if self.routed_scaling_factor != 1.0:
            weights = weights * self.routed_scaling_factor
        return weights, experts

    def _within_groups(self, choice: Tensor) -> Tensor:
        """The scores [num_tokens, num_experts] with those outside of each token's groups at -inf."""
        grouped = choice.view(choice.shape[0], self.num_expert_group, self.num_experts // self.num_expert_group)
        if self.group_score is GroupScore.MAX:
            worth = grouped.amax(dim=-1)
        else:
            worth = grouped.topk(2, dim=-1).values.sum(dim=-1)
        chosen = worth.topk(self.topk_group, dim=-1, sorted=False).indices
        outside = torch.ones_like(worth, dtype=torch.bool).scatter_(-1, chosen, False)
        return grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).view(choice.shape)

    def _misfits(self) -> list[Problem]:
        experts, groups = self.num_experts, self.num_expert_group
        found = []

        def problem(where: str, says: str) -> None:
            found.append(
                Problem(where, says, "correct config.json: take the values that the model's authors published")
            )

        if self.scoring_func not in ("softmax", "sigmoid"):
            problem("scoring_func", f"{self.scoring_func!r} is not one of softmax, sigmoid")
        if groups < 1 or experts % groups:
            problem("num_expert_group", f"{experts} experts do not make {groups} groups of equal size")
            return found
        size = experts // groups
        if not 1 <= self.topk_group <= groups:
            problem("topk_group", f"a token cannot choose {self.topk_group} of {groups} groups")
            return found
        if groups > 1 and size < 2 and self.group_score is GroupScore.TOP2_SUM:
            problem("num_expert_group", f"groups of {size} expert have no best two to rank them by")
        eligible = self.topk_group * size if groups > 1 else experts
        if not 1 <= self.top_k <= eligible:
            of = f"{self.topk_group} groups of {size} experts" if groups > 1 else f"{experts} experts"
            problem("top_k", f"a token cannot choose {self.top_k} experts of {of}")
        return found

    def extra_repr(self) -> str:
        groups = f", {self.topk_group} of {self.num_expert_group} groups" if self.num_expert_group > 1 else ""
        return f"hidden_size={self.in_features}, top {self.top_k} of {self.num_experts}{groups}, {self.scoring_func}"
