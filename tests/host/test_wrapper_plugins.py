"""Wrapper plugins from real distributions: order, blame, what is left out and why, and what they must not cost."""

from __future__ import annotations

import gc
import json
import sys
import warnings
import weakref

import pytest
import torch
import torchplug
from safetensors.torch import save_file
from torchplug import ContractError, HookNotProvided, Host, hookimpl
from torchplug.errors import TorchplugWarning

MODEL = '''
import torch
from torch import nn
from torchplug import hookimpl
from torchplug.interfaces import SupportsMultiModal
from torchplug.layers import load_weights


class ShopForCausalLM(nn.Module, SupportsMultiModal):
    """Two class-phase or load-phase hooks whose results show who has been at them, and two of tensors."""

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)

    @hookimpl
    @classmethod
    def get_placeholder_str(cls, modality, i):
        return f"{modality}{i}"

    @hookimpl
    def get_num_mm_encoder_tokens(self, num_image_tokens):
        return num_image_tokens

    @hookimpl
    def get_language_model(self):
        return self.embed

    @hookimpl
    def embed_multimodal(self, *, rows):
        if not len(rows):
            raise KeyError("no rows")
        return [rows]

    @hookimpl
    def embed_input_ids(self, input_ids, multimodal_embeddings=None, *, is_multimodal=None, handle_oov_mm_token=False):
        return self.embed(input_ids)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        return hidden.cumsum(0)

    def compute_logits(self, hidden_states):
        return self.head(hidden_states)

    def load_weights(self, weights):
        return load_weights(self, weights)
'''


def adds(letter):
    """A wrapper plugin's module that appends a letter to the placeholder text."""
    return (
        "from torchplug import hookimpl\n"
        "@hookimpl(wrapper=True)\n"
        "def get_placeholder_str(modality):\n"
        f"    return (yield) + {letter!r}\n"
    )


@pytest.fixture
def checkpoint(tmp_path):
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"architectures": ["ShopForCausalLM"], "dtype": "float32"}))
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(16, 8, generator=generator) for name in ("embed.weight", "head.weight")}
    save_file(made, directory / "model.safetensors")
    return directory


@pytest.fixture
def installed_path():
    return list(sys.path)


@pytest.fixture
def shop(installed_path, site):
    """A site with one model plugin; `shop.wrapper(name, source)` adds a distribution with one wrapper plugin."""
    # Models are built and compiled here, for which torch imports more of what is installed.
    sys.path += [path for path in installed_path if path not in sys.path]
    site.module("shop.model", MODEL)
    site.add("shop", "1.0", models={"ShopForCausalLM": "shop.model:ShopForCausalLM"}, modules=False)

    def wrapper(name, source, version="1.0", attribute=""):
        module = name.lower().replace("-", "_")
        site.module(module, source)
        site.add(name, version, wrappers={module: module + attribute}, modules=False)

    site.wrapper = wrapper
    return site


def loaded(checkpoint, plugins=None):
    host = Host(plugins)
    return host, host.load(checkpoint, device="cpu")


# -- attached at load --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plugins", "expected"),
    [
        (None, "ab12z"),
        ("*", "ab12z"),
        ("*,-beta", "a12z"),
        ("shop,zeta,many,alpha", "z12a"),
        ("beta,*,alpha", "b12za"),
        ("shop", ""),
    ],
)
def test_wrappers_are_attached_in_the_order_of_the_selection_then_by_distribution_and_name(
    shop, checkpoint, plugins, expected
):
    """The first is the innermost, so its letter comes first; the class handle and the model have the same."""
    shop.wrapper("zeta", adds("z"))
    shop.wrapper("Beta", adds("b"))
    shop.wrapper("alpha", adds("a"))
    shop.module("many.one", adds("1"))
    shop.module("many.two", adds("2"))
    shop.add("many", wrappers={"b-second": "many.two", "a-first": "many.one"}, modules=False)
    host, model = loaded(checkpoint, plugins)
    assert model.hooks.get_placeholder_str("image", 7) == f"image7{expected}"
    assert host.model_class("ShopForCausalLM").hooks.get_placeholder_str("image", 7) == f"image7{expected}"
    enabled = {"alpha": "a", "beta": "b", "zeta": "z"}
    assert {name for name in enabled if name in sys.modules} == {n for n, x in enabled.items() if x in expected}


def test_a_wrapper_may_be_an_instance_and_sees_the_model_and_every_argument(shop, checkpoint):
    shop.wrapper(
        "around",
        """
from torchplug import hookimpl

class Around:
    def __init__(self):
        self.seen = []

    @hookimpl(wrapper=True)
    def embed_input_ids(self, is_multimodal, model, input_ids):
        result = yield
        self.seen.append((model, input_ids, is_multimodal))
        return result * 2

around = Around()
""",
        attribute=":around",
    )
    _, model = loaded(checkpoint)
    ids, mask = torch.tensor([3, 4]), torch.tensor([False, True])
    assert torch.equal(model.hooks.embed_input_ids(ids, is_multimodal=mask), model.module.embed(ids) * 2)
    ((seen_model, seen_ids, seen_mask),) = sys.modules["around"].around.seen
    assert seen_model is model.module and seen_ids is ids and seen_mask is mask


def test_attaching_to_one_model_leaves_the_others_and_the_class_alone(shop, checkpoint):
    host, one = loaded(checkpoint)
    other = host.load(checkpoint, device="cpu")
    direct = other.hooks.embed_input_ids
    seen = []
    one.attach(torchplug.observer(before=lambda *call: seen.append(call[0])))
    for handle in (one, other, host.model_class("ShopForCausalLM")):
        assert handle.hooks.get_placeholder_str("image", 1) == "image1"
    assert seen == ["get_placeholder_str"] and other.hooks.embed_input_ids is direct


# -- attach, detach, attached, close -----------------------------------------------------------------------


class Adds:
    """Adds a number to the number of tokens."""

    def __init__(self, number):
        self.number = number

    @hookimpl(wrapper=True)
    def get_num_mm_encoder_tokens(self):
        return (yield) * 10 + self.number


def test_hooks_read_at_each_use_follow_every_attach_and_detach(shop, checkpoint):
    _, model = loaded(checkpoint)
    first, second = Adds(1), Adds(2)
    direct = model.hooks.get_num_mm_encoder_tokens
    untouched = model.hooks.embed_input_ids

    def count():
        return model.hooks.get_num_mm_encoder_tokens(0)

    assert count() == 0
    model.attach(first)
    assert count() == 1
    with model.attached(second):
        assert count() == 12, "the last attached is the outermost"
        model.detach(first)
        assert count() == 2
        model.attach(first)
        assert count() == 21
    assert count() == 1
    with pytest.raises(RuntimeError, match="inside"), model.attached(second):
        raise RuntimeError("inside")
    assert count() == 1, "detached although the block failed"
    model.detach(first)
    assert model.hooks.get_num_mm_encoder_tokens is direct, "as if nothing had ever been attached"
    assert model.hooks.embed_input_ids is untouched


def test_attaching_twice_and_detaching_what_is_not_attached_are_errors(shop, checkpoint):
    _, model = loaded(checkpoint)
    plugin = Adds(1)
    model.attach(plugin)
    with pytest.raises(ContractError, match=r"wrapper plugin 'Adds': attach: is already attached to plugin 'ShopFor"):
        model.attach(plugin)
    assert model.hooks.get_num_mm_encoder_tokens(0) == 1, "once, not twice"
    model.attach(Adds(2))
    model.detach(plugin)
    with pytest.raises(ContractError, match="is not attached"):
        model.detach(plugin)


def test_a_plugin_of_an_enabled_distribution_can_be_detached_and_attached_again(shop, checkpoint):
    shop.wrapper("alpha", adds("a"))
    host, model = loaded(checkpoint)
    module = sys.modules["alpha"]
    model.detach(module)
    assert model.hooks.get_placeholder_str("image", 1) == "image1"
    assert host.model_class("ShopForCausalLM").hooks.get_placeholder_str("image", 1) == "image1a"
    model.attach(module)
    assert model.hooks.get_placeholder_str("image", 1) == "image1a"


def test_close_detaches_and_frees_and_says_so_afterwards(shop, checkpoint):
    shop.wrapper("alpha", adds("a"))
    host, model = loaded(checkpoint)
    model.attach(torchplug.observer())
    weight, hooks = weakref.ref(model.module.embed.weight), model.hooks
    model.close()
    assert weight() is None and dir(hooks) == []
    with pytest.raises(ContractError, match="is not attached"):
        model.detach(sys.modules["alpha"])
    with pytest.raises(HookNotProvided, match="get_placeholder_str: the model is closed"):
        hooks.get_placeholder_str("image", 1)
    again = host.load(checkpoint, device="cpu")
    assert again.hooks.get_placeholder_str("image", 1) == "image1a", "another model of the same host is as before"


# -- blame -------------------------------------------------------------------------------------------------

SPOILS = """
import torch
from torchplug import hookimpl

@hookimpl(wrapper=True)
def {hook}({arguments}):
    {body}
"""


@pytest.mark.parametrize(
    ("hook", "body", "says", "fix"),
    [
        (
            "get_placeholder_str",
            "yield\n    return 5",
            "gave back int 5, expected str, or None for a",
            "return str, or",
        ),
        ("embed_input_ids", "yield", "gave back None, expected [num_tokens, hidden_size]", "end with `return result`"),
        (
            "embed_input_ids",
            "return (yield).double()",
            "gave back float64[2, 8] on cpu, expected [num_tokens, hidden_size] tensor, model dtype",
            "return [num_tokens, hidden_size] tensor, model dtype, model device",
        ),
        (
            "embed_input_ids",
            "return (yield).to('meta')",
            "gave back float32[2, 8] on meta, expected [num_tokens, hidden_size] tensor",
            "return [num_tokens, hidden_size] tensor, model dtype, model device",
        ),
        ("get_num_mm_encoder_tokens", "return (yield) / 2", "gave back float 1.0, expected int", "return int"),
    ],
)
def test_a_wrapper_that_breaks_a_result_is_named_with_distribution_version_and_line(
    shop, checkpoint, hook, body, says, fix
):
    """Whoever else is around it: the inner one is intact, the outer one sees the error pass."""
    shop.wrapper("culprit", SPOILS.format(hook=hook, arguments="", body=body), version="2.3.1")
    _, model = loaded(checkpoint)
    failed = []
    model.attach(torchplug.observer(failed=lambda name, model, arguments, error: failed.append((name, error))))
    arguments = {"get_placeholder_str": ("image", 1), "get_num_mm_encoder_tokens": (2,)}
    with pytest.raises(ContractError) as raised:
        getattr(model.hooks, hook)(*arguments.get(hook, (torch.tensor([1, 2]),)))
    assert str(raised.value).startswith(
        f"torchplug: wrapper plugin 'culprit' (culprit==2.3.1, culprit): {hook} (culprit.py:5): {says}"
    )
    assert f"\n  fix: {fix}" in str(raised.value)
    assert failed == [(hook, raised.value)] and not hasattr(raised.value, "__notes__")


def test_an_exception_in_a_wrapper_names_the_wrapper_and_one_of_the_model_the_model(shop, checkpoint):
    body = "result = yield\n    if num_image_tokens == 3:\n        raise ValueError('mine')\n    return result"
    shop.wrapper(
        "culprit", SPOILS.format(hook="get_num_mm_encoder_tokens", arguments="num_image_tokens", body=body), "2.3.1"
    )
    shop.wrapper("witness", adds("w"))
    _, model = loaded(checkpoint)
    assert model.hooks.get_num_mm_encoder_tokens(4) == 4
    with pytest.raises(ValueError, match="mine") as raised:
        model.hooks.get_num_mm_encoder_tokens(3)
    assert raised.value.__notes__ == [
        "raised in torchplug hook get_num_mm_encoder_tokens (culprit.py:5) of "
        "wrapper plugin 'culprit' (culprit==2.3.1, culprit)"
    ]
    with model.attached(torchplug.observer()), pytest.raises(KeyError) as raised:
        model.hooks.embed_multimodal(rows=[])
    (note,) = raised.value.__notes__
    assert note.startswith("raised in torchplug hook embed_multimodal (shop/model.py:")
    assert note.endswith("of plugin 'ShopForCausalLM' (shop==1.0, shop.model:ShopForCausalLM)")


def test_a_wrapper_may_answer_for_the_model_or_turn_its_error_into_a_result(shop, checkpoint):
    body = "try:\n        return (yield)\n    except KeyError:\n        return [torch.ones(1, 8)]"
    shop.wrapper("rescue", SPOILS.format(hook="embed_multimodal", arguments="", body=body))
    _, model = loaded(checkpoint)
    (rescued,) = model.hooks.embed_multimodal(rows=[])
    assert torch.equal(rescued, torch.ones(1, 8))


# -- broken wrapper plugins --------------------------------------------------------------------------------

WRAP = "from torchplug import hookimpl\n"
ENDING = "mark it @hookimpl(wrapper=True): `result = yield`, then `return result`"
NAMES = "modality, i"

BROKEN = {
    "import error": (
        "import nothing_of_this_name",
        "",
        ": import of bad (bad.py:1): ModuleNotFoundError: No module named 'nothing_of_this_name'\n  fix: install the "
        "package that provides 'nothing_of_this_name'; where the metadata of bad does not require it, tell its author",
    ),
    "exit on import": (
        "raise SystemExit(3)",
        "",
        ": import of bad (bad.py:1): tries to end the process: SystemExit(3)"
        "\n  fix: install another version of bad, or remove it: `pip uninstall bad`",
    ),
    "missing attribute": (
        WRAP,
        ":plugin",
        ": import of bad: bad has no 'plugin'\n  fix: its author has to correct the entry point 'bad'; "
        "until then install another version of bad, or remove it: `pip uninstall bad`",
    ),
    "plain implementation": (
        WRAP + f"@hookimpl\ndef get_placeholder_str({NAMES}): return 'x'",
        "",
        ": get_placeholder_str (bad.py:2): is a plain implementation; only the model that owns a hook implements it"
        f"\n  fix: {ENDING}",
    ),
    "tryfirst": (
        WRAP + f"@hookimpl(wrapper=True, tryfirst=True)\ndef get_placeholder_str({NAMES}): return (yield)",
        "",
        ": get_placeholder_str (bad.py:2): sets tryfirst; the order of wrappers is the order of attaching"
        "\n  fix: remove tryfirst",
    ),
    "trylast": (
        WRAP + f"@hookimpl(wrapper=True, trylast=True)\ndef get_placeholder_str({NAMES}): return (yield)",
        "",
        ": get_placeholder_str (bad.py:2): sets trylast; the order of wrappers is the order of attaching"
        "\n  fix: remove trylast",
    ),
    "class instead of instance": (
        WRAP + f"class Bad:\n    @hookimpl(wrapper=True)\n    def get_placeholder_str(self, {NAMES}): return (yield)",
        ":Bad",
        ": class Bad, bad.py:2: is a class; a wrapper plugin is a module or an instance"
        "\n  fix: name an instance of it: Bad()",
    ),
    "old hookwrapper": (
        WRAP + f"@hookimpl(hookwrapper=True)\ndef get_placeholder_str({NAMES}): yield",
        "",
        f": get_placeholder_str (bad.py:2): is an old-style hookwrapper\n  fix: {ENDING}",
    ),
    "unknown hook": (
        WRAP + "@hookimpl(wrapper=True)\ndef get_placeholder_text(modality): return (yield)",
        "",
        ": get_placeholder_text (bad.py:2): no hook has this name\n  fix: did you mean get_placeholder_str?",
    ),
    "no generator": (
        WRAP + "@hookimpl(wrapper=True)\ndef get_placeholder_str(modality): return 'x'",
        "",
        ": get_placeholder_str (bad.py:2): is not a generator function"
        "\n  fix: `result = yield` where the model's own hook runs, then `return result`",
    ),
    "unknown argument": (
        WRAP + "@hookimpl(wrapper=True)\ndef get_placeholder_str(modalities): return (yield)",
        "",
        ": get_placeholder_str (bad.py:2): takes 'modalities', which the hook does not have"
        "\n  fix: rename 'modalities' to 'modality'",
    ),
    "nothing marked": (
        "def get_placeholder_str(modality): return (yield)",
        "",
        ": has no function marked with hookimpl\n  fix: mark a generator function with "
        "@torchplug.hookimpl(wrapper=True)",
    ),
    "two problems": (
        WRAP + "@hookimpl(wrapper=True)\ndef nothing_like_it(): yield\n@hookimpl\ndef embed_input_ids(): return 1",
        "",
        None,
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_wrapper_plugin_is_one_warning_and_is_left_out(shop, checkpoint, fault):
    source, attribute, expected = BROKEN[fault]
    shop.wrapper("bad", source, "0.9", attribute)
    shop.wrapper("good", adds("g"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        host, model = loaded(checkpoint)
        host.load(checkpoint, device="cpu")
        host.model_class("ShopForCausalLM")
    (warning,) = [each for each in caught if issubclass(each.category, TorchplugWarning)]
    text, subject = str(warning.message), f"wrapper plugin 'bad' (bad==0.9, bad{attribute})"
    left_out = "\n  The plugin is left out; everything else works."
    assert text.endswith(left_out)
    if expected is None:
        assert text.startswith(f"2 problems in {subject}\n  1. embed_input_ids (bad.py:4)\n")
        assert "\n  2. nothing_like_it (bad.py:2)\n" in text
    else:
        assert text == subject + expected + left_out
    assert model.hooks.get_placeholder_str("image", 1) == "image1g", "the model and the other wrapper work"
    assert torch.equal(model.hooks.embed_input_ids(torch.tensor([2])), model.module.embed.weight[2:3])


def test_what_a_broken_wrapper_is_refused_for_at_load_it_is_refused_for_when_attached(shop, checkpoint):
    _, model = loaded(checkpoint)
    direct = dict(vars(model.hooks))

    class Half:
        """One good function beside a bad one: nothing of it may stay attached."""

        @hookimpl(wrapper=True)
        def get_placeholder_str(self):
            return (yield) + "!"

        @hookimpl
        def embed_input_ids(self):
            return None

    with pytest.raises(ContractError, match="is a plain implementation"):
        model.attach(Half())
    assert model.hooks.get_placeholder_str("image", 1) == "image1" and vars(model.hooks) == direct


# -- what they must not cost -------------------------------------------------------------------------------


def test_weights_go_with_the_last_reference_while_wrappers_from_distributions_are_attached(shop, checkpoint):
    """Without the garbage collector, after calls, after failed calls, after attach and detach; the host lives on."""
    shop.wrapper("alpha", adds("a"))
    shop.wrapper(
        "keeper",
        "import torchplug\nplugin = torchplug.observer(after=lambda hook, model, arguments, result: None)\n",
        attribute=":plugin",
    )
    host, model = loaded(checkpoint)
    model.attach(extra := Adds(1))
    model.hooks.get_placeholder_str("image", 1)
    model.hooks.embed_input_ids(torch.tensor([1]))
    with pytest.raises(KeyError):
        model.hooks.embed_multimodal(rows=[])
    model.detach(extra)
    weight = weakref.ref(model.module.embed.weight)
    gc.collect()
    gc.disable()
    try:
        assert weight() is not None
        del model
        assert weight() is None
    finally:
        gc.enable()
    assert host.model_class("ShopForCausalLM").hooks.get_placeholder_str("image", 1) == "image1a"


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_forward_compiles_whole_while_no_wrapper_is_attached_to_a_hook_that_it_calls(
    shop, checkpoint, fresh_compiler
):
    """A wrapper around another hook is no hindrance; fullgraph=True makes a graph break an error."""
    shop.wrapper("alpha", adds("a"))
    _, model = loaded(checkpoint)
    assert model.hooks.get_placeholder_str("image", 1) == "image1a"

    def step(input_ids, positions, rows):
        embeds = model.hooks.embed_input_ids(input_ids)
        (items,) = model.hooks.embed_multimodal(rows=rows)
        return model.module(None, positions, inputs_embeds=torch.cat([embeds, items]))

    ids, positions, rows = torch.tensor([4, 1, 9]), torch.arange(4), torch.ones(1, 8)
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    with torch.inference_mode():
        assert torch.equal(compiled(ids, positions, rows), step(ids, positions, rows))
        assert torch.equal(
            torch.compile(model.module, fullgraph=True, backend="eager")(ids, positions[:3]),
            model.module(ids, positions[:3]),
        )
