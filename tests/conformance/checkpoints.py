"""Random checkpoints that show faults, and what transformers makes of them: the oracle of the conformance tests.

A checkpoint at the usual init (standard deviation 0.02) hides faults: its attention is nearly uniform and its
residual stream nearly the embedding, so that a rotation off by 2 % keeps every greedy token. Here each weight has a
standard deviation of 2 / sqrt(fan-in), and biases and norm weights are random too, so every one of them moves the
logits.

A reference is made by transformers, in float32 with its eager attention, from the same directory that torchplug
loads. It is used only if it tells something: at least 12 distinct tokens in 24, and a gap of more than 1e-3 between
the best two logits at every step, so that rounding cannot choose the token. Seeds for which this holds are searched
once (`first_telling_seed`) and kept in the tests.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

STEPS = 24
MIN_DISTINCT_TOKENS = 12
MIN_TOP2_GAP = 1e-3
LOGITS_TOLERANCE = 1e-4

transformers.utils.logging.disable_progress_bar()


class OracleMismatch(AssertionError):
    """Our numbers are not the oracle's."""


class WeakOracle(AssertionError):
    """The reference itself tells too little: choose another seed."""


@dataclass(frozen=True)
class Continuation:
    """What the oracle appends to `prompt`: `tokens`, and for each the gap between its logit and the runner-up's."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    gaps: tuple[float, ...]

    def require_telling(self) -> None:
        """Raise WeakOracle unless the tokens vary and no step is a near-tie."""
        distinct, gap = len(set(self.tokens)), min(self.gaps)
        if distinct < MIN_DISTINCT_TOKENS or gap <= MIN_TOP2_GAP:
            raise WeakOracle(
                f"prompt of {len(self.prompt)} tokens: {distinct} distinct tokens in {len(self.tokens)} "
                f"(at least {MIN_DISTINCT_TOKENS} are wanted), smallest top-2 gap {gap:.1e} "
                f"(more than {MIN_TOP2_GAP:.0e} is wanted); find a seed with first_telling_seed"
            )


class Case(Protocol):
    """What a checkpoint is made from, and the prompts that it is asked. `options` go to `write_checkpoint`."""

    @property
    def seed(self) -> int: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def options(self) -> dict[str, Any]: ...
    @property
    def prompts(self) -> list[tuple[int, ...]]: ...
    @property
    def logits_prompt(self) -> tuple[int, ...]: ...


AnyCase = TypeVar("AnyCase", bound=Case)


@dataclass(frozen=True)
class Reference(Generic[AnyCase]):
    """One checkpoint on disk and what transformers makes of it."""

    case: AnyCase
    directory: Path
    logits: Tensor
    continuations: list[Continuation]


def reference_of(case: AnyCase, directory: Path) -> Reference[AnyCase]:
    """Write the checkpoint of `case` and ask transformers; raise WeakOracle unless every continuation is telling."""
    write_checkpoint(directory, case.config, seed=case.seed, **case.options)
    model = oracle_model(directory)
    continuations = [oracle_continuation(model, prompt) for prompt in case.prompts]
    for continuation in continuations:
        continuation.require_telling()
    return Reference(case, directory, oracle_logits(model, case.logits_prompt), continuations)


def write_checkpoint(
    directory: Path,
    config: Mapping[str, Any],
    *,
    seed: int,
    model_class: str = "LlamaForCausalLM",
    old_rope_spelling: bool = False,
    max_shard_size: int | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write config.json and random weights as safetensors into `directory`, and return it.

    Args:
        directory: Created if needed.
        config: Arguments of the model class's config class in transformers, and exactly the keys that config.json
            will hold besides model_type, architectures and dtype: a key left out here is left out of the file.
        seed: Of the weights.
        model_class: A causal language model class of transformers.
        old_rope_spelling: Write rope_theta and rope_scaling, as before transformers 5, in place of rope_parameters.
        max_shard_size: In bytes, or a text such as "50KB"; makes several files with an index.
        dtype: Of the file. Random numbers are drawn in float32.
    """
    cls = getattr(transformers, model_class)
    model = cls(cls.config_class(**copy.deepcopy(dict(config))))
    randomise(model, seed)
    shards = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    model.to(dtype).save_pretrained(directory, **shards)
    values = copy.deepcopy(dict(config))
    dtype_name = str(dtype).removeprefix("torch.")
    if old_rope_spelling:
        values |= _old_rope_keys(values.pop("rope_parameters"))
        values["torch_dtype"] = dtype_name
    else:
        values["dtype"] = dtype_name
    values |= {"architectures": [model_class], "model_type": cls.config_class.model_type}
    write_config(directory, values)
    return directory


def write_config(directory: Path, values: Mapping[str, Any]) -> None:
    """Write `values` as the directory's config.json."""
    (directory / "config.json").write_text(json.dumps(dict(values), indent=2), encoding="utf-8")


def read_config(directory: Path) -> dict[str, Any]:
    """The directory's config.json as it stands on disk."""
    values: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return values


def _old_rope_keys(parameters: Mapping[str, Any]) -> dict[str, Any]:
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    keys: dict[str, Any] = {"rope_theta": parameters["rope_theta"]} if "rope_theta" in parameters else {}
    keys["rope_scaling"] = None if scaling.get("rope_type", scaling.get("type")) == "default" else scaling
    return keys


def randomise(model: nn.Module, seed: int) -> None:
    """Fill every parameter in place: matrices with std 2 / sqrt(fan-in), biases std 0.5, norm weights in [0.5, 1.5].

    The fan-in of an embedding is its width: tied, it is the head's. Parameters are filled in the order of their
    names, so a seed means the same numbers whatever order the class registers them in. Biases that are buffers
    (DeepSeek-V3's, added to sigmoid scores) have std 0.1.
    """
    generator = torch.Generator().manual_seed(seed)
    owners = {f"{name}.{leaf}": module for name, module in model.named_modules() for leaf in module._parameters}
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.5, generator=generator)
            elif parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0.0, 2 / math.sqrt(_fan_in(owners[name], parameter)), generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("bias") and buffer.is_floating_point():
            buffer.normal_(0.0, 0.1, generator=generator)


def _fan_in(module: nn.Module, weight: Tensor) -> int:
    if type(module).__name__.endswith("Experts"):
        return weight.shape[-1]  # [experts, out, in]
    transposed = type(module).__name__ == "Conv1D"  # GPT-2's linear keeps its weight as [in, out]
    return weight.shape[0] if transposed else weight[0].numel()


def random_prompts(vocab_size: int, lengths: Sequence[int], *, seed: int = 0) -> list[tuple[int, ...]]:
    """One prompt of random token ids for each length."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(0, vocab_size, (length,), generator=generator).tolist()) for length in lengths]


def oracle_model(directory: Path) -> Any:
    """transformers' model of a checkpoint directory, float32, on the CPU, plain matrix-product attention and experts
    (its grouped ones take no odd widths)."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def oracle_logits(model: Any, prompt: Sequence[int]) -> Tensor:
    """Logits of every position of one prompt, computed in one forward pass: [len(prompt), vocab], float32."""
    with torch.inference_mode():
        logits: Tensor = _fresh(model)(torch.tensor([prompt]), use_cache=False).logits[0]
    return logits


def oracle_continuation(model: Any, prompt: Sequence[int], steps: int = STEPS) -> Continuation:
    """Greedy continuation of one prompt by `steps` tokens, as `generate` of transformers makes it."""
    inputs = torch.tensor([prompt])
    result = _fresh(model).generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        min_new_tokens=steps,
        max_new_tokens=steps,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(result.logits)[:, 0].topk(2, dim=-1).values
    tokens = tuple(result.sequences[0, len(prompt) :].tolist())
    return Continuation(tuple(prompt), tokens, tuple((best[:, 0] - best[:, 1]).tolist()))


def _fresh(model: Any) -> Any:
    # Dynamic scaling leaves its last frequencies in the rotary module: a shorter prompt after a longer one would be
    # answered with the longer one's. A copy of the loaded module has none of that history.
    return copy.deepcopy(model)


def first_telling_seed(
    directory: Path, config: Mapping[str, Any], prompts: Sequence[Sequence[int]], *, first: int = 0, **options: Any
) -> int:
    """The smallest seed from `first` on with which every prompt has a telling continuation.

    `options` go to `write_checkpoint`.
    """
    for seed in range(first, first + 10_000):
        model = oracle_model(write_checkpoint(directory, config, seed=seed, **options))
        try:
            for prompt in prompts:
                oracle_continuation(model, prompt).require_telling()
        except WeakOracle:
            continue
        return seed
    raise WeakOracle(f"no seed from {first} to {first + 9_999} gives a telling reference for {dict(config)}")


def edit_weights(directory: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    """Rewrite the one weights file of a checkpoint after `edit` has changed its names and tensors in place."""
    path = directory / "model.safetensors"
    weights = load_file(path)
    edit(weights)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path, metadata={"format": "pt"})


def module_logits(module: Any, prompt: Sequence[int]) -> Tensor:
    """Our logits of every position of one prompt, through the loaded module alone: [len(prompt), vocab].

    One sequence from position 0, without a cache or a forward context.
    """
    with torch.inference_mode():
        hidden_states = module(torch.tensor(prompt), torch.arange(len(prompt)))
        logits: Tensor = module.compute_logits(hidden_states)
    return logits


def assert_same_logits(ours: Tensor, reference: Tensor) -> None:
    """The oracle rule for logits: one shape, no NaN, and max|ours - reference| <= 1e-4 * max|reference|."""
    if ours.shape != reference.shape:
        raise OracleMismatch(f"logits: ours have shape {tuple(ours.shape)}, the oracle's {tuple(reference.shape)}")
    difference = (ours.double() - reference.double()).abs()
    error, scale = difference.max().item(), reference.abs().max().item()
    if not error <= LOGITS_TOLERANCE * scale:
        rows = difference.max(dim=-1).values > LOGITS_TOLERANCE * scale
        first = int(rows.nonzero()[0]) if rows.any() else "all"
        raise OracleMismatch(
            f"logits: max|a-b| is {error:.3e}, that is {error / scale:.1e} of max|b| = {scale:.3f}; "
            f"at most {LOGITS_TOLERANCE:.0e} is allowed; {int(rows.sum())} of {len(rows)} positions are off, "
            f"first {first}"
        )


def assert_same_tokens(ours: Sequence[int], reference: Continuation) -> None:
    """The oracle rule for greedy generation: the same tokens, all of them."""
    if tuple(ours) == reference.tokens:
        return
    pairs = zip(ours, reference.tokens, strict=False)
    step = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(reference.tokens)))
    gap = f"{reference.gaps[step]:.2e}" if step < len(reference.gaps) else "none"
    raise OracleMismatch(
        f"prompt of {len(reference.prompt)} tokens: continuations part at step {step} "
        f"(the oracle's top-2 gap there: {gap})\n"
        f"  ours   {list(ours)}\n  oracle {list(reference.tokens)}"
    )
