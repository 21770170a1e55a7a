"""Checks of models with recurrent layers: what they say of their state, and what they make of others' states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Final

import torch
from torch import Tensor, nn

from torchplug.config import SpeculativeConfig
from torchplug.engine.block_manager import BlockManager
from torchplug.engine.kv_cache import PagedCache
from torchplug.engine.runner import Runner
from torchplug.engine.scheduler import Scheduler
from torchplug.engine.state_copy import state_copy
from torchplug.engine.state_pool import StatePool
from torchplug.errors import ContractError, Problem
from torchplug.host.recurrent_layers import ALL_SIZES, kind_problems, recurrent_layers, state_problems
from torchplug.testing.behaviour import BLOCK_SIZE, LONGEST, TOLERANCE, Steps, distance, request_of
from torchplug.testing.findings import Finding
from torchplug.testing.specimen import Skip, Specimen

_CLAIMS: Final = {"HasInnerState", "IsHybrid", "IsAttentionFree"}
_DRAFTS: Final = 3
_DECODED: Final = 2


def layer_kinds(specimen: Specimen) -> Iterator[Finding]:
    """The flags, the config's list of layers and the layers that are built say the same."""
    module = _built(specimen)
    if not _CLAIMS.intersection(specimen.report.interfaces) and not recurrent_layers(module):
        raise Skip("the class claims no state and builds no RecurrentLayer")
    yield from kind_problems(specimen.report.interfaces, specimen.cls, module, specimen.vllm_config)


def state_shapes(specimen: Specimen) -> Iterator[Finding]:
    """The class-phase hooks and every layer name the same state, for 1 to 4 tensor-parallel ranks and 0 to 3 drafts."""
    module = _recurrent(specimen)
    yield from state_problems(
        specimen.model_class, specimen.cls, module, specimen.vllm_config, specimen.subject, ALL_SIZES
    )


def fresh_state(specimen: Specimen) -> Iterator[Finding]:
    """In slots full of NaN, or of what another request left, a request of one token starts, and one of several.

    Each is compared with one forward over its text.
    """
    _recurrent(specimen)
    for device in specimen.devices:
        steps = Steps(specimen, device)
        if steps.states is None:
            return
        for length, left in product((1, 5), ("NaN", "another request's state")):
            tokens = specimen.token_ids(steps.limited(length), seed=length)
            expected = steps.one_shot(tokens)[-1]
            if left == "NaN":
                steps.states.fill(range(steps.states.num_slots), float("nan"))
            else:
                other = specimen.token_ids(steps.limited(9), seed=7)
                steps.run([(other, 0, 0, len(other))])
            found = steps.run([(tokens, 0, 0, len(tokens))])
            fix = (
                "a request that has no tokens before this step (seq_lens equals its new tokens) starts from zero, "
                "whatever its slot holds and however many tokens it brings; use torch.where, since 0 * NaN is NaN"
            )
            label = f"a prompt of {len(tokens)} in a slot that held {left}, on {device}"
            yield from steps.differences([label], list(found), [expected], fix)


def state_snapshots(specimen: Specimen) -> Iterator[Finding]:
    """Prompts of kB - 1, kB and kB + 1 tokens, cold and then again from the prefix cache; logits are compared.

    What the copy functions name is compared with the state's own block too, for up to 3 accepted drafts.
    """
    module = _recurrent(specimen)
    if "SupportsMambaPrefixCaching" not in specimen.report.interfaces:
        raise Skip("the class does not claim SupportsMambaPrefixCaching")
    yield from _copied_pieces(specimen, module)
    cached = 0
    for device in specimen.devices:
        engine = _CachingEngine(specimen, device)
        lengths = [blocks * BLOCK_SIZE + more for blocks in (2, 3) for more in (-1, 0, 1)]
        for length in (length for length in lengths if length + _DECODED <= engine.max_tokens):
            tokens = specimen.token_ids(length, seed=length)
            cold, none = engine.run(tokens)
            warm, hits = engine.run(tokens)
            where = specimen.where("get_mamba_state_copy_func")
            if none or not hits:
                says = f"expected a prompt of {length} tokens to be found in the cache again, found {hits} tokens of it"
                yield Problem(where, says, "see whether something of the class changes the keys of its prompts")
                return
            cached += hits
            for after, (first, second) in enumerate(zip(cold, warm, strict=True)):
                off = distance(second, first)
                if not off <= TOLERANCE:
                    says = (
                        f"prompt of {length} tokens on {device}, {hits} of them cached, after {after} new tokens: "
                        f"expected the logits of the prompt when nothing was cached, found them off by {off:.2g} of "
                        f"the greatest, where {TOLERANCE:g} is allowed"
                    )
                    fix = (
                        "let the copy functions name all of the state that a request goes on from, and let the layer "
                        "keep all of it in `state`"
                    )
                    yield Problem(where, says, fix)
                    return
    yield f"{cached} prompt tokens from the cache"


def _copied_pieces(specimen: Specimen, module: nn.Module) -> Iterator[Finding]:
    """Where a copy function names anything but rows of the block that holds the state, or of an older one."""
    blocks = [4, 1, 6, 0, 2, 5, 3]
    config = specimen.vllm_config
    before = config.speculative_config
    functions = specimen.model_class.hooks.get_mamba_state_copy_func()
    try:
        config.speculative_config = SpeculativeConfig(_DRAFTS)
        shapes = specimen.model_class.hooks.get_mamba_state_shape_from_config(config)
    finally:
        config.speculative_config = before
    if len(functions) != len(shapes):
        says = f"expected a copy function for each of {len(shapes)} state tensors, found {len(functions)}"
        yield Problem(specimen.where("get_mamba_state_copy_func"), says, "return one for each, in the same order")
        return
    for function, shape in zip(functions, shapes, strict=True):
        state = torch.zeros(len(blocks), *shape)
        for current, accepted in product(range(len(blocks) - _DRAFTS), range(1, 2 + _DRAFTS)):
            if accepted > shape[0]:
                continue
            try:
                state_copy(function, state, blocks, current, accepted, subject=specimen.subject)
            except ContractError as error:
                yield from error.problems
                return


class _CachingEngine:
    """Scheduler, prefix cache and runner on one model, for one request at a time."""

    def __init__(self, specimen: Specimen, device: torch.device) -> None:
        model = specimen.load(device)
        self.max_tokens = min(model.vllm_config.model_config.max_model_len, LONGEST)
        self._states = StatePool.of(model)
        cache = PagedCache(
            model.module,
            dtype=model.dtype,
            device=model.device,
            block_size=BLOCK_SIZE,
            max_num_seqs=2,
            max_num_batched_tokens=2 * self.max_tokens,
            max_model_len=self.max_tokens,
            states=self._states,
            snapshots=True,
        )
        limits = 2, 2 * self.max_tokens
        self._runner = Runner(
            model.module, cache, device=model.device, max_num_seqs=limits[0], max_num_batched_tokens=limits[1]
        )
        self._scheduler = Scheduler(
            BlockManager(
                [(group.window, group.num_blocks) for group in cache.groups],
                BLOCK_SIZE,
                whole_above=self._runner.whole_above,
                state_snapshots=None if self._states is None else self._states.num_snapshots,
            ),
            *limits,
            whole_above=self._runner.whole_above,
        )

    def run(self, tokens: Sequence[int]) -> tuple[list[Tensor], int]:
        """Logits [vocab] after the prompt and after each of some decoded tokens, and how much of it was cached."""
        if self._states is not None:
            # A check of its own sees to it that nothing is read of what a slot held before.
            self._states.fill(range(self._states.num_requests), 0.0)
        request = request_of("text", tokens, self.max_tokens)
        self._scheduler.add(request)
        rows: list[Tensor] = []
        while len(rows) <= _DECODED:
            batch = self._scheduler.schedule()
            with torch.inference_mode():
                logits = self._runner.run(batch)
            request.num_computed = batch[0].stop
            if logits is not None:
                rows.append(logits[0])
                request.token_ids.append(int(logits[0].argmax()))
        self._scheduler.remove(request)
        return rows, request.num_cached_tokens or 0


def _built(specimen: Specimen) -> nn.Module:
    try:
        return specimen.build()
    except Skip:
        raise
    except Exception as error:
        raise Skip(f"the class cannot be built: {type(error).__name__}; weights_round_trip says more") from error


def _recurrent(specimen: Specimen) -> nn.Module:
    module = _built(specimen)
    if not recurrent_layers(module):
        raise Skip("the class builds no RecurrentLayer")
    return module
