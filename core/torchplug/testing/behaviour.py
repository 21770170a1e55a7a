"""Checks of what a model computes: the same whichever way the engine lays its tokens out, in every dtype, everywhere.

The engine's own runner lays the steps out; what is expected is the module's own forward over the whole text, without a
cache. Tokens are followed greedily, and logits are compared: max|a - b| <= 1e-4 * max|b| in float32.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from torchplug.engine.block_manager import BlockManager
from torchplug.engine.kv_cache import PagedCache
from torchplug.engine.prompts import TokenizedPrompt
from torchplug.engine.request import Request
from torchplug.engine.runner import Runner
from torchplug.engine.sampler import SamplingState
from torchplug.engine.sampling_params import SamplingParams
from torchplug.engine.scheduler import Scheduled
from torchplug.engine.state_pool import StatePool
from torchplug.errors import Problem
from torchplug.host.model import LoadedModel
from torchplug.results import describe
from torchplug.testing.findings import Finding
from torchplug.testing.specimen import Skip, Specimen, problems_of

TOLERANCE: Final = 1e-4
_BETWEEN_DEVICES: Final = 1e-3
_BFLOAT16_TOLERANCE: Final = 0.25
"""Rounding to 8 bits adds up over layers of large random weights; a fault in bfloat16 code is off by more."""

_PROMPT: Final = 9
_TOTAL: Final = 24
LONGEST: Final = 2 * _TOTAL
"""Tokens of a request that the checks' caches hold."""

_SLOTS: Final = 3
BLOCK_SIZE: Final = 4
"""Small, so that these short texts take several blocks."""


def cached_equals_uncached(specimen: Specimen) -> Iterator[Finding]:
    """A prompt in one step, then one token per step, alone; each step's logits against one forward over all tokens."""
    for device in specimen.devices:
        steps = Steps(specimen, device)
        steps.need_a_cache()
        tokens = specimen.token_ids(steps.limited(_PROMPT))
        prompt = len(tokens)
        found: list[Tensor] = []
        while len(tokens) < steps.limited(_TOTAL):
            start = prompt + len(found) - 1 if found else 0
            (row,) = steps.run([(tokens, 0, start, len(tokens))])
            found.append(row)
            tokens.append(int(row.argmax()))
        expected = steps.one_shot(tokens[:-1])[prompt - 1 :]
        fix = (
            "in a decode step the only token of a request stands at `positions`, not at row 0; "
            "keep nothing from step to step but in torchplug.layers.Attention and the `state` of a RecurrentLayer"
        )
        yield from steps.differences(
            [f"after {prompt + index} tokens on {device}, {index} of them decoded" for index in range(len(found))],
            found,
            list(expected),
            fix,
        )


def alone_equals_in_a_batch(specimen: Specimen) -> Iterator[Finding]:
    """Three requests of different lengths, one of which joins later, in changing order; each against its forward."""
    for device in specimen.devices:
        steps = Steps(specimen, device)
        requests = [specimen.token_ids(steps.limited(length), seed) for seed, length in enumerate((5, 3, _PROMPT))]
        computed, rows = [0, 0, 0], [[], [], []]  # type: tuple[list[int], list[list[Tensor]]]
        for order in ((0, 1), (1, 2, 0), (2, 0, 1), (0, 2), (1, 0, 2)):
            if any(len(requests[index]) >= steps.max_tokens for index in order):
                break
            batch = [(requests[index], index, computed[index], len(requests[index])) for index in order]
            for index, row in zip(order, steps.run(batch), strict=True):
                computed[index] = len(requests[index])
                rows[index].append(row)
                requests[index].append(int(row.argmax()))
        for index, tokens in enumerate(requests):
            if not rows[index]:
                continue
            first = len(tokens) - len(rows[index])
            expected = list(steps.one_shot(tokens[:-1])[first - 1 :])
            labels = [f"after {first + step} tokens of request {index} on {device}" for step in range(len(expected))]
            fix = (
                "the rows of a step are tokens of several requests: let none but Attention and RecurrentLayer mix rows "
                "(no mean, cumsum, norm, shift or convolution over dim 0), and keep no state in the module"
            )
            yield from steps.differences(labels, rows[index], expected, fix)


def chunk_split(specimen: Specimen) -> Iterator[Finding]:
    """A prompt in two steps, cut at every place, starting from an empty cache; both steps against one forward."""
    for device in specimen.devices:
        steps = Steps(specimen, device)
        steps.need_a_cache()
        tokens = specimen.token_ids(steps.limited(_PROMPT))
        expected = steps.one_shot(tokens)
        for cut in range(1, len(tokens)):
            steps.empty()
            (first,) = steps.run([(tokens, 0, 0, cut)])
            (last,) = steps.run([(tokens, 0, cut, len(tokens))])
            fix = (
                "a step may begin in the middle of a prompt: take positions from `positions`, and what came before "
                "from Attention's cache and a RecurrentLayer's state alone"
            )
            yield from steps.differences(
                [f"after {at} tokens on {device}, prompt of {len(tokens)} cut at {cut}" for at in (cut, len(tokens))],
                [first, last],
                [expected[cut - 1], expected[-1]],
                fix,
            )


def dtype_and_device(specimen: Specimen) -> Iterator[Finding]:
    """float32 and bfloat16 on every device: results are of the model's dtype and on its device, and agree.

    A module moved with `.to` follows with everything that it uses: to the accelerator where there is one, and to
    `meta`, which every machine has.
    """
    tokens: list[int] = []
    reference: Tensor | None = None
    for device in specimen.devices:
        for dtype in (torch.float32, torch.bfloat16):
            model = specimen.load(device, dtype)
            tokens = tokens or specimen.token_ids(min(_PROMPT, model.vllm_config.model_config.max_model_len))
            label = f"in {_name(dtype)} on {device}"
            logits = yield from _placed(specimen, model, tokens, label)
            if logits is None:
                continue
            reference = logits if reference is None else reference
            off = distance(logits, reference)
            allowed = _BFLOAT16_TOLERANCE if dtype is torch.bfloat16 else _BETWEEN_DEVICES
            if not off <= allowed:
                says = f"expected logits {label} within {allowed:g} of the first device's in float32, found {off:.2g}"
                yield Problem(specimen.where("forward"), says, "compute in the dtype and on the device of the input")
            elif dtype is torch.bfloat16:
                yield f"bfloat16 within {off:.1g} of float32 on {device}"
    if specimen.is_tiny:
        yield from _moved(specimen, tokens)


def _placed(
    specimen: Specimen, model: LoadedModel, tokens: Sequence[int], label: str
) -> Generator[Problem, None, Tensor | None]:
    """dtype, device and rows of what forward and compute_logits return; gives the logits, None where a problem was.

    embed_input_ids is called as a hook, whose own check of the result tells about it.
    """
    ids = torch.tensor(tokens, device=model.device)
    found: Any = None
    with torch.inference_mode():
        model.hooks.embed_input_ids(ids)
    for method, dtypes in (("forward", (model.dtype,)), ("compute_logits", (model.dtype, torch.float32))):
        with torch.inference_mode():
            if method == "forward":
                found = model.module(ids, torch.arange(len(tokens), device=model.device))
            else:
                found = model.module.compute_logits(found)  # type: ignore[operator]
        rows = found.shape[0] if isinstance(found, Tensor) and found.dim() == 2 else None
        if rows != len(tokens) or found.dtype not in dtypes or found.device != model.device:
            wanted = f"{' or '.join(map(_name, dtypes))}[{len(tokens)}, ...] on {model.device}"
            says = f"expected {wanted}, found {describe(found)}"
            fix = "make tensors in the input's dtype and on its device, and register constant ones as buffers"
            yield Problem(specimen.where(method), says, fix)
            return None
        if not bool(found.isfinite().all()):
            says = f"expected finite numbers {label}, found others"
            yield Problem(specimen.where(method), says, "look for overflow, 0/0 and memory that nobody wrote")
            return None
    logits: Tensor = found.float().cpu()
    return logits


def _moved(specimen: Specimen, tokens: Sequence[int]) -> Iterator[Problem]:
    """Move a module that the host has not touched, there and back."""
    module = specimen.build()
    with torch.no_grad():
        module.load_weights((name, tensor.clone()) for name, tensor in specimen.tensors.items())  # type: ignore[operator]
    here = _run_moved(module, tokens, torch.device("cpu"))
    for device in (*(device for device in specimen.devices if device.type != "cpu"), torch.device("meta")):
        where = specimen.where("forward")
        fix = (
            "make every tensor that forward uses a Parameter or a buffer (register_buffer(..., persistent=False)), "
            "or make it on the input's device"
        )
        try:
            there = _run_moved(module.to(device), tokens, device)
        except Exception as error:
            if device.type == "meta" and not _of_two_devices(error):
                return  # meta holds no values: code that looks at one says nothing about the device here
            yield from (
                Problem(problem.where, problem.says, fix)
                for problem in problems_of(error, where, f"the module moved with .to({str(device)!r}) to run there")
            )
            return
        if there.device.type != device.type:
            says = f"expected logits on {device} after .to({str(device)!r}), found {describe(there)}"
            yield Problem(where, says, fix)
        elif device.type != "meta":
            off = distance(_run_moved(module.to("cpu"), tokens, torch.device("cpu")), here)
            if off:
                says = f"expected the same logits after .to({str(device)!r}) and back, found a difference of {off:.2g}"
                yield Problem(where, says, fix)


def _run_moved(module: nn.Module, tokens: Sequence[int], device: torch.device) -> Tensor:
    ids = torch.tensor(tokens).to(device)
    with torch.inference_mode():
        logits: Tensor = module.compute_logits(module(ids, torch.arange(len(tokens)).to(device)))  # type: ignore[operator]
    return logits


def _of_two_devices(error: Exception) -> bool:
    """Whether PyTorch refused tensors of different devices."""
    text = str(error).lower()
    return any(part in text for part in ("same device", "at least two devices", "not on the expected device"))


class Steps:
    """Runs parts of requests on a loaded model through the engine's runner, as the scheduler would have them run."""

    def __init__(self, specimen: Specimen, device: torch.device) -> None:
        self._where = specimen.where("forward")
        self._model = specimen.load(device)
        self.max_tokens = self._model.vllm_config.model_config.max_model_len
        self.states = StatePool.of(self._model)
        cache = PagedCache(
            self._model.module,
            dtype=self._model.dtype,
            device=self._model.device,
            block_size=BLOCK_SIZE,
            max_num_seqs=_SLOTS,
            max_num_batched_tokens=_SLOTS * _TOTAL,
            max_model_len=min(self.max_tokens, LONGEST),
            states=self.states,
        )
        self._runner = Runner(
            self._model.module,
            cache,
            device=self._model.device,
            max_num_seqs=_SLOTS,
            max_num_batched_tokens=_SLOTS * _TOTAL,
        )
        groups = [(group.window, group.num_blocks) for group in cache.groups]
        self._blocks = BlockManager(groups, cache.block_size, prefix_caching=False)
        self._requests: dict[int, Request] = {}  # by slot
        self.empty()

    def need_a_cache(self) -> None:
        if not self._runner.cached:
            raise Skip("the class has no Attention and no RecurrentLayer: it is given the whole text in every step")

    def limited(self, count: int) -> int:
        """`count`, or less where the model is made for shorter sequences."""
        return min(count, self.max_tokens - 1)

    def run(self, parts: Sequence[tuple[list[int], int, int, int]]) -> Tensor:
        """One step over (tokens, slot, start, stop) of several requests; logits [len(parts), vocab]."""
        batch: list[Scheduled] = []
        for tokens, slot, start, stop in parts:
            start = start if self._runner.cached else 0
            batch.append(Scheduled(self._request(tokens, slot, start, stop), slot, start, stop, True))
        with torch.inference_mode():
            logits = self._runner.run(batch)
        assert logits is not None
        return logits

    def _request(self, tokens: list[int], slot: int, start: int, stop: int) -> Request:
        """The request in a slot, with blocks up to token `stop`; one that starts at 0 replaces what was there."""
        if not start:
            if slot in self._requests:
                self._blocks.free(self._requests.pop(slot))
            request = request_of(f"slot {slot}", tokens[:stop], min(self.max_tokens, LONGEST))
            given = self._blocks.admit(request, stop)
            self._requests[slot] = request
        else:
            request = self._requests[slot]
            request.token_ids[:] = tokens
            request.num_computed = start
            given = self._blocks.extend(request, stop)
        assert given, "the cache holds every text that the checks run"
        return request

    def empty(self) -> None:
        """Forget everything that is cached; states are zero."""
        for request in self._requests.values():
            self._blocks.free(request)
        self._requests.clear()
        if self.states is not None:
            # A check of its own sees to it that nothing is read of what a slot held before.
            self.states.fill(range(self.states.num_slots), 0.0)

    def one_shot(self, tokens: Sequence[int]) -> Tensor:
        """Logits [len(tokens), vocab] of one forward over the text, without a cache."""
        self.empty()
        module, device = self._model.module, self._model.device
        ids = torch.tensor(tokens, device=device)
        with torch.inference_mode():
            hidden = module(ids, torch.arange(len(tokens), device=device))
            logits: Tensor = module.compute_logits(hidden)  # type: ignore[operator]
        return logits

    def differences(
        self, labels: Sequence[str], found: Sequence[Tensor], expected: Sequence[Tensor], fix: str
    ) -> Iterator[Problem]:
        """The first of the rows that differ, as a problem; none where all agree."""
        self.empty()
        for label, ours, theirs in zip(labels, found, expected, strict=True):
            off = distance(ours, theirs)
            if not off <= TOLERANCE:
                token, right = int(ours.argmax()), int(theirs.argmax())
                says = (
                    f"{label}: expected the logits of one forward over the text (greedy token {right}), "
                    f"found them off by {off:.2g} of the greatest, where {TOLERANCE:g} is allowed "
                    f"(greedy token {token})"
                )
                yield Problem(self._where, says, fix)
                return


def request_of(name: str, token_ids: Sequence[int], max_model_len: int) -> Request:
    """A request as the engine would have it, which nothing but the check ends."""
    params = SamplingParams(max_tokens=None)
    prompt = TokenizedPrompt(None, list(token_ids))
    return Request(
        name,
        prompt,
        params,
        SamplingState(params, prompt.token_ids, []),
        eos_token_ids=frozenset(),
        max_model_len=max_model_len,
        tokenizer=None,
    )


def distance(found: Tensor, expected: Tensor) -> float:
    """max|found - expected| / max|expected|; NaN where either has one."""
    scale = float(expected.abs().max())
    off = float((found - expected).abs().max())
    return off / scale if scale else off


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
