"""A checkpoint: what a user names, opened for its metadata, its weights and its tokenizer.

`open_checkpoint` accepts a directory with config.json and safetensors, one GGUF file (or a directory that holds one),
or the name of the demo model. Opening reads metadata only, and checks all of it: what is wrong with a checkpoint is
one error.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchplug.errors import CheckpointError, Problem
from torchplug.host.demo import ALIASES, find_demo_model

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from torch import Tensor

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
PICKLE_FIX = (
    "convert it to safetensors where you trust it, e.g. with transformers:\n"
    "AutoModelForCausalLM.from_pretrained(OLD_DIR).save_pretrained(NEW_DIR)"
)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint, from its header: Hugging Face name, shape, how it is stored, where.

    `dtype_name` is a torch dtype's name ("bfloat16") or, for GGUF, a ggml type ("Q4_1"); `nbytes` are its bytes in
    `file`.
    """

    name: str
    shape: tuple[int, ...]
    dtype_name: str
    file: Path
    nbytes: int


class Checkpoint(ABC):
    """What every kind of checkpoint offers. Made by `open_checkpoint`.

    Attributes:
        name: What the user typed.
        path: The directory, or the .gguf file.
        config: config.json, or its equivalent made from GGUF metadata, with Hugging Face keys.
        config_source: The file that `config` comes from, for messages.
        generation_config: generation_config.json, or {}; for GGUF the token ids that its metadata gives.
        chat_template: Jinja text, or None.
        special_tokens: Texts of bos_token, eos_token, pad_token, unk_token and the like, where known.
        add_bos_token: Whether prompts start with bos_token; None where only the tokenizer's post-processor knows.
            Where it is not None, `tokenizer()` does the same by itself when asked to add special tokens.
    """

    name: str
    path: Path
    config: dict[str, Any]
    config_source: str
    generation_config: dict[str, Any]
    chat_template: str | None
    special_tokens: dict[str, str]
    add_bos_token: bool | None

    @abstractmethod
    def tensors(self) -> dict[str, TensorInfo]:
        """All tensors by name, in the order in which `weights` yields them; nothing is read."""

    @abstractmethod
    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """(name, CPU tensor) pairs, one at a time, mapped from disk where the format allows.

        Args:
            dtype: Floating-point tensors are converted to it. None: as stored, and float32 for everything in a GGUF
                file.

        A tensor may share memory with the (copy-on-write mapped) file: copy it, do not keep it. Raises CheckpointError.
        """

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, built anew at each call; CheckpointError with the fix where it has none."""

    @property
    def architectures(self) -> tuple[str, ...]:
        """config["architectures"], possibly empty."""
        return tuple(self.config.get("architectures") or ())

    @property
    def architecture(self) -> str:
        """The one architecture that the config names; CheckpointError where it names none or several."""
        found = self.architectures
        if len(found) == 1:
            return found[0]
        says = f"names {len(found)} architectures ({', '.join(found)})" if found else "names no architecture"
        fix = f'"architectures": ["ONE"] in {self.config_source}, with the name that `torchplug list` shows'
        raise CheckpointError(f"checkpoint {self.name!r}", Problem(self.config_source, says, fix))

    @property
    def dtype(self) -> str | None:
        """Name of the torch dtype that the config gives ("bfloat16"), or None; always None for GGUF."""
        nested = self.config.get("text_config")
        for source in (self.config, nested if isinstance(nested, dict) else {}):
            for key in ("dtype", "torch_dtype"):
                if isinstance(source.get(key), str) and source[key] != "auto":
                    return str(source[key]).removeprefix("torch.")
        return None

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors that `weights()` yields without a dtype, for progress."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def open_checkpoint(target: str | os.PathLike[str]) -> Checkpoint:
    """Open what `target` names and check its metadata; no weight is read.

    Args:
        target: "demo" (or "smollm2"; `./demo` is a path), a checkpoint directory, or a .gguf file.

    Raises:
        CheckpointError: There is no such checkpoint, or it is incomplete, damaged, hostile or of an unsupported kind.
    """
    from torchplug.host.checkpoint_directory import DirectoryCheckpoint
    from torchplug.host.gguf_checkpoint import GgufCheckpoint
    from torchplug.host.gguf_file import MAGIC

    if not isinstance(target, (str, os.PathLike)) or not isinstance(name := os.fspath(target), str):
        says = f"expected a path or `demo`, got {type(target).__name__}"
        raise CheckpointError("checkpoint", Problem("", says, "pass a text or a pathlib.Path"))
    if isinstance(target, str) and target in ALIASES:
        return GgufCheckpoint(target, find_demo_model())
    subject = f"checkpoint {name!r}"
    try:
        path = Path(name).expanduser()
        found, says = bool(name) and path.exists(), "there is no such file or directory"
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, a zero byte, a home that is not known
        found, says = False, f"cannot be looked up: {error}"
    if not found:
        fix = "give the path of a checkpoint directory or of a .gguf file, or `demo` for the demo model"
        if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
            fix += f";\nmodels of the Hugging Face Hub are not downloaded by name: `hf download {name} --local-dir DIR`"
        raise CheckpointError(subject, Problem("", says, fix))
    if path.is_dir():
        file = _only_gguf(path, subject)
        return GgufCheckpoint(name, file) if file else DirectoryCheckpoint(name, path)
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise CheckpointError(
            subject, Problem("", "is a pickle file; pickle can run code and is never opened", PICKLE_FIX)
        )
    if path.suffix.lower() == ".gguf" or (path.is_file() and _starts_with(path, MAGIC)):
        return GgufCheckpoint(name, path)
    if path.suffix.lower() == ".safetensors":
        says = "holds weights only; the config and the tokenizer lie beside it"
        raise CheckpointError(subject, Problem("", says, f"name its directory: {str(path.parent)!r}"))
    says = "is neither a checkpoint directory nor a GGUF file"
    raise CheckpointError(subject, Problem("", says, "give a checkpoint directory, a .gguf file, or `demo`"))


def _only_gguf(directory: Path, subject: str) -> Path | None:
    """The one GGUF file of a directory that is no safetensors checkpoint."""
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise CheckpointError(
            subject, Problem("", f"cannot be listed: {error.strerror}", "check its permissions")
        ) from None
    found = [name for name in names if name.lower().endswith(".gguf")]
    if not found or any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return None
    if len(found) > 1:
        says = f"holds {len(found)} GGUF files: {', '.join(found[:8])}{', ...' if len(found) > 8 else ''}"
        raise CheckpointError(subject, Problem("", says, f"name one of them, e.g. {str(directory / found[0])!r}"))
    return directory / found[0]


def _starts_with(path: Path, magic: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except OSError:
        return False
