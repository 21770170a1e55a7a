"""A checkpoint directory as Hugging Face lays it out: config.json, safetensors (or shards and index), tokenizer.json.

Only plain names below the directory are accepted in the index. A link that the directory itself holds is followed
wherever it leads: the Hugging Face cache keeps every file as a link out of its snapshot, and whoever can place a link
there can place a file as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from torchplug.errors import CheckpointError, Problem
from torchplug.host.checkpoint import PICKLE_FIX, PICKLE_SUFFIXES, Checkpoint, TensorInfo
from torchplug.host.safetensors_file import StoredTensor, read_header, read_tensors
from torchplug.host.untrusted import first_of, read_json_object, regular_file_size, shown

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from torch import Tensor

_MIB = 2**20
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class DirectoryCheckpoint(Checkpoint):
    """See the module and `Checkpoint`. CheckpointError lists all that is wrong with the directory."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self.config_source = str(path / "config.json")
        problems: list[Problem] = []
        self.config = self._config(problems)
        self.generation_config = self._optional("generation_config.json", problems)
        self._check_eos("config.json", self.config, problems)
        self._check_eos("generation_config.json", self.generation_config, problems)
        tokenizer_config = self._optional("tokenizer_config.json", problems)
        self.special_tokens = self._special_tokens(tokenizer_config, problems)
        self.chat_template = self._chat_template(tokenizer_config, problems)
        add_bos = tokenizer_config.get("add_bos_token")
        self.add_bos_token = add_bos if isinstance(add_bos, bool) else None
        self._files: dict[Path, dict[str, StoredTensor]] = self._weight_files(problems)
        if problems:
            raise CheckpointError(f"checkpoint {name!r}", first_of(problems))

    def tensors(self) -> dict[str, TensorInfo]:
        return {
            tensor.name: TensorInfo(tensor.name, tensor.shape, tensor.dtype, file, tensor.nbytes)
            for file, tensors in self._files.items()
            for tensor in tensors.values()
        }

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        for file, tensors in self._files.items():
            for name, tensor in read_tensors(file, tensors):
                yield name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    def tokenizer(self) -> Tokenizer:
        return read_tokenizer(self.name, self.path / "tokenizer.json")

    # -- metadata files

    def _config(self, problems: list[Problem]) -> dict[str, Any]:
        path = self.path / "config.json"
        if not path.exists():
            says = "there is no config.json in this directory"
            fix = "name the directory that holds config.json and the weights, a .gguf file, or `demo`"
            problems.append(Problem(str(path), says, fix))
            return {}
        config = read_json_object(path, limit=10 * _MIB, problems=problems) or {}
        names = config.get("architectures")
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            says = f'"architectures" is {shown(names)}; expected a list of names'
            problems.append(Problem(str(path), says, '"architectures": ["LlamaForCausalLM"], for example'))
            return {}
        return config

    def _optional(self, name: str, problems: list[Problem]) -> dict[str, Any]:
        path = self.path / name
        return (read_json_object(path, limit=10 * _MIB, problems=problems) or {}) if path.exists() else {}

    def _check_eos(self, name: str, values: dict[str, Any], problems: list[Problem]) -> None:
        eos = values.get("eos_token_id")
        if eos is not None and not all(type(token) is int for token in (eos if isinstance(eos, list) else [eos])):
            says = f'"eos_token_id" is {shown(eos)}; expected a token id or a list of token ids'
            problems.append(Problem(str(self.path / name), says, "correct it as the model's authors have it"))

    def _special_tokens(self, tokenizer_config: dict[str, Any], problems: list[Problem]) -> dict[str, str]:
        """Texts; a token is written as a string or as an object with its `content`."""
        found = {}
        for source in (self._optional("special_tokens_map.json", problems), tokenizer_config):
            for key in _SPECIAL:
                token = source.get(key)
                text = token.get("content") if isinstance(token, dict) else token
                if isinstance(text, str):
                    found[key] = text
        return found

    def _chat_template(self, tokenizer_config: dict[str, Any], problems: list[Problem]) -> str | None:
        """chat_template.jinja, else the one in tokenizer_config.json; of several named ones, `default`."""
        path = self.path / "chat_template.jinja"
        if path.exists():
            try:
                if regular_file_size(path) > 10 * _MIB:
                    raise OSError("larger than 10 MiB")
                return path.read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                problems.append(Problem(str(path), f"cannot be read: {error}", "copy the file again, or remove it"))
                return None
        source, template = self.path / "tokenizer_config.json", tokenizer_config.get("chat_template")
        if isinstance(template, list):
            named = {shown(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)}
            template = named.get(shown("default")) if len(named) != 1 else next(iter(named.values()))
        if template is not None and not isinstance(template, str):
            says = f'"chat_template" is {shown(template)}; expected Jinja text, or a list of {{"name", "template"}}'
            problems.append(Problem(str(source), says, "copy the file again from the model's source"))
            return None
        return template

    # -- weights

    def _weight_files(self, problems: list[Problem]) -> dict[Path, dict[str, StoredTensor]]:
        single, index = self.path / _SINGLE, self.path / _INDEX
        if single.exists():
            return {single: read_header(single, problems)}
        if index.exists():
            return self._shards(index, problems)
        found = sorted(path for path in self.path.glob("*.safetensors"))
        if len(found) == 1:
            return {found[0]: read_header(found[0], problems)}
        if found:
            says = f"there are {len(found)} safetensors files and no {_INDEX} that says which belong to the model"
            problems.append(
                Problem(str(self.path), says, f"copy {_INDEX} from the model's source, or save the model again")
            )
            return {}
        pickles = sorted(path for path in self.path.iterdir() if path.suffix.lower() in PICKLE_SUFFIXES)
        for path in pickles:
            problems.append(Problem(str(path), "is a pickle file; pickle can run code and is never opened", PICKLE_FIX))
        if not pickles:
            says = f"there are no weights: neither {_SINGLE} nor {_INDEX} with its shards"
            problems.append(
                Problem(str(self.path), says, "copy the weights from the model's source into this directory")
            )
        return {}

    def _shards(self, index: Path, problems: list[Problem]) -> dict[Path, dict[str, StoredTensor]]:
        weight_map = (read_json_object(index, limit=100 * _MIB, problems=problems) or {"weight_map": {}}).get(
            "weight_map"
        )
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            fix = "copy the index again from the model's source"
            problems.append(Problem(str(index), '"weight_map" must be an object of tensor name: file name', fix))
            return {}
        shards: dict[Path, dict[str, StoredTensor]] = {}
        expected: dict[str, list[str]] = {}
        for tensor, file in weight_map.items():
            expected.setdefault(file, []).append(tensor)
        holder: dict[str, str] = {}
        for file, wanted in sorted(expected.items()):
            path = self.path / file
            if _leaves(file):
                says = f"names the file {shown(file)}; only files inside the checkpoint directory are read"
                problems.append(Problem(str(index), says, "do not load this checkpoint: its index was tampered with"))
                continue
            if not path.exists():
                says = f"the shard is missing; the index places {len(wanted):,} tensors in it"
                problems.append(Problem(str(path), says, "copy the missing file from the model's source"))
                continue
            before = len(problems)
            shards[path] = read_header(path, problems)
            if len(problems) == before:
                problems += _mismatches(index, path, set(wanted), shards[path], weight_map, file)
            for name in shards[path]:
                if name in holder:
                    says = f"is in two shards, {shown(holder[name])} and {shown(file)}"
                    problems.append(
                        Problem(f"tensor {shown(name)}", says, "save the checkpoint again: each tensor belongs in one")
                    )
                holder.setdefault(name, file)
        return shards


def read_tokenizer(name: str, path: Path) -> Tokenizer:
    """The tokenizer in the tokenizer.json at `path`, of the checkpoint called `name`."""
    from tokenizers import Tokenizer

    subject = f"checkpoint {name!r}"
    if not path.is_file():
        fix = (
            "make it with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR);\n"
            "or give token ids and set skip_tokenizer_init"
        )
        raise CheckpointError(
            subject, Problem(str(path), "there is no tokenizer.json, so text cannot be tokenized", fix)
        )
    if path.stat().st_size > 512 * _MIB:
        raise CheckpointError(
            subject, Problem(str(path), "is larger than 512 MiB", "this is no tokenizer: copy it again")
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for whatever is wrong with the file
        fix = "copy the file again from the model's source, or update the package tokenizers"
        raise CheckpointError(subject, Problem(str(path), f"is no tokenizer that can be read: {error}", fix)) from None


def _leaves(file: str) -> bool:
    """Whether a file name from an index could lead out of the directory, on this or another system."""
    parts = PurePosixPath(file).parts
    return not parts or file.startswith("/") or ".." in parts or re.search(r"[\\:\x00-\x1f]", file) is not None


def _mismatches(
    index: Path, path: Path, wanted: set[str], held: dict[str, StoredTensor], weight_map: dict[str, str], file: str
) -> list[Problem]:
    """Where index and shard disagree, both ways."""
    problems = []
    for name in sorted(wanted - set(held)):
        says = f"the index places it in {shown(file)}, which does not hold it"
        problems.append(
            Problem(f"tensor {shown(name)}", says, "index and shards are of different versions: copy both again")
        )
    for name in sorted(set(held) - wanted):
        placed = weight_map.get(name)
        if placed is None:
            says = f"is in {shown(file)}, but not in {index.name}"
            problems.append(
                Problem(f"tensor {shown(name)}", says, "index and shards are of different versions: copy both again")
            )
    return problems
