"""What README.md shows is what happens."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)


def block(language, containing):
    (text,) = [text for kind, text in BLOCKS if kind == language and containing in text]
    return text


def test_the_model_plugin_on_the_first_screen_is_a_package_that_generates(tmp_path, monkeypatch):
    from torchplug import LLM, Host, SamplingParams

    site = tmp_path / "site"
    info = site / "bigram-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "bigram.py").write_text(block("python", "class BigramForCausalLM"))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bigram\nVersion: 1.0\n")
    group = tomllib.loads(block("toml", "BigramForCausalLM"))["project"]["entry-points"]["torchplug.models.v1"]
    lines = [f"{name} = {value}" for name, value in group.items()]
    (info / "entry_points.txt").write_text("[torchplug.models.v1]\n" + "\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(site)

    model = tmp_path / "model"
    model.mkdir()
    size = 24
    (model / "config.json").write_text(json.dumps({"architectures": ["BigramForCausalLM"], "vocab_size": size}))
    torch.manual_seed(0)
    weights = {"embed_tokens.weight": torch.randn(size, 64), "lm_head.weight": torch.randn(size, 64)}
    save_file(weights, model / "model.safetensors")
    follows = (weights["embed_tokens.weight"] @ weights["lm_head.weight"].T).argmax(-1)

    assert Host().architectures["BigramForCausalLM"].distribution == "bigram"
    llm = LLM(str(model), dtype="float32", skip_tokenizer_init=True)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [3]}, {"prompt_token_ids": [5, 7]}]
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        last, expected = prompt["prompt_token_ids"][-1], []
        for _ in range(8):
            last = int(follows[last])
            expected.append(last)
        assert list(output.outputs[0].token_ids) == expected


@pytest.mark.oracle
def test_the_python_examples_run_and_the_answer_is_paris(capsys):
    exec(block("python", "host.architectures"), {})
    assert "torchplug_models.llama:LlamaForCausalLM\nThe capital of France is Paris." in capsys.readouterr().out
    exec(
        block("python", "model.hooks.embed_input_ids"),
        {"Host": __import__("torchplug").Host, "input_ids": torch.tensor([1])},
    )
    assert "['embed_input_ids']" in capsys.readouterr().out


@pytest.mark.oracle
def test_the_structured_and_the_async_example_run(capsys):
    pytest.importorskip("llguidance")
    exec(block("python", "StructuredOutputsParams"), {})
    assert re.fullmatch(r"(Paris|Rome|Berlin), (France|Italy|Germany)\n", capsys.readouterr().out)
    exec(block("python", "AsyncLLM"), {})
    shown = capsys.readouterr().out
    assert " Paris" in shown and " Rome" in shown and shown.endswith("2 requests finished\n")


def test_every_command_of_the_table_exists_and_no_other():
    from torchplug.cli import main

    shown = set(re.findall(r"^\| `torchplug (\w+)", README, re.MULTILINE))
    result = CliRunner().invoke(main, ["--help"])
    listed = set(re.findall(r"^  (\w+)  ", result.output.partition("Commands:")[2], re.MULTILINE))
    assert result.exit_code == 0 and shown == listed
