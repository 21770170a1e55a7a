"""Broken plugin packages, each with one fault, written as real distributions: metadata directory and modules.

A line that a message must name carries the comment `# here`; `Package.line` finds it, so that no test copies a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MODEL = """import torch
from torch import nn
from torchplug import hookimpl, interfaces

{before}
class {name}({bases}nn.Module):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
{init}
    def embed_input_ids(self, input_ids):
        return self.embed(input_ids)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        return self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds

    def compute_logits(self, hidden_states):
        return self.head(hidden_states)

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)
            loaded.add(name)
        return loaded

{body}
"""

CONFIG = {"vocab_size": 16, "hidden_size": 8, "max_position_embeddings": 32}
WEIGHTS = {"embed.weight": (16, 8), "head.weight": (16, 8)}


def model(name: str, body: str = "", *, bases: str = "", init: str = "", before: str = "") -> str:
    """The source of a model class that works, with something added; `bases` are names in torchplug.interfaces."""
    named = "".join(f"interfaces.{base}, " for base in bases.split())
    return MODEL.format(
        name=name, body=_indented(body, 4), bases=named, init=_indented(init, 8), before=before.strip("\n")
    )


def _indented(text: str, width: int) -> str:
    return "\n".join(" " * width + line if line else "" for line in text.strip("\n").splitlines())


@dataclass(frozen=True)
class Package:
    """One distribution. `sources` maps dotted module names to their text."""

    name: str
    sources: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    wrappers: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    version: str = "1.0"
    requires: tuple[str, ...] = ()

    def line(self, mark: str = "# here") -> str:
        """`package/module.py:line` of the marked line."""
        for module, source in self.sources.items():
            for number, text in enumerate(source.splitlines(), 1):
                if mark in text:
                    return f"{module.replace('.', '/')}.py:{number}"
        raise LookupError(mark)

    def write(self, site: Path) -> Path:
        """Put it into a directory of the import path, as pip leaves a wheel; returns the metadata directory."""
        metadata = site / f"{self.name.replace('-', '_')}-{self.version}.dist-info"
        metadata.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {self.name}", f"Version: {self.version}"]
        lines += [f"Requires-Dist: {each}" for each in self.requires]
        (metadata / "METADATA").write_text("\n".join(lines) + "\n")
        (metadata / "INSTALLER").write_text("pip\n")
        (metadata / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        sections = {"torchplug.models.v1": self.models, "torchplug.plugins.v1": self.wrappers, **self.groups}
        text = "".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
            for group, entries in sections.items()
            if entries
        )
        (metadata / "entry_points.txt").write_text(text, encoding="utf-8")
        files = [self._write_module(site, module, source) for module, source in self.sources.items()]
        files += [
            f"{metadata.name}/{each}" for each in ("METADATA", "INSTALLER", "WHEEL", "entry_points.txt", "RECORD")
        ]
        (metadata / "RECORD").write_text("".join(f"{file},,\n" for file in files))
        return metadata

    @staticmethod
    def _write_module(site: Path, module: str, source: str) -> str:
        *packages, last = module.split(".")
        directory = site
        for package in packages:
            directory = directory / package
            directory.mkdir(exist_ok=True)
            (directory / "__init__.py").touch()
        (directory / f"{last}.py").write_text(source, encoding="utf-8")
        return f"{module.replace('.', '/')}.py"


def one_model(distribution: str, source: str, *, architecture: str = "", **more: object) -> Package:
    """A distribution with one architecture in `package.model`, called after the distribution."""
    architecture = architecture or architecture_of(distribution)
    package = distribution.replace("-", "_")
    value = f"{package}.model:{architecture_of(distribution)}"
    return Package(distribution, {f"{package}.model": source}, models={architecture: value}, **more)


def architecture_of(distribution: str) -> str:
    return "".join(part.title() for part in distribution.split("-"))


def mrope(distribution: str, method: str, *, claim: str = "supports_mrope = True", **more: str) -> Package:
    """A class that claims SupportsMRoPE and has `method`."""
    return one_model(distribution, model(architecture_of(distribution), f"{claim}\n\n{method}", **more))


def wrapper(distribution: str, source: str, attribute: str = "") -> Package:
    """A distribution with one wrapper plugin in `package_wrap`."""
    module = f"{distribution.replace('-', '_')}_wrap"
    return Package(distribution, {module: source}, wrappers={distribution: module + attribute})


GOOD_MROPE = """
def get_mrope_input_positions(self, input_tokens, mm_features):  # here
    return torch.arange(len(input_tokens)).expand(3, -1), 0
"""
WRAPPER = "from torchplug import hookimpl\n\n\n"

IMPORTS = [
    one_model("needs-unknown", "import torch\nimport nothing_of_this_name  # here\n"),
    one_model("needs-declared", "import flash_of_nowhere.ops  # here\n", requires=("flash-of-nowhere>=2",)),
    one_model("raises", 'def check():\n    raise RuntimeError("no licence")  # here\n\n\ncheck()\n'),
    one_model("exits", 'import sys\n\nsys.exit("wrong Python")  # here\n'),
    one_model("no-attribute", model("NoAttributes")),
    one_model("no-syntax", "class NoSyntax:\n    def (:  # here\n"),
    Package("incomplete", {"incomplete.other": ""}, models={"Incomplete": "incomplete.model:Incomplete"}),
]
"""Their class cannot be had."""

CLASSES = [
    mrope("bad-signature", "def get_mrope_input_positions(self, input_tokens):  # here\n    return None, 0"),
    mrope(
        "renamed-default",
        "def get_mrope_input_positions(self, input_tokens, mm_feature=()):  # here\n    return None, 0",
    ),
    mrope(
        "extra-argument",
        "def get_mrope_input_positions(self, input_tokens, mm_features, grid):  # here\n    return None, 0",
    ),
    mrope(
        "async-method",
        "async def get_mrope_input_positions(self, input_tokens, mm_features):  # here\n    return None, 0",
    ),
    mrope("stub-only", "", claim="", bases="SupportsMRoPE"),
    mrope("no-method", ""),
    mrope("flag-is-one", GOOD_MROPE, claim="supports_mrope = 1"),
    one_model("an-instance", "class Thing:\n    pass\n\n\nAnInstance = Thing()\n"),
    one_model("no-module-class", "class NoModuleClass:\n    pass\n"),
    one_model(
        "misspelt-mark",
        model("MisspeltMark", "@hookimpl  # here\ndef embed_inputs_ids(self, input_ids):\n    return input_ids"),
    ),
]
"""Their class is refused."""

LOADS = [
    mrope("late-flag", GOOD_MROPE, claim="", init="self.supports_mrope = True"),
    one_model(
        "partial-experts",
        model(
            "PartialExperts",
            "def update_physical_experts_metadata(self, num_physical_experts, num_local_physical_experts):\n    pass",
            bases="MixtureOfExperts",
            init="self.num_moe_layers = 1\nself.num_logical_experts = 4",
        ),
    ),
    one_model("bad-constructor", model("BadConstructor", init="self.rope = config.rope_theta  # here")),
    one_model("fails-to-build", model("FailsToBuild", init='raise ValueError("odd heads")  # here')),
]
"""Their class is accepted and their model is refused."""

CALLS = {
    "returns-none": mrope(
        "returns-none", "def get_mrope_input_positions(self, input_tokens, mm_features):  # here\n    pass"
    ),
    "false-flag": mrope("false-flag", GOOD_MROPE, claim="supports_mrope = False", bases="SupportsMRoPE"),
    "no-flag": mrope("no-flag", GOOD_MROPE, claim=""),
}
"""Their model loads and the hook get_mrope_input_positions is refused."""

KEYWORD_ONLY = mrope(
    "keyword-only",
    "def get_mrope_input_positions(self, input_tokens, *, mm_features):\n"
    "    return torch.arange(len(input_tokens)).expand(3, -1), len(mm_features)",
)
"""Nothing is wrong with it: a model's hook is called by name where its method asks for that."""

WRAPPERS = [
    wrapper("wrap-plain", WRAPPER + "@hookimpl  # here\ndef embed_input_ids(input_ids):\n    return input_ids\n"),
    wrapper(
        "wrap-tryfirst",
        WRAPPER + "@hookimpl(wrapper=True, tryfirst=True)  # here\ndef embed_input_ids():\n    return (yield)\n",
    ),
    wrapper(
        "wrap-class",
        WRAPPER + "class Watch:\n    @hookimpl(wrapper=True)\n    def embed_input_ids(self):\n        return (yield)\n",
        ":Watch",
    ),
    wrapper(
        "wrap-keyword-only",
        WRAPPER + "@hookimpl(wrapper=True)  # here\ndef embed_input_ids(*, input_ids):\n    return (yield)\n",
    ),
    wrapper(
        "wrap-renamed",
        WRAPPER + "@hookimpl(wrapper=True)  # here\ndef embed_input_ids(input_id=None):\n    return (yield)\n",
    ),
    wrapper("wrap-import-error", "import nothing_of_this_name  # here\n"),
    wrapper("wrap-exits", "raise SystemExit(3)  # here\n"),
    wrapper("wrap-old", WRAPPER + "@hookimpl(hookwrapper=True)  # here\ndef embed_input_ids():\n    yield\n"),
]
"""They are left out with a warning."""

FORGETS = wrapper(
    "wrap-forgets", WRAPPER + "@hookimpl(wrapper=True)  # here\ndef embed_input_ids():\n    result = yield\n"
)
"""It is accepted, and the first call of the hook is refused."""

SIDE_EFFECTS = [
    one_model("prints", 'print("hello from prints")\n' + model("Prints")),
    one_model(
        "starts-thread",
        "import threading\n\nWATCH = threading.Thread(target=threading.Event().wait, name='watch', daemon=True)\n"
        "WATCH.start()  # here\n" + model("StartsThread"),
    ),
    one_model("touches-device", "import torch\n\ntorch.cuda._initialized = True\n" + model("TouchesDevice")),
    one_model("sets-environment", "import os\n\nos.environ['OMP_SCHEDULE'] = 'static'\n" + model("SetsEnvironment")),
    wrapper(
        "wrap-torch",
        "import torch\n" + WRAPPER + "@hookimpl(wrapper=True)\ndef embed_input_ids():\n    return (yield)\n",
    ),
]
"""They work, and their import does what an import should not. Without an accelerator its state can only be imitated."""

HANGS = one_model("hangs", "import time\n\ntime.sleep(600)\n")
DIES = one_model("dies", "import os\n\nos.write(2, b'assertion failed\\n')\nos._exit(7)\n")
"""Only a process of their own can import them."""

HEALTHY = one_model("healthy", model("Healthy"))

METADATA = [
    Package("next-group", groups={"torchplug.models.v2": {"NextGroup": "next_group:NextGroup"}}),
    Package("no-module", models={"NoModule": "no_module.model:NoModule"}),
    one_model("first-owner", model("FirstOwner"), architecture="Shared"),
    one_model("second-owner", model("SecondOwner"), architecture="Shared"),
    one_model("my-llama", model("MyLlama"), architecture="LlamaForCausalLM"),
    Package(
        "odd-names",
        {"odd_names": model("OddNames")},
        models={
            "Odd Names": "odd_names:OddNames",
            "Ünïcode": "odd_names:OddNames",
            "Esc\x1b[31m": "odd_names:OddNames",
            "OddValue": "odd names:OddNames",
            "NoAttribute": "odd_names",
            "Dots": "odd_names..x:OddNames",
            "Extras": "odd_names:OddNames [cuda]",
            "dotted.name": "odd_names:OddNames",
        },
    ),
]
"""What is wrong with them is in their metadata."""
