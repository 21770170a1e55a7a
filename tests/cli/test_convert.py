"""`torchplug convert`: what it prints, its exit codes, its progress bar, an interrupt that leaves nothing behind."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
from click.testing import CliRunner, Result
from gguf import GGUFWriter
from torchplug.cli import main
from torchplug.host.checkpoint import open_checkpoint


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    """A llama model of one layer, without a tokenizer."""
    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(str(path), "llama")
    writer.add_context_length(32)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(12)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    shapes = {"token_embd": (10, 8), "output_norm": (8,), "blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,)}
    shapes |= {f"blk.0.attn_{part}": (8, 8) for part in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (12, 8), "blk.0.ffn_up": (12, 8), "blk.0.ffn_down": (8, 12)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", numpy.random.default_rng(0).standard_normal(shape).astype(numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


PARAMETERS = 10 * 8 + 3 * 8 + 4 * 64 + 3 * 96


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["convert", *map(str, arguments)])


def test_it_says_what_was_written(gguf_file: Path, tmp_path: Path) -> None:
    result = run(gguf_file, tmp_path / "out", "--dtype", "bfloat16")
    assert result.exit_code == 0
    first, *files = result.stdout.splitlines()
    assert first == f"{tmp_path / 'out'}: LlamaForCausalLM, {PARAMETERS:,} parameters in bfloat16"
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert {line.split()[0]: int(line.split()[1].replace(",", "")) for line in files} == sizes
    assert "has no tokenizer" in result.stderr
    assert open_checkpoint(tmp_path / "out").dtype == "bfloat16"


def test_json(gguf_file: Path, tmp_path: Path) -> None:
    result = run(gguf_file, tmp_path / "out", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    files = found.pop("files")
    assert {entry["name"]: entry["bytes"] for entry in files} == {
        path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()
    }
    assert found == {
        "source": str(gguf_file),
        "directory": str(tmp_path / "out"),
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "tensors": 11,
        "parameters": PARAMETERS,
        "tokenizer": False,
    }


def test_an_error_is_text_and_exit_code_1(gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    result = run(gguf_file, tmp_path / "out")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("torchplug: convert ") and "is a directory with files in it" in result.stderr
    assert (tmp_path / "out" / "mine").read_text() == "keep"
    result = run(tmp_path / "missing.gguf", tmp_path / "new", "--json")
    assert (result.exit_code, result.stderr) == (1, "")
    assert json.loads(result.stdout)["error"] == "CheckpointError"
    assert run(gguf_file, tmp_path / "new", "--dtype", "int8").exit_code == 2
    assert not (tmp_path / "new").exists()


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from torchplug.cli import main\n"
        "try: main(['convert', '--help'])\n"
        "except SystemExit: print([m for m in ('torch', 'numpy', 'rich', 'gguf', 'tokenizers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.startswith("Usage: torchplug convert [OPTIONS] SRC DIR") and result.stdout.endswith("[]\n")


def test_progress_is_drawn_on_a_terminal_and_only_there(gguf_file: Path, tmp_path: Path) -> None:
    code = "import sys; from torchplug.cli import main; main(sys.argv[1:])"
    arguments = [sys.executable, "-c", code, "convert", str(gguf_file)]
    quiet = subprocess.run([*arguments, str(tmp_path / "a")], capture_output=True, text=True)
    assert quiet.returncode == 0 and "converting" not in quiet.stderr
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [*arguments, str(tmp_path / "b"), "--json"], stdout=subprocess.PIPE, stderr=follower
    ) as process:
        os.close(follower)
        drawn = b""
        while True:
            try:
                part = os.read(leader, 4096)
            except OSError:  # how Linux says that nobody has the terminal open any more
                break
            if not part:
                break
            drawn += part
        assert process.stdout is not None
        json.loads(process.stdout.read())
    os.close(leader)
    assert process.returncode == 0
    assert b"converting" in drawn


@pytest.mark.oracle
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    code = "import sys; from torchplug.cli import main; main(sys.argv[1:])"
    arguments = [sys.executable, "-c", code, "convert", "demo", str(tmp_path / "out"), "--dtype", "float32"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob(".out.*.partial/model.safetensors")):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.002)
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in errors and not re.search("parameters in", output)
    assert list(tmp_path.iterdir()) == []
