"""Classes written for vLLM: a plain one serves as it is; spellings of vLLM 0.32 are adapted or refused by name."""

from __future__ import annotations

import json
import sys
from typing import Protocol

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch import nn
from torchplug import LLM, Host, SamplingParams, interfaces
from torchplug.cli import main
from torchplug.errors import ContractError, HookNotProvided
from torchplug.host.contracts import inspect_class

SUBJECT = "plugin 'Test' (test==1.0, test:Test)"

# -- a plain class -----------------------------------------------------------------------------------------

PLAIN = '''
import torch
from torch import nn


class DriftForCausalLM(nn.Module):
    """Every token shifts what all later ones see: a whole prefix matters, and so does its order."""

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mix = nn.Linear(config.hidden_size, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def embed_input_ids(self, input_ids):
        return self.embed_tokens(input_ids)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        swing = torch.cos(positions.to(hidden.dtype))[:, None]
        return torch.sin(self.mix((hidden * swing).cumsum(0)))

    def compute_logits(self, hidden_states):
        return self.lm_head(hidden_states)

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)
            loaded.add(name)
        return loaded
'''
TINY = """
    @classmethod
    def tiny_config(cls):
        return {"vocab_size": 40, "hidden_size": 16, "max_position_embeddings": 64}
"""
CONFIG = {
    "architectures": ["DriftForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 16,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
}


@pytest.fixture
def drift(request):
    """The distribution that offers the plain class, beside everything that is installed."""
    installed = list(sys.path)
    site = request.getfixturevalue("site")
    sys.path.extend(path for path in installed if path not in sys.path)
    site.add("drift", "1.2", models={"DriftForCausalLM": "drift.model:DriftForCausalLM"}, modules=False)
    site.module("drift.model", PLAIN)
    return site


@pytest.fixture
def checkpoint(tmp_path):
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    generator = torch.Generator().manual_seed(5)
    shapes = {"embed_tokens.weight": (40, 16), "mix.weight": (16, 16), "mix.bias": (16,), "lm_head.weight": (40, 16)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, "w0")).save(str(directory / "tokenizer.json"))
    return directory


def greedy(module, prompt, steps):
    """The class's own forward over the whole prefix, step by step."""
    ids = list(prompt)
    for _ in range(steps):
        hidden = module(torch.tensor(ids), torch.arange(len(ids)))
        ids.append(int(module.compute_logits(hidden)[-1].argmax()))
    return ids[len(prompt) :]


def test_a_plain_class_registers_is_checked_and_has_its_one_hook(drift):
    assert not any(word in PLAIN for word in ("import vllm", "import torchplug", "from torchplug"))
    model_class = Host().model_class("DriftForCausalLM")
    assert set(model_class.report.implementations) == {"embed_input_ids"} and model_class.interfaces == frozenset()
    assert model_class.report.warnings == ()


@torch.inference_mode()
def test_a_plain_class_generates_what_its_own_forward_gives_alone_and_in_a_batch(drift, checkpoint):
    module = Host().load(checkpoint, device="cpu").module
    prompts = [[3, 17, 8], [30], [1, 2, 3, 4, 5, 6, 7]]
    expected = [greedy(module, prompt, 12) for prompt in prompts]
    assert len({token for tokens in expected for token in tokens}) > 8, "a constant answer would prove nothing"
    llm = LLM(str(checkpoint), device="cpu", skip_tokenizer_init=True)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    together = llm.generate(asked, params, use_tqdm=False)
    alone = [llm.generate([one], params, use_tqdm=False)[0] for one in asked]
    for answers in (together, alone):
        assert [list(answer.outputs[0].token_ids) for answer in answers] == expected


@pytest.mark.parametrize(
    ("source", "cache", "text"),
    [
        (PLAIN, None, "known when a checkpoint is loaded (the class has no tiny_config to build)"),
        (PLAIN + TINY, "none", "none: each request runs alone, with its whole prefix in every step"),
        (PLAIN + TINY.replace('"vocab_size": 40, ', ""), None, "known when a checkpoint is loaded"),
        (
            PLAIN.replace("self.mix =", "self.attention = Attention(2, 8, 1.0)\n        self.mix =").replace(
                "import torch\n", "import torch\nfrom torchplug.layers import Attention\n", 1
            )
            + TINY,
            "paged",
            "keys and values of its attention layers",
        ),
    ],
)
def test_show_says_how_the_class_is_cached_where_it_can(drift, source, cache, text):
    drift.module("drift.model", source)
    shown = CliRunner().invoke(main, ["show", "DriftForCausalLM", "--import"])
    assert f"cache         {text}" in shown.stdout, shown.output
    told = json.loads(CliRunner().invoke(main, ["show", "DriftForCausalLM", "--import", "--json"]).stdout)
    assert told["class"]["cache"] == cache
    assert "vllm" not in sys.modules


# -- contracts.md 0.1, row by row --------------------------------------------------------------------------


def report_of(cls):
    return inspect_class(cls, subject=SUBJECT)


def refusal_of(cls):
    with pytest.raises(ContractError) as raised:
        report_of(cls)
    return str(raised.value)


def made(base, *bases, **body):
    return type("Test", (base, *bases), {"__module__": __name__, **body})


def line(function):
    code = getattr(function, "__func__", function).__code__
    return f"{__file__}:{code.co_firstlineno}"


def test_score_type_claims_cross_encoding_as_the_flag_does(plain_class):
    new, old = made(plain_class, score_type="cross-encoder"), made(plain_class, supports_cross_encoding=True)
    pooling = made(plain_class, score_type="bi-encoder")  # a base's default hides no claim, as in vLLM
    shadowed = type("Test", (made(pooling), new), {})
    again = made(new, score_type="bi-encoder")
    for cls in (new, old, made(new), made(new, supports_cross_encoding=True), shadowed, again):
        assert report_of(cls).interfaces == {"SupportsCrossEncoding"}
        assert interfaces.supports_cross_encoding(cls) is True
    for silent in (made(plain_class), pooling, made(pooling)):
        report = report_of(silent)
        assert report.interfaces == frozenset() and report.warnings == ()
        assert interfaces.supports_cross_encoding(silent) is False


def test_score_type_that_says_something_else_is_a_warning(plain_class):
    (warning,) = report_of(made(plain_class, score_type="late-interaction")).warnings
    assert warning.where == "score_type (class Test, test_vllm_spellings)" or warning.where.startswith(
        "score_type (class"
    )
    assert (
        warning.says == "is 'late-interaction', which claims nothing here; 'cross-encoder' claims SupportsCrossEncoding"
    )
    assert warning.fix == "leave it out, or write score_type = 'cross-encoder'"


def test_score_type_against_the_flag_is_refused(plain_class):
    text = refusal_of(made(plain_class, score_type="cross-encoder", supports_cross_encoding=False))
    assert text == (
        f"torchplug: {SUBJECT}: supports_cross_encoding (class Test, {__name__}): supports_cross_encoding of class "
        "Test is False, and its score_type = 'cross-encoder' says the opposite\n"
        "  fix: write supports_cross_encoding = True in the class body, or leave it out"
    )


def test_score_type_on_the_instance_is_refused_like_a_flag(bind, plain_class):
    class Late(plain_class):
        def __init__(self, *, vllm_config, prefix=""):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            self.score_type = "cross-encoder"

    with pytest.raises(ContractError, match="score_type is set on the instance; it is read on the class Late"):
        bind(Late)


def test_the_default_aux_layers_of_eagle3_are_called_under_their_new_name(bind, plain_class):
    class Verifier(plain_class):
        supports_eagle3 = True

        def set_aux_hidden_state_layers(self, layers): ...

        def get_eagle3_default_aux_hidden_state_layers(self):
            return (2, 16, 29)

    model = bind(made(Verifier))
    assert model.hooks.get_eagle3_aux_hidden_state_layers() == (2, 16, 29)
    with pytest.raises(ContractError) as raised:
        bind(made(Verifier, get_eagle3_default_aux_hidden_state_layers=lambda self, draft: (1,)))
    text = str(raised.value)
    assert (
        "get_eagle3_default_aux_hidden_state_layers (" in text and "takes 'draft', which the hook does not have" in text
    )
    assert "def get_eagle3_aux_hidden_state_layers(self)" in text, "the fix has the name of this hook"


def image_model(plain_class, **body):
    """A multimodal class as vLLM 0.32 has it: embed_input_ids takes no handle_oov_mm_token."""

    class Image(plain_class):
        supports_multimodal = True

        def embed_multimodal(self, **kwargs):
            return [kwargs["rows"]]

        def get_language_model(self):
            return self.head

        @classmethod
        def get_placeholder_str(cls, modality, i):
            return "<image>"

        def embed_input_ids(self, input_ids, multimodal_embeddings=None, *, is_multimodal=None):
            embeds = self.embed(input_ids)
            if multimodal_embeddings is not None:
                embeds[is_multimodal] = torch.cat(list(multimodal_embeddings))
            return embeds

    return made(Image, **body)


@torch.inference_mode()
def test_without_handle_oov_mm_token_a_model_serves_everything_but_that(bind, plain_class):
    cls = image_model(plain_class)
    hooks = bind(cls).hooks
    ids, mask, rows = torch.tensor([1, 2, 3]), torch.tensor([False, True, True]), torch.ones(2, 8)
    embeds = hooks.embed_input_ids(ids, [rows], is_multimodal=mask, handle_oov_mm_token=False)
    assert torch.equal(embeds[mask], rows)
    with pytest.raises(ContractError) as raised:
        hooks.embed_input_ids(ids, [rows], is_multimodal=mask, handle_oov_mm_token=True)
    assert str(raised.value) == (
        f"torchplug: plugin 'Test' (test 1.0): embed_input_ids ({line(cls.embed_input_ids)}): "
        "handle_oov_mm_token=bool True was passed, and the method does not take handle_oov_mm_token\n"
        "  fix: call the hook without handle_oov_mm_token, or let the method take it"
    )


def test_configure_mm_token_handling_is_a_warning_that_names_the_argument(plain_class):
    def configure_mm_token_handling(self, vocab_size, mm_token_ids): ...

    report = report_of(image_model(plain_class, configure_mm_token_handling=configure_mm_token_handling))
    (warning,) = report.warnings
    assert warning.where == f"configure_mm_token_handling ({line(configure_mm_token_handling)})"
    assert warning.says == "is of another vLLM version and nobody reads it here"
    assert warning.fix == "let embed_input_ids take handle_oov_mm_token=False"
    assert report_of(image_model(plain_class)).warnings == ()


def test_the_token_counts_of_tower_and_connector_in_one_method_are_refused_by_name(bind, plain_class):
    def get_mm_lora_token_counts(self, modality, mm_kwargs, num_mm_embeds):
        return 4, None

    cls = image_model(
        plain_class, get_mm_lora_token_counts=get_mm_lora_token_counts, supports_tower_connector_lora=True
    )
    says = "is the spelling of another vLLM version and has other arguments; this hook is"
    where = f"get_mm_lora_token_counts ({line(get_mm_lora_token_counts)})"
    report = report_of(cls)
    hooks = ("get_num_mm_encoder_tokens", "get_num_mm_connector_tokens")
    assert [(each.where, each.says) for each in report.warnings[:2]] == [(where, f"{says} {name}") for name in hooks]
    assert report.warnings[2].where.startswith("supports_tower_connector_lora (class Test")
    assert "implement get_num_mm_encoder_tokens and get_num_mm_connector_tokens" in report.warnings[2].fix
    model = bind(cls)
    for name in hooks:
        with pytest.raises(HookNotProvided) as raised:
            getattr(model.hooks, name)
        assert f"Test does not implement it; {where} {says} {name}" in str(raised.value)
    assert model.hooks.get_placeholder_str("image", 1) == "<image>", "the rest of the model works"


@pytest.mark.parametrize(("number", "served"), [(0, False), (1, True), (2, True), (4, True), (5, True), (6, False)])
def test_a_recurrent_layer_has_one_to_five_states_of_any_rank(bind, plain_class, number, served):
    shapes = tuple((3,) * (rank + 1) for rank in range(number))
    hook = classmethod(lambda cls, vllm_config: shapes)
    hooks = bind(made(plain_class, has_inner_state=True, get_mamba_state_shape_from_config=hook)).hooks
    if served:
        assert hooks.get_mamba_state_shape_from_config(None) == shapes
    else:
        with pytest.raises(ContractError, match="expected tuple of 1 to 5 shapes"):
            hooks.get_mamba_state_shape_from_config(None)


def copy_functions(base, **body):
    shapes = classmethod(lambda cls, vllm_config: ((1,),))
    by_type = classmethod(lambda cls, types: dict.fromkeys(types, (print,)))
    return made(
        base,
        has_inner_state=True,
        get_mamba_state_shape_from_config=shapes,
        get_mamba_state_copy_funcs=by_type,
        **body,
    )


def test_copy_functions_by_backend_are_refused_by_name_where_the_hook_is_needed(plain_class):
    text = refusal_of(copy_functions(plain_class, supports_mamba_prefix_caching=True))
    where = f"get_mamba_state_copy_funcs ({__file__}:"
    assert text.startswith(f"torchplug: {SUBJECT}: {where}") and "this hook is get_mamba_state_copy_func\n" in text
    assert "fix: implement @classmethod def get_mamba_state_copy_func(cls) -> tuple of callables" in text


def test_copy_functions_by_backend_beside_the_hook_change_nothing_and_alone_are_a_warning(bind, plain_class):
    both = copy_functions(plain_class, get_mamba_state_copy_func=classmethod(lambda cls: (print,)))
    assert report_of(both).warnings == () and bind(both).hooks.get_mamba_state_copy_func() == (print,)
    (warning,) = report_of(copy_functions(plain_class)).warnings
    assert warning.where.startswith("get_mamba_state_copy_funcs (")


class Experts(nn.Module):
    """A layer of experts: it has a weight and keeps what the balancer hands over."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3))
        self.state = []

    def get_expert_weights(self):
        return [self.weight.view(2, -1)]

    def set_eplb_state(self, **state):
        self.state.append(state)


def mixture(plain_class, container, number=2):
    class Mixture(plain_class, interfaces.MixtureOfExperts):
        def __init__(self, *, vllm_config, prefix=""):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            self.layers = nn.ModuleList(Experts() for _ in range(number))
            self.expert_weights = []
            self.moe_layers = container(self.layers)
            self.num_moe_layers = number
            self.num_expert_groups = self.num_shared_experts = 1
            self.num_logical_experts = self.num_physical_experts = self.num_local_physical_experts = 2
            self.num_routed_experts, self.num_redundant_experts = 2, 0

        def update_physical_experts_metadata(self, num_physical_experts, num_local_physical_experts): ...

    return Mixture


@pytest.mark.parametrize("container", [list, tuple, nn.ModuleList])
def test_set_eplb_state_twice_does_not_double_the_weights_whatever_sequence_holds_the_layers(
    bind, plain_class, container
):
    model = bind(mixture(plain_class, container))
    assert "MixtureOfExperts" in model.interfaces
    views = [torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 2, 1, dtype=torch.long), torch.ones(2, 2).long()]
    kept = model.module.expert_weights
    for _ in range(2):
        model.hooks.set_eplb_state(*views)
    assert model.module.expert_weights is kept and len(kept) == 2
    for index, layer in enumerate(model.module.layers):
        assert [state["moe_layer_idx"] for state in layer.state] == [index, index]
        assert layer.state[1]["expert_load_view"] is views[0]


def test_no_moe_layer_is_no_claim_and_no_error(bind, plain_class):
    assert "MixtureOfExperts" not in bind(mixture(plain_class, list, number=0)).interfaces


@pytest.mark.parametrize(("rows", "served"), [(2, False), (3, True), (4, True)])
def test_mrope_positions_have_three_or_more_rows(bind, plain_class, rows, served):
    def get_mrope_input_positions(self, input_tokens, mm_features):
        return torch.arange(len(input_tokens)).expand(rows, -1), -1

    cls = made(plain_class, supports_mrope=True, get_mrope_input_positions=get_mrope_input_positions)
    hooks = bind(cls).hooks
    if served:
        positions, delta = hooks.get_mrope_input_positions([5, 6], [])
        assert positions.shape == (rows, 2) and delta == -1
    else:
        with pytest.raises(ContractError, match=r"found tuple of \(int64\[2, 2\] on cpu, int -1\)"):
            hooks.get_mrope_input_positions([5, 6], [])


class CachingOf032(Protocol):
    """As vLLM 0.32 has it: the flag, and the copy functions with empty bodies."""

    supports_mamba_prefix_caching = True

    @classmethod
    def get_mamba_state_copy_func(cls):
        """Copy functions, one per state."""

    @classmethod
    def get_mamba_state_copy_funcs(cls, mamba_types): ...


def test_prefix_caching_that_carries_the_copy_functions_needs_them_written(bind, plain_class):
    stub = made(plain_class, CachingOf032)
    assert refusal_of(stub) == (
        f"torchplug: {SUBJECT}: get_mamba_state_copy_func (class Test, {__name__}): "
        "claims SupportsMambaPrefixCaching but inherits the interface's empty method\n"
        "  fix: implement @classmethod def get_mamba_state_copy_func(cls) -> tuple of callables, one per state tensor "
        "of a layer"
    )
    good = made(stub, get_mamba_state_copy_func=classmethod(lambda cls: (print,)))
    assert bind(good).hooks.get_mamba_state_copy_func() == (print,)


class MultiModalOf032(Protocol):
    """What a class of vLLM 0.32 inherits without its author having written a line of it."""

    supports_multimodal = True

    @classmethod
    def get_placeholder_str(cls, modality, i): ...

    def get_mm_lora_token_counts(self, counts):
        return {name: number + 1 for name, number in counts.items()}

    def configure_mm_token_handling(self, vocab_size, mm_token_ids):
        self.mm_token_ids = mm_token_ids


def test_what_another_engines_interface_brings_is_nobodys_mistake(bind, plain_class):
    def embed_multimodal(self, **kwargs):
        return [kwargs["rows"]]

    inherits = made(
        plain_class, MultiModalOf032, embed_multimodal=embed_multimodal, get_language_model=lambda self: self.head
    )
    report = report_of(inherits)
    assert report.interfaces == {"SupportsMultiModal"} and report.warnings == ()
    assert report.absent["get_placeholder_str"] == "Test does not implement it"
    with pytest.raises(HookNotProvided, match="get_placeholder_str: Test does not implement it"):
        bind(inherits).hooks.get_placeholder_str("image", 1)
    writes = made(
        inherits,
        get_mm_lora_token_counts=lambda self, counts: counts,
        configure_mm_token_handling=lambda self, vocab_size, mm_token_ids: None,
    )
    warned = {warning.where.split()[0] for warning in report_of(writes).warnings}
    assert warned == {"get_mm_lora_token_counts", "configure_mm_token_handling"}


def older_names(plain_class, get_input_embeddings):
    """A class from before the rename of 2025: get_input_embeddings and get_multimodal_embeddings."""

    class Old(plain_class):
        embed_input_ids = None
        supports_multimodal = True

        def get_language_model(self):
            return self.head

        @classmethod
        def get_placeholder_str(cls, modality, i):
            return None

        def get_multimodal_embeddings(self, **kwargs):
            return [kwargs["rows"]]

        def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
            return inputs_embeds

    return made(Old, get_input_embeddings=get_input_embeddings)


@torch.inference_mode()
def test_the_older_names_are_called_with_what_they_take(bind, plain_class):
    seen = []

    def everything(self, input_ids, multimodal_embeddings=None, *, is_multimodal=None, handle_oov_mm_token=False):
        seen.append((multimodal_embeddings, is_multimodal, handle_oov_mm_token))
        return self.embed(input_ids)

    def two(self, input_ids, multimodal_embeddings=None):
        seen.append((multimodal_embeddings,))
        return self.embed(input_ids)

    ids, mask, rows = torch.tensor([1, 2]), torch.tensor([False, True]), torch.ones(1, 8)
    model = bind(older_names(plain_class, everything))
    (found,) = model.hooks.embed_multimodal(rows=rows)
    assert found is rows
    model.hooks.embed_input_ids(ids, [rows], is_multimodal=mask, handle_oov_mm_token=True)
    embeddings, given, oov = seen.pop()
    assert embeddings[0] is rows and given is mask and oov is True
    hooks = bind(older_names(plain_class, two)).hooks
    hooks.embed_input_ids(ids, [rows])
    assert seen.pop()[0][0] is rows
    with pytest.raises(ContractError, match="the method does not take is_multimodal"):
        hooks.embed_input_ids(ids, [rows], is_multimodal=mask)


def test_a_method_with_the_older_name_and_another_meaning_is_refused(plain_class):
    def get_input_embeddings(self):
        return self.embed

    assert refusal_of(older_names(plain_class, get_input_embeddings)) == (
        f"torchplug: {SUBJECT}: get_input_embeddings ({line(get_input_embeddings)}): does not take 'input_ids'\n"
        "  fix: write it as def embed_input_ids(self, input_ids, multimodal_embeddings=None, *, is_multimodal=None, "
        "handle_oov_mm_token=False)"
    )


def test_the_new_name_wins_over_the_older_one(bind, plain_class):
    def get_input_embeddings(self, input_ids):
        raise AssertionError("the older one was called")

    model = bind(made(plain_class, get_input_embeddings=get_input_embeddings))
    assert model.hooks.embed_input_ids(torch.tensor([1])).shape == (1, 8)
