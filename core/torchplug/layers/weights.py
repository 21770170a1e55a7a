"""Fill a module's parameters from a stream of named checkpoint tensors, and report everything that does not fit at
once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby

import torch
from torch import Tensor, nn

from torchplug.errors import CheckpointError, Problem
from torchplug.layers.stages import stage_missing_prefixes

# Checkpoints of years past hold this buffer; it follows from the config.
_DERIVED = ("rotary_emb.inv_freq",)

_UNEXPECTED = "is in the checkpoint, but the model class has no such parameter"
_FIX_NAMES = (
    "if the class is right for this checkpoint, name them in `rename`, `packed` or `skip` of its own "
    "load_weights; otherwise check `architectures` in config.json"
)
_FIX_TIE = 'set "tie_word_embeddings": false in config.json where both are meant, else remove it from the weights'
_FIX_VALUES = "check that config.json belongs to these weights and that the files are whole"


class WeightsMismatch(CheckpointError):
    """Checkpoint tensors that do not fit a module: unexpected names, wrong shapes, parts of fused parameters that never
    came.

    `loaded` are the parameters that a tensor came for, whether or not it fitted; what else the module has is missing.
    """

    def __init__(self, subject: str, problems: Iterable[Problem], loaded: set[str]) -> None:
        super().__init__(subject, problems)
        self.loaded = loaded


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """One tensor of a checkpoint that fills a parameter of a layer, or a part of it.

    Attributes:
        parameter: The parameter's own name in the layer.
        shard: Which part, for the layer's `weight_loader(param, tensor, shard)`; None for the whole, which goes to
            `weight_loader(param, tensor)`.
        shape: The tensor's shape.
    """

    parameter: str
    shard: Hashable
    shape: tuple[int, ...]


def load_weights(
    module: nn.Module,
    weights: Iterable[tuple[str, Tensor]],
    *,
    rename: Mapping[str, str] | None = None,
    skip: Sequence[str] = (),
    packed: Mapping[str, Sequence[str]] | None = None,
    transposed: Sequence[str] = (),
    prefixes: Mapping[str, str] | None = None,
) -> set[str]:
    """Fill the parameters and persistent buffers of `module` by name; a class's own `load_weights` is usually a call of
    this.

    Args:
        module: Its parameters are materialised on their device; tensors are copied there and cast.
        weights: (checkpoint name, tensor) pairs; read to the end even when something does not fit.
        rename: Runs of whole dotted components of checkpoint names and what the module calls them, applied in order:
            {"transformer": "model", "attn.c_proj": "self_attn.o_proj"}; an empty text drops the run.
        skip: Checkpoint names to leave out. An entry matches a whole name or the end of one after a dot, and may hold
            `*` and `?`.
        packed: The class's `packed_modules_mapping`: fused module and the ordered names of its parts in checkpoints,
            {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}. A checkpoint that holds the fused tensor itself is taken too.
        transposed: Checkpoint names, matched as in `skip`, of matrices stored as [in, out], as GPT-2's Conv1D does.
        prefixes: Beginnings of checkpoint names, up to a dot, and what the module calls them; the first that fits
            counts. Multimodal checkpoints come with their parts in several orders: {"model.language_model.":
            "language_model.model.", "model.visual.": "visual.", "lm_head.": "language_model.lm_head."}. Comes before
            `rename`.

    Returns the names of what was filled, each tied parameter under all its names.

    A layer whose parameters checkpoints hold in pieces has a method `checkpoint_spellings()`: for each spelling that
    there is, a mapping of the names below the layer's own to the `CheckpointPart` that each is (see `FusedMoE`).

    A part of a fused parameter goes through `weight_loader(param, tensor, shard_id)` with its place in the packed list,
    a whole tensor through `weight_loader(param, tensor)` where there is one: an attribute of the parameter, or else a
    method of the module that owns it. It refuses a tensor with ValueError. A tensor for the second name of a tied
    parameter (`lm_head.weight` of a tied model) is used only if none comes for the first, and must equal it otherwise:
    one of the two would be lost.

    Raises WeightsMismatch after the last pair, with all problems.
    """
    with torch.no_grad():
        filling = _Filling(module, packed or {})
        for name, tensor in weights:
            if _matches(name, skip) or _matches(name, _DERIVED):
                continue
            if _matches(name, transposed):
                tensor = tensor.t() if tensor.dim() == 2 else tensor
            filling.take(name, _renamed(_with_prefix(name, prefixes or {}), rename or {}), tensor)
        return filling.finish()


def grouped_names(names: Iterable[str]) -> list[str]:
    """Names that differ only in numbers as one, `layers.{0-29}.bias`, wherever that stands for exactly the names given;
    sorted."""
    families: dict[tuple[str, ...], list[tuple[int, ...]]] = defaultdict(list)
    for name in sorted(set(names)):
        parts = name.split(".")
        families[tuple("#" if p.isdecimal() else p for p in parts)].append(
            tuple(int(p) for p in parts if p.isdecimal())
        )
    lines = []
    for pattern, members in families.items():
        columns = [sorted(set(column)) for column in zip(*members, strict=True)]
        product = 1
        for column in columns:
            product *= len(column)
        if product == len(members):
            ranges = iter(_ranges(column) for column in columns)
            lines.append(".".join(next(ranges) if p == "#" else p for p in pattern))
        else:
            for member in sorted(members):
                numbers = iter(member)
                lines.append(".".join(str(next(numbers)) if p == "#" else p for p in pattern))
    return sorted(lines)


class _Filling:
    """The state of one `load_weights` call."""

    def __init__(self, module: nn.Module, packed: Mapping[str, Sequence[str]]) -> None:
        self.subject = f"weights for {type(module).__name__}"
        self.owners = dict(module.named_modules(remove_duplicate=False))
        self.targets: dict[str, Tensor] = module.state_dict(keep_vars=True)
        # A tied parameter's first name in the module stands for it.
        self.names_of: dict[int, list[str]] = defaultdict(list)
        for name, target in self.targets.items():
            self.names_of[id(target)].append(name)
        self.left_out = stage_missing_prefixes(module)
        self.packed = packed
        self.parts = {part: (fused, place) for fused, parts in packed.items() for place, part in enumerate(parts)}
        self.spelled = _spelled(module)
        # Of a parameter that comes in parts: what to call it, and every part's name in the spelling that came last.
        self.expected: dict[str, tuple[str, Mapping[Hashable, str]]] = {}
        self.filled: dict[str, set[Hashable]] = defaultdict(set)
        self.second: dict[str, tuple[str, Tensor]] = {}
        self.problems: dict[tuple[str, str], list[str]] = defaultdict(list)

    def take(self, source: str, name: str, tensor: Tensor) -> None:
        """One tensor, called `source` in the checkpoint and `name` in the module."""
        shard: Hashable = None
        if name.startswith(self.left_out):
            return
        if name not in self.targets:
            found = self._spelled(name) if name in self.spelled else self._fused(name)
            if found is None:
                self.problems[_UNEXPECTED, _FIX_NAMES].append(source)
                return
            name, shard = found
        first = self.names_of[id(self.targets[name])][0]
        if name != first:
            self.second.setdefault(first, (source, tensor))
            return
        self._fill(source, name, tensor, shard)

    def finish(self) -> set[str]:
        for first, (source, tensor) in self.second.items():
            if first not in self.filled:
                self._fill(source, first, tensor, None)
            elif not _equal(self.targets[first], tensor):
                says = f"differs from {first}, to which the config ties it"
                self.problems[says, _FIX_TIE].append(source)
        for name, shards in self.filled.items():
            if None in shards:
                continue
            called, parts = self.expected[name]
            for part, part_name in parts.items():
                if part not in shards:
                    self.problems[f"is missing; the other parts of {called} came", _FIX_VALUES].append(part_name)
        loaded = {alias for name in self.filled for alias in self.names_of[id(self.targets[name])]}
        if self.problems:
            raise WeightsMismatch(
                self.subject,
                [
                    Problem(name, says, fix)
                    for (says, fix), names in self.problems.items()
                    for name in grouped_names(names)
                ],
                loaded,
            )
        return loaded

    def _spelled(self, name: str) -> tuple[str, Hashable]:
        """The parameter, and the part of it, that its layer calls `name`."""
        target, part, siblings = self.spelled[name]
        if part.shard is not None:
            self.expected[target] = (target.rpartition(".")[2], siblings[part.parameter])
        return target, part.shard

    def _fused(self, name: str) -> tuple[str, Hashable] | None:
        components = name.split(".")
        for at, component in enumerate(components):
            if component in self.parts:
                fused, place = self.parts[component]
                target = ".".join((*components[:at], fused, *components[at + 1 :]))
                if target in self.targets:
                    names = (".".join((*components[:at], part, *components[at + 1 :])) for part in self.packed[fused])
                    self.expected[target] = fused, dict(enumerate(names))
                    return target, place
        return None

    def _fill(self, source: str, name: str, tensor: Tensor, shard: Hashable) -> None:
        target, before = self.targets[name], self.filled[name]
        if shard in before or None in before or (shard is None and before):
            self.problems["came more than once", _FIX_VALUES].append(source)
            return
        before.add(shard)
        if target.is_floating_point() and not tensor.is_floating_point():
            self.problems[f"expected floating-point numbers, found {_dtype(tensor)}", _FIX_VALUES].append(source)
            return
        loader = getattr(target, "weight_loader", None) or getattr(
            self.owners[name.rpartition(".")[0]], "weight_loader", None
        )
        try:
            if loader is not None:
                loader(target, tensor) if shard is None else loader(target, tensor, shard)
            elif shard is not None:
                raise ValueError(f"is a part of {name}, which has no weight_loader to put it in place")
            elif target.shape != tensor.shape:
                raise ValueError(f"expected shape {list(target.shape)}, found {list(tensor.shape)}")
            else:
                target.copy_(tensor)
        except (ValueError, RuntimeError) as error:
            self.problems[str(error).splitlines()[0], _FIX_VALUES].append(source)


_Spelled = tuple[str, CheckpointPart, Mapping[str, Mapping[Hashable, str]]]


def _spelled(module: nn.Module) -> dict[str, _Spelled]:
    """By checkpoint name: the parameter, what part of it the tensor is, and for each parameter of its layer the names
    of all parts in the same spelling."""
    found: dict[str, _Spelled] = {}
    for prefix, layer in module.named_modules(remove_duplicate=False):
        # Not through the instance: a placeholder of a stage that was left out passes its original's attributes on.
        if getattr(type(layer), "checkpoint_spellings", None) is None:
            continue
        dotted = f"{prefix}." if prefix else ""
        for spelling in layer.checkpoint_spellings():
            siblings: dict[str, dict[Hashable, str]] = defaultdict(dict)
            for name, part in spelling.items():
                siblings[part.parameter][part.shard] = dotted + name
                found[dotted + name] = (dotted + part.parameter, part, siblings)
    return found


def _equal(target: Tensor, tensor: Tensor) -> bool:
    return target.shape == tensor.shape and torch.equal(target, tensor.to(target.device, target.dtype))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}") for pattern in patterns)


def _with_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _renamed(name: str, rename: Mapping[str, str]) -> str:
    dotted = f".{name}."
    for old, new in rename.items():
        dotted = dotted.replace(f".{old}.", f".{new}." if new else ".")
    return dotted.strip(".")


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "{0-2,5}"; a single number stays bare."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return "{" + ",".join(runs) + "}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
