"""torchplug and an outside model package, installed as wheels and used from outside."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path

import checkpoints
import pytest
import tokenizers

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "sample_plugins" / "torchplug-gpt2"
PROJECTS = [tomllib.loads((path / "pyproject.toml").read_text())["project"] for path in (ROOT, SAMPLE)]
OFFERED = {
    architecture: (project["name"], project["version"])
    for project in PROJECTS
    for architecture in project["entry-points"]["torchplug.models.v1"]
}
PROMPT = "A model architecture is a pip package"
TEXT = """A model architecture is a pip package: torchplug finds it, proves that it keeps every promise it makes, and
runs it on the device you choose, at full speed, through one hook-call API. A broken plugin never breaks another."""


@dataclass(frozen=True)
class Expected:
    """A checkpoint directory, and what transformers says after PROMPT."""

    directory: Path
    token_ids: list[int]
    text: str


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator([TEXT], tokenizers.trainers.BpeTrainer(vocab_size=160, show_progress=False))
    config = {
        "vocab_size": tokenizer.get_vocab_size(),
        "n_positions": 64,
        "n_embd": 60,
        "n_layer": 2,
        "n_head": 5,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    directory = tmp_path_factory.mktemp("gpt2")
    checkpoints.write_checkpoint(directory, config, seed=19, model_class="GPT2LMHeadModel")
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = tokenizer.encode(PROMPT).ids
    continuation = checkpoints.oracle_continuation(checkpoints.oracle_model(directory), ids)
    continuation.require_telling()
    token_ids = list(continuation.tokens)
    return Expected(directory, token_ids, tokenizer.decode(token_ids))


def generate(environment, expected, *more, code=0):
    command = ["generate", "--model", expected.directory, "--dtype", "float32", "--device", "cpu"]
    return environment.torchplug(*command, "--max-tokens", checkpoints.STEPS, *more, PROMPT, code=code)


def architectures(environment):
    listed = json.loads(environment.torchplug("list", "--json").stdout)["architectures"]
    return {row["architecture"]: row for row in listed}


def test_everything_comes_from_the_wheels_and_the_rest_of_this_machine_is_out_of_sight(environment):
    program = """if True:
        import json, importlib_metadata, torchplug
        from importlib.util import find_spec
        found = importlib_metadata.entry_points(group="torchplug.models.v1")
        print(json.dumps({
            "files": [torchplug.__file__, *(find_spec(each.module).origin for each in found)],
            "metadata": [str(each.dist.locate_file("")) for each in found],
            "extra": [name for name in ("pytest", "transformers", "hatchling") if find_spec(name)],
        }))"""
    found = json.loads(environment.python(program))
    site = environment.site.resolve()
    assert site.is_relative_to(environment.root.resolve())
    assert len(found["metadata"]) == len(OFFERED) and found["extra"] == []
    for path in found["files"] + found["metadata"]:
        assert Path(path).resolve().is_relative_to(site), path


def test_the_requirements_of_both_wheels_are_all_they_need(environment):
    assert "No broken requirements found" in environment.pip("check")


def test_the_kernels_are_compiled_from_the_sources_in_the_wheel(environment, tmp_path):
    program = f"""if True:
        import os
        os.environ |= {{"XDG_CACHE_HOME": {str(tmp_path)!r}, "TORCHPLUG_KERNELS": "native"}}
        from torchplug.layers.cpu import build
        print(build.library() is not None)"""
    assert environment.python(program) == "True"


def test_list_shows_both_with_distribution_and_version(environment):
    rows = architectures(environment)
    assert {name: (row["distribution"], row["version"]) for name, row in rows.items()} == OFFERED
    assert {row["status"] for row in rows.values()} == {"ok"}


def test_show_names_the_owner_and_the_file_in_the_environment(environment):
    shown = environment.torchplug("show", "GPT2LMHeadModel").stdout
    assert "torchplug-gpt2==0.1.0" in shown and "torchplug_gpt2:GPT2LMHeadModel" in shown
    assert str(environment.root) in shown


def test_doctor_finds_nothing_wrong(environment):
    told = environment.torchplug("doctor").stdout
    assert "No problem found" in told and "torchplug-gpt2==0.1.0" in told


def test_generate_answers_with_the_tokens_of_transformers(environment, expected):
    (answer,) = json.loads(generate(environment, expected, "--json").stdout)
    assert answer["token_ids"] == expected.token_ids
    assert answer["text"] == expected.text


def test_what_the_readme_of_the_sample_shows_is_what_happens(environment, expected):
    readme = (SAMPLE / "README.md").read_text(encoding="utf-8")
    readme = readme.replace("path/to/gpt2", str(expected.directory))
    commands = [shlex.split(line) for line in re.findall(r"^\$ torchplug (.*)", readme, re.MULTILINE)]
    assert [command[0] for command in commands] == ["show", "generate"]
    shown, generated = (environment.torchplug(*command).stdout for command in commands)
    (excerpt,) = re.findall(r"^\$ torchplug show .*\n((?:.+\n)+)\.\.\.$", readme, re.MULTILINE)
    assert shown.startswith(excerpt)
    (program,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert generated.strip() and environment.python(program) == generated.strip()


def test_without_the_package_the_error_names_the_architecture_and_the_fix(without_gpt2, expected):
    assert set(architectures(without_gpt2)) == set(OFFERED) - {"GPT2LMHeadModel"}
    told = generate(without_gpt2, expected, code=1)
    assert told.stdout == "" and "Traceback" not in told.stderr
    assert "'GPT2LMHeadModel'" in told.stderr and "fix:" in told.stderr and "pip install" in told.stderr


def test_a_broken_package_beside_disturbs_nothing(with_a_broken_package, expected):
    environment = with_a_broken_package
    assert set(architectures(environment)) == set(OFFERED) | {"BrokenForCausalLM"}
    environment.torchplug("show", "GPT2LMHeadModel")
    environment.torchplug("doctor")
    assert generate(environment, expected).stdout == expected.text + "\n"
    told = environment.torchplug("show", "BrokenForCausalLM", "--import", code=1).stderr
    assert "Traceback" not in told
    for part in ("broken-plugin", "3.1", "No module named 'nothing_of_this_name'", "fix:"):
        assert part in told
