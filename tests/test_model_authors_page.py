"""docs/model-authors.md, followed step by step: the package that the page writes, installed by pip and used."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from kinds_of_checks import OF_EXPERTS, OF_ITEMS, OF_STATES
from safetensors.torch import save_file

PAGE = (Path(__file__).parents[1] / "docs" / "model-authors.md").read_text()
FILES = dict(re.findall(r"^`(\S+)`:\n\n```\w+\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
INSTALL, LIST, SHOW, DOCTOR, CHECK, GENERATE = re.findall(r"^\$ (.+)$", PAGE, re.MULTILINE)
SIZES = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
OF_OTHER_KINDS = OF_STATES | OF_EXPERTS | OF_ITEMS
"""Checks that do not apply to the page's model, which has neither recurrent layers nor experts and reads text alone."""


class Author:
    """Somebody at work in an environment of their own, which sees what is installed here."""

    def __init__(self, root):
        self.project = root / "torchplug-nano"
        for name, text in FILES.items():
            file = self.project / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        venv.create(root / "venv", with_pip=False, symlinks=os.name != "nt")
        self.python = root / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
        site = Path(
            self.run(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
        )
        (site / "here.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")

    def run(self, *command, code=0):
        """Run a command in the project's folder, without the settings of this process."""
        ours = ("PYTHON", "TORCHPLUG", "VIRTUAL_ENV", "PIP_", "COV_", "PYTEST")
        environment = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
        done = subprocess.run(
            [str(part) for part in command],
            cwd=self.project,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert code is None or done.returncode == code, (
            f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
        return done

    def follow(self, command, *options, code=0):
        """Run a command line of the page, with further options."""
        program, *arguments = shlex.split(command)
        if program == "pip":
            offline = ("--no-index", "--no-build-isolation", "--disable-pip-version-check", "--quiet")
            return self.run(sys.executable, "-m", "pip", "--python", self.python, *arguments, *offline)
        return self.run(self.python, "-m", program, *arguments, *options, code=code)


@pytest.fixture(scope="module")
def author(tmp_path_factory):
    author = Author(tmp_path_factory.mktemp("author"))
    author.follow(INSTALL)
    return author


def test_the_page_writes_the_files_that_it_shows():
    (tree,) = re.findall(r"^```\ntorchplug-nano/\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert tree.split() == list(FILES)


def test_the_package_is_found_and_sound(author):
    (row,) = [line for line in author.follow(LIST).stdout.splitlines() if "Nano" in line]
    assert row.split()[:5] == ["NanoForCausalLM", "torchplug-nano", "0.1.0", "nano:NanoForCausalLM", "ok"]
    shown = author.follow(SHOW).stdout
    assert re.search(r"^class +nano\.NanoForCausalLM$", shown, re.MULTILINE)
    assert re.search(r"^embed_input_ids +step +embed_input_ids \(nano/__init__.py:\d+\)$", shown, re.MULTILINE)
    assert re.search(r"^cache +keys and values", shown, re.MULTILINE)
    assert "warning" not in shown
    found = json.loads(author.follow(DOCTOR, "--json", code=None).stdout)  # what else is installed is not our business
    (row,) = [row for row in found["distributions"] if row["distribution"] == "torchplug-nano"]
    assert row["in_use"] and row["install"] == "editable" and row["entry_points"] == ["NanoForCausalLM"]
    assert "nano" not in json.dumps(found["problems"] + found["notes"]).lower()


def test_the_checks_pass_and_only_those_for_models_of_another_kind_are_skipped(author):
    done = author.follow(CHECK, "--device", "cpu", "--json")
    checks = json.loads(done.stdout)["checks"]
    skipped = {check["check"] for check in checks if check["outcome"] == "skipped"}
    assert skipped == OF_OTHER_KINDS
    assert {check["outcome"] for check in checks} == {"ok", "skipped"}


def test_the_checks_pass_in_the_authors_own_test_suite(author):
    (text,) = re.findall(r"^```python\n(from torchplug\.testing.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (author.project / "test_nano.py").write_text(text)
    done = author.run(author.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_nano.py")
    assert re.search(rf"^\d+ passed, {len(OF_OTHER_KINDS)} skipped in", done.stdout, re.MULTILINE), done.stdout


def test_a_checkpoint_runs_and_gives_what_the_architecture_says(author, tmp_path):
    words = ["<unk>", "Once", "upon", "a", "time", *(f"w{i}" for i in range(91))]
    expected = greedy(write_checkpoint(tmp_path, words), [1, 2, 3, 4], 12)
    assert len(set(expected)) > 3, "a model that repeats one token shows little"

    done = author.follow(GENERATE.replace("path/to/checkpoint", tmp_path.as_posix()), "--json", "--max-tokens", "12")
    (answer,) = json.loads(done.stdout)
    assert answer["token_ids"] == expected
    assert answer["text"].split() == [words[token] for token in expected]

    (tmp_path / "tokenizer.json").unlink()
    (program,) = re.findall(r"^```python\n(from torchplug import LLM.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    done = author.run(author.python, "-c", program.replace("path/to/checkpoint", tmp_path.as_posix()))
    assert json.loads(done.stdout) == expected


def test_the_error_on_the_page_is_the_one_that_is_printed(author):
    (shown,) = re.findall(r"^```\n(torchplug: .*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    file = author.project / "src" / "nano" / "__init__.py"
    right = file.read_text()
    file.write_text(re.sub(r"(class NanoForCausalLM.*:\n)", r"\1    supports_mrope = True\n", right))
    try:
        said = author.follow(SHOW, code=1).stderr
    finally:
        file.write_text(right)
    assert said == shown


# -- the checkpoint, and what Nano computes, written down again --------------------------------------------


def write_checkpoint(directory, words):
    """A random checkpoint of SIZES with a tokenizer that has one token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab, hidden, layers = SIZES["vocab_size"], SIZES["hidden_size"], SIZES["num_hidden_layers"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(
        json.dumps({"architectures": ["NanoForCausalLM"], "dtype": "float32"} | SIZES)
    )
    generator = torch.Generator().manual_seed(5)
    shapes = {"embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    for layer in range(layers):
        shapes |= {f"layers.{layer}.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
    weights = {name: torch.randn(shape, generator=generator) * 2 / shape[1] ** 0.5 for name, shape in shapes.items()}
    norms = [f"layers.{layer}.norm.weight" for layer in range(layers)] + ["norm.weight"]
    weights |= {name: torch.rand(hidden, generator=generator) + 0.5 for name in norms}
    save_file(weights, directory / "model.safetensors")
    return weights


def greedy(weights, tokens, count):
    """The `count` most probable next tokens, with the whole text computed for each."""
    hidden, heads = SIZES["hidden_size"], SIZES["num_attention_heads"]
    tokens = list(tokens)

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def split(x):
        return x.unflatten(-1, (heads, hidden // heads)).transpose(0, 1)

    def rotate(x):
        half = x.shape[-1] // 2
        angle = torch.arange(x.shape[1]).outer(10000.0 ** (-torch.arange(half) / half))
        one, other = x[..., :half], x[..., half:]
        return torch.cat([one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()], -1)

    for _ in range(count):
        x = weights["embed_tokens.weight"][tokens]
        for layer in range(SIZES["num_hidden_layers"]):
            part = {name: weights[f"layers.{layer}.{name}_proj.weight"] for name in "qkvo"}
            read = norm(x, weights[f"layers.{layer}.norm.weight"])
            query, key, value = (split(read @ part[name].T) for name in "qkv")
            mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
            x = x + mixed.transpose(0, 1).flatten(1) @ part["o"].T
        logits = norm(x[-1], weights["norm.weight"]) @ weights["lm_head.weight"].T
        tokens.append(int(logits.argmax()))
    return tokens[-count:]


def test_the_mixture_of_experts_claims_its_interface_and_equals_the_sum_written_out():
    from torchplug.config import DeviceConfig, EPLBConfig, HfConfig, ModelConfig, ParallelConfig, VllmConfig
    from torchplug.interfaces import is_mixture_of_experts

    (source,) = re.findall(
        r"^```python\n(import torch\n.*?class SparseForCausalLM.*?)^```$", PAGE, re.DOTALL | re.MULTILINE
    )
    names: dict = {}
    exec(source, names)
    values = {"hidden_size": 16, "num_experts": 4, "moe_intermediate_size": 8, "num_hidden_layers": 2}
    config = VllmConfig(
        ModelConfig("x", HfConfig(values, source="x/config.json"), torch.float32, 64),
        DeviceConfig(torch.device("cpu")),
        parallel_config=ParallelConfig(eplb_config=EPLBConfig(2)),
    )
    model = names["SparseForCausalLM"](vllm_config=config)
    assert is_mixture_of_experts(model) and model.num_physical_experts == 6 and model.num_moe_layers == 2
    layer = model.layers[1]
    for parameter in layer.parameters():
        parameter.data.normal_()
    x = torch.randn(3, 16)
    with torch.no_grad():
        chosen = torch.softmax(layer.gate.weight @ x[0], 0).topk(2)
        expected = layer.shared_expert.weight @ x[0]
        for weight, expert in zip(chosen.values / chosen.values.sum(), chosen.indices, strict=True):
            gate, up = (layer.experts.w13_weight[expert] @ x[0]).chunk(2)
            expected += weight * (layer.experts.w2_weight[expert] @ (F.silu(gate) * up))
        torch.testing.assert_close(layer(x)[0], expected, rtol=1e-4, atol=1e-4)
