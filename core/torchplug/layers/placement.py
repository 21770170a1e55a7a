"""Logical and physical experts: how many slots a layer has, where they are, and which of them serves a token.

A logical expert is one of the checkpoint's. A physical expert is a slot that holds a copy of one; redundant slots let a
busy expert have several. Slot s lives on rank s // (slots per rank).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchplug.config import ParallelConfig
from torchplug.errors import ContractError, ParallelConfigError, Problem

MAX_REDUNDANT_EXPERTS = 1023
"""The balancer's map has 1024 places for the slots of one expert."""


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """The slots of one layer, spread evenly over the ranks that share its experts.

    Attributes:
        num_logical: Experts of the checkpoint.
        num_redundant: Slots beyond one for each of them.
        ep_size: Ranks that share the experts.
        ep_rank: Which of them this is.

    Raises ParallelConfigError, with the redundancy that would fit, where the slots cannot be spread evenly.
    """

    num_logical: int
    num_redundant: int = 0
    ep_size: int = 1
    ep_rank: int = 0

    def __post_init__(self) -> None:
        if problems := list(self._misfits()):
            raise ParallelConfigError("placement of experts", problems)

    @classmethod
    def of(cls, num_experts: int, parallel_config: ParallelConfig) -> ExpertPlacement:
        """The placement of `num_experts` logical experts that the parallel settings ask for."""
        shared = parallel_config.enable_expert_parallel
        return cls(
            num_experts,
            parallel_config.eplb_config.num_redundant_experts,
            parallel_config.tensor_parallel_size if shared else 1,
            parallel_config.rank % parallel_config.tensor_parallel_size if shared else 0,
        )

    @property
    def num_physical(self) -> int:
        """Slots of all ranks."""
        return self.num_logical + self.num_redundant

    @property
    def num_local(self) -> int:
        """Slots of one rank."""
        return self.num_physical // self.ep_size

    @property
    def first_local(self) -> int:
        """The first slot of this rank."""
        return self.ep_rank * self.num_local

    @property
    def initial_experts(self) -> tuple[int, ...]:
        """The logical expert in each slot before any balancing: each once, then again from the first."""
        return tuple(slot % self.num_logical for slot in range(self.num_physical))

    def local_slots(self, expert: int) -> tuple[int, ...]:
        """Slots of this rank, counted from its first, that hold logical expert `expert` before any balancing."""
        first = self.first_local
        return tuple(
            slot - first
            for slot in range(expert, self.num_physical, self.num_logical)
            if first <= slot < first + self.num_local
        )

    def resized(self, num_physical: int) -> ExpertPlacement:
        """The placement after ranks joined or left: `num_physical` slots, as many on each rank as before.

        Raises ParallelConfigError where the slots of a rank do not divide them.
        """
        if num_physical % self.num_local:
            says = f"{num_physical} physical experts do not fill ranks of {self.num_local} slots"
            below = num_physical // self.num_local * self.num_local
            fix = f"take {below} or {below + self.num_local}"
            raise ParallelConfigError("placement of experts", Problem("num_physical_experts", says, fix))
        ranks = num_physical // self.num_local
        return replace(self, num_redundant=num_physical - self.num_logical, ep_size=ranks)

    def _misfits(self) -> Iterable[Problem]:
        logical, redundant, ranks = self.num_logical, self.num_redundant, self.ep_size
        if logical < 1 or ranks < 1 or not 0 <= self.ep_rank < ranks:
            yield Problem("", f"{logical} experts on rank {self.ep_rank} of {ranks}", "count from 1, and ranks from 0")
            return
        if not 0 <= redundant <= MAX_REDUNDANT_EXPERTS:
            says = f"expected 0 to {MAX_REDUNDANT_EXPERTS} redundant experts, found {redundant}"
            yield Problem("eplb_config.num_redundant_experts", says, "ask for a number in this range")
            return
        if over := self.num_physical % ranks:
            fits = redundant + ranks - over
            each = (logical + fits) // ranks
            fix = (
                f"set num_redundant_experts to {fits}, which makes {each} for each rank, or use another number of ranks"
            )
            if over <= redundant:
                fix = f"set num_redundant_experts to {redundant - over} or {fits}, or use another number of ranks"
            if fits > MAX_REDUNDANT_EXPERTS:
                fix = f"use a number of ranks that divides {self.num_physical}"
            says = (
                f"{logical} logical and {redundant} redundant experts make {self.num_physical} physical ones, which "
                f"{ranks} ranks cannot share evenly"
            )
            yield Problem("eplb_config.num_redundant_experts", says, fix)


@dataclass(frozen=True, slots=True)
class EplbViews:
    """One layer's rows of the balancer's tensors: views, updated in place by the balancer.

    Attributes:
        load: int32 [physical or more], tokens counted per slot.
        slots: int64 [logical, most replicas], slots of each expert, -1 where unused.
        replicas: int64 [logical], how many of them are in use.
    """

    load: Tensor
    slots: Tensor
    replicas: Tensor

    @classmethod
    def of(
        cls,
        placement: ExpertPlacement,
        layer: int,
        expert_load_view: Tensor,
        logical_to_physical_map: Tensor,
        logical_replica_count: Tensor,
        *,
        where: str,
    ) -> EplbViews:
        """Row `layer` of the tensors that `MixtureOfExperts.set_eplb_state` describes, which must stay the same for
        life.

        Raises ContractError naming the tensor of another dtype or shape, and `where` it was given.
        """
        load, slots, replicas = expert_load_view, logical_to_physical_map, logical_replica_count
        logical, physical = placement.num_logical, placement.num_physical
        rows = f"more than {layer}"
        wanted = {
            f"int32 [{rows}, {physical} or more]": (load.dim() == 2 and load.shape[1] >= physical, load, torch.int32),
            f"int64 [{rows}, {logical}, 1 or more]": (
                slots.dim() == 3 and slots.shape[1] == logical and slots.shape[2] > 0,
                slots,
                torch.int64,
            ),
            f"int64 [{rows}, {logical}]": (
                replicas.dim() == 2 and replicas.shape[1] == logical,
                replicas,
                torch.int64,
            ),
        }
        names = ("expert_load_view", "logical_to_physical_map", "logical_replica_count")
        problems = [
            Problem(
                name,
                f"expected {says}, found {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}",
                "make it for this model's MoE layers, logical and physical experts",
            )
            for name, (says, (fits, tensor, dtype)) in zip(names, wanted.items(), strict=True)
            if not fits or tensor.dtype is not dtype or tensor.shape[0] <= layer
        ]
        if problems:
            raise ContractError(f"set_eplb_state of {where}", problems)
        return cls(load[layer], slots[layer], replicas[layer])

    def choose(self, experts: Tensor) -> Tensor:
        """The slot that serves each pick.

        A pure function of the token's place in the batch and the maps, so that every rank comes to the same answer
        without asking: replica ((t * 2654435769) mod 2^32) mod count for token t (Knuth, The Art of Computer
        Programming, volume 3, section 6.4: multiplicative hashing).

        Args:
            experts: Integers [num_tokens, top_k], logical experts; one that does not exist gives -1.

        Returns the slots, [num_tokens, top_k] in the dtype of `experts`.
        """
        exists = (experts >= 0) & (experts < self.replicas.shape[0])
        known = experts.clamp(0, self.replicas.shape[0] - 1).long()
        token = torch.arange(experts.shape[0], device=experts.device)
        hashed = (token * 2654435769).bitwise_and_(0xFFFFFFFF)
        replica = hashed.unsqueeze(-1) % self.replicas[known]
        return torch.where(exists, self.slots[known, replica], -1).to(experts.dtype)

    def record(self, slots: Tensor) -> None:
        """Add one to `load` for every pick, in place; picks of -1 do not count.

        slots: Integers [..., top_k], as `choose` gives them.
        """
        picks = slots.flatten().long()
        self.load.scatter_add_(0, picks.clamp(min=0), (picks >= 0).to(self.load.dtype))
