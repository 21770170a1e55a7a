"""What each field of each row of the hook table does, seen from a model: behaviour equals the checked-in docs/api.json.

No test here compares the table with a copy of it. Each makes model classes and looks at what becomes of their hooks: a
row that says something else shows as a hook that is missing, needed, moved, refused or accepted where it must not be.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torchplug.errors import ContractError, HookNotProvided
from torchplug.hookspecs import HOOKS, Phase
from torchplug.host.binding import Binding
from torchplug.host.contracts import inspect_class
from torchplug.host.model import LoadedModel, ModelClass
from torchplug.interfaces import INTERFACES, MULTIMODAL_FLAGS
from torchplug.results import Facts

API = json.loads((Path(__file__).parents[2] / "docs" / "api.json").read_text())["hooks"]
EVERY_MODEL = "VllmModel"

every_hook = pytest.mark.parametrize("name", API)


# -- model classes made to measure -------------------------------------------------------------------------


class Bare(nn.Module):
    """The conventions of every model without its hook."""

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        for name in self.moe_attributes:
            setattr(self, name, [] if name in ("expert_weights", "moe_layers") else 1)

    moe_attributes = ()

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None): ...

    def compute_logits(self, hidden_states): ...

    def load_weights(self, weights): ...


def method_of(name, signature, result, calls):
    """A method with the hook's arguments that notes them and returns `result(name)`."""
    given = ", ".join(f"{p}={p}" for p in inspect.signature(eval(f"lambda {signature[1:-1]}: 0")).parameters)
    scope = {"note": lambda **given: calls.append((name, given)), "result": result}
    first = f"me, {signature[1:-1]}" if signature != "()" else "me"
    exec(f"def {name}({first}):\n    note({given})\n    return result({name!r})", scope)
    return classmethod(scope[name]) if API.get(name, {}).get("phase") == "class" else scope[name]


def make(claims=(), *, without=(), only=None, extra=None, result=lambda name: None, calls=None):
    """A class that claims `claims` and has every hook of the API, or some of them, each returning `result(name)`."""
    calls = [] if calls is None else calls
    names = [name for name in API if (name in only if only is not None else name not in without)]
    body = {name: method_of(name, API[name]["signature"], result, calls) for name in names}
    for claim in claims:
        if claim == "MixtureOfExperts":
            body["moe_attributes"] = MOE_ATTRIBUTES
        elif claim != EVERY_MODEL:
            body[INTERFACES[claim].flag] = True
    return type("Made", (Bare,), body | (extra or {}))


MOE_ATTRIBUTES = (
    *("expert_weights", "num_moe_layers", "num_expert_groups", "num_logical_experts", "num_physical_experts"),
    *("num_local_physical_experts", "num_routed_experts", "num_shared_experts", "num_redundant_experts", "moe_layers"),
)


@pytest.fixture
def load(vllm_config):
    def loaded(cls):
        return LoadedModel(cls(vllm_config=vllm_config), inspect_class(cls, subject="plugin"), vllm_config)

    return loaded


def anyone_for(name):
    """An interface that brings the hook."""
    return ((API[name]["needed"] or API[name]["optional"])[0],)


def called(hooks, name, arguments):
    """Call a hook with a mapping of its arguments, `kwargs` standing for the keywords."""
    arguments = dict(arguments)
    return getattr(hooks, name)(**arguments.pop("kwargs", {}), **arguments)


def arguments_of(name, value):
    """`value(argument)` for every argument; for `**kwargs` one keyword."""
    return {
        p.name: {"pixels": value(p.name)} if p.kind is p.VAR_KEYWORD else value(p.name)
        for p in HOOKS[name].signature.parameters.values()
    }


# -- the rows, `of` ----------------------------------------------------------------------------------------


def test_there_is_a_hook_for_every_entry_of_the_checked_in_api_and_no_other(load):
    model = load(make([name for name in INTERFACES if name != "IsAttentionFree"]))
    assert dir(model.hooks) == sorted(API)


@every_hook
def test_signature(name, load):
    hook = getattr(load(make(anyone_for(name))).hooks, name)
    plain = [p.replace(annotation=p.empty) for p in inspect.signature(hook).parameters.values()]
    assert str(inspect.Signature(plain)) == API[name]["signature"]
    assert hook.__name__ == name and hook.__doc__


# -- needed, optional --------------------------------------------------------------------------------------


def standing(load, name, interface):
    """What a claim of `interface` means for the hook: needed, optional, or nothing."""
    claims = () if interface == EVERY_MODEL else (interface,)
    try:
        load(make(claims, without=[name]))
    except ContractError as error:
        assert {problem.where.partition(" ")[0] for problem in error.problems} == {name}
        return "needed"
    return "optional" if name in dir(load(make(claims)).hooks) else "nothing"


@every_hook
def test_which_interfaces_need_it_and_which_allow_it(name, load):
    row = API[name]
    expected = {
        interface: "needed"
        if interface in row["needed"] or EVERY_MODEL in row["needed"]
        else "optional"
        if interface in row["optional"]
        else "nothing"
        for interface in (EVERY_MODEL, *INTERFACES)
    }
    assert {interface: standing(load, name, interface) for interface in expected} == expected


@every_hook
def test_what_every_model_needs_is_no_interfaces_business(name):
    assert EVERY_MODEL not in HOOKS[name].interfaces or HOOKS[name].interfaces == (EVERY_MODEL,)


@every_hook
def test_without_its_interfaces_it_is_not_there_and_the_reason_names_them(name, load):
    row = API[name]
    if EVERY_MODEL in row["needed"]:
        return
    with pytest.raises(HookNotProvided) as raised:
        getattr(load(make()).hooks, name)
    assert f"{name}: Made does not claim {' or '.join(row['needed'] + row['optional'])}" in str(raised.value) or (
        "MixtureOfExperts" in row["needed"] and "the model does not claim MixtureOfExperts" in str(raised.value)
    )


# -- unless ------------------------------------------------------------------------------------------------


@every_hook
def test_a_flag_lifts_a_need_only_where_there_is_one(name):
    assert HOOKS[name].needed or not HOOKS[name].unless
    assert not set(HOOKS[name].needed) & set(HOOKS[name].optional)


@every_hook
@pytest.mark.parametrize("flag", [*MULTIMODAL_FLAGS, "supports_lora"])
def test_which_flag_lifts_the_need(name, flag, load):
    row = API[name]
    if not row["needed"]:
        return
    cls = make(row["needed"], without=[name], extra={flag: True})
    if flag == row["unless"]:
        with pytest.raises(HookNotProvided, match="Made does not implement it"):
            getattr(load(cls).hooks, name)
        assert name in dir(load(make(row["needed"], extra={flag: True})).hooks), "it may still be there"
    else:
        with pytest.raises(ContractError, match=name):
            load(cls)


# -- phase -------------------------------------------------------------------------------------------------


@every_hook
def test_when_it_can_be_called(name, load):
    """A class handle has the class-phase hooks; for the others the reason says in which phase they are called."""
    cls, phase = make(anyone_for(name)), API[name]["phase"]
    report = inspect_class(cls, subject="plugin")
    if "MixtureOfExperts" in API[name]["needed"]:  # which no class handle claims
        hooks = Binding(cls, report, phases=[Phase.CLASS], claimed=["MixtureOfExperts"], facts=Facts()).hooks
    else:
        hooks = ModelClass(cls, report, None).hooks
    assert name in dir(load(cls).hooks)
    assert (name in dir(hooks)) == (phase == "class")
    if phase != "class":
        with pytest.raises(HookNotProvided, match=f"{name}: is a {phase}-phase hook and needs a loaded model"):
            getattr(hooks, name)


@every_hook
def test_a_class_phase_hook_is_asked_of_the_class_and_the_others_are_not(name):
    instance_method = make(anyone_for(name), extra={name: lambda self, *args, **kwargs: None})
    if API[name]["phase"] == "class":
        with pytest.raises(ContractError, match="is an instance method; a class-phase hook is asked before any model"):
            inspect_class(instance_method, subject="plugin")
    else:
        assert name in inspect_class(instance_method, subject="plugin").implementations


# -- returns -----------------------------------------------------------------------------------------------

ROWS = torch.ones(2, 8)
TABLE_OF_POSITIONS = torch.zeros(3, 2, dtype=torch.int64)
RESULTS = {
    "None": None,
    "int": 5,
    "bool": True,
    "float": 2.0,
    "text": "text",
    "empty tuple": (),
    "empty list": [],
    "ascending ints": (1, 2),
    "descending ints": (2, 1),
    "list of ints": [1, 2],
    "shapes": ((3, 4), (4,)),
    "shapes with a zero": ((3, 0),),
    "list of shapes": [(3, 4)],
    "dtypes": (torch.float32, torch.int64),
    "names of dtypes": ("float32",),
    "functions": (print, len),
    "one function": print,
    "module": nn.Identity(),
    "module class": nn.Identity,
    "rows": ROWS,
    "rows in float64": ROWS.double(),
    "rows of ints": ROWS.long(),
    "rows elsewhere": ROWS.to("meta"),
    "one row": ROWS[0],
    "items of rows": ROWS.expand(3, 2, 8),
    "list of rows": [ROWS],
    "tuple of rows": (ROWS, ROWS.double()),
    "list of rows elsewhere": [ROWS.to("meta")],
    "list of one row": [ROWS[0]],
    "list of rows of ints": [ROWS.long()],
    "positions": (TABLE_OF_POSITIONS, -1),
    "positions of two rows": (TABLE_OF_POSITIONS[:2], -1),
    "positions in int32": (TABLE_OF_POSITIONS.int(), -1),
    "positions elsewhere": (TABLE_OF_POSITIONS.to("meta"), -1),
    "positions and a tensor": (TABLE_OF_POSITIONS, torch.tensor(-1)),
    "positions alone": TABLE_OF_POSITIONS,
}
ACCEPTED = {
    "get_mamba_state_shape_from_config": {"shapes"},
    "get_mamba_state_dtype_from_config": {"dtypes"},
    "get_mamba_state_copy_func": {"functions"},
    "get_placeholder_str": {"None", "text"},
    "get_language_model": {"module"},
    "get_num_mm_encoder_tokens": {"int"},
    "get_num_mm_connector_tokens": {"int"},
    "set_eplb_state": {"None"},
    "update_physical_experts_metadata": {"None"},
    "set_aux_hidden_state_layers": {"None"},
    "get_eagle3_aux_hidden_state_layers": {"ascending ints"},
    "get_mrope_input_positions": {"positions"},
    "embed_multimodal": {"empty tuple", "empty list", "items of rows", "list of rows", "tuple of rows"},
    "embed_input_ids": {"rows"},
}


def test_every_hook_has_its_list_of_results():
    assert set(ACCEPTED) == set(API)


@every_hook
def test_which_results_are_accepted_and_what_the_others_are_told(name, load):
    current = []
    hooks = load(make(anyone_for(name), result=lambda _: current[0])).hooks
    arguments = arguments_of(name, lambda argument: torch.zeros(1))
    accepted = set()
    for label, value in RESULTS.items():
        current[:] = [value]
        try:
            assert called(hooks, name, arguments) is value
            accepted.add(label)
        except ContractError as error:
            (problem,) = error.problems
            assert problem.says.startswith(f"expected {API[name]['returns']}; found ")
            assert problem.fix == f"return {API[name]['returns']}"
    assert accepted == ACCEPTED[name]


# -- places ------------------------------------------------------------------------------------------------


@every_hook
def test_where_each_argument_must_be(name, vllm_config):
    """`meta` stands for an accelerator. A CPU tensor is moved, refused as a view, or passed as it is."""
    calls = []
    results = {"embed_input_ids": ROWS.to("meta"), "embed_multimodal": [ROWS.to("meta")]}
    good = {hook: RESULTS[min(labels)] for hook, labels in ACCEPTED.items()} | results
    cls = make(anyone_for(name), result=good.get, calls=calls)
    module = cls(vllm_config=vllm_config)
    report = inspect_class(cls, subject="plugin")
    facts = Facts(torch.device("meta"), torch.float32)
    hooks = Binding(module, report, phases=tuple(Phase), claimed=anyone_for(name), facts=facts).hooks
    there = arguments_of(name, lambda argument: torch.zeros(1, device="meta"))
    found = {}
    for argument in there:
        here = arguments_of(name, lambda argument: torch.zeros(1))[argument]
        calls.clear()
        try:
            called(hooks, name, there | {argument: here})
        except ContractError as error:
            assert f"{argument}: is on cpu; a view is shared for life and must be on meta" in str(error)
            found[argument] = "view"
            continue
        ((_, given),) = calls
        arrived = given[argument]["pixels"] if argument == "kwargs" else given[argument]
        found[argument] = "device" if arrived.is_meta else "as it is"
        others = [value["pixels"] if key == "kwargs" else value for key, value in given.items() if key != argument]
        assert all(value.is_meta for value in others)
    assert found == {argument: API[name]["places"].get(argument, "as it is") for argument in there}


# -- older spellings ---------------------------------------------------------------------------------------

SPELLINGS = sorted({spelling for row in API.values() for spelling in row["older"]})


@every_hook
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_which_older_spellings_are_served_and_which_are_refused_by_name(name, spelling, load):
    row, calls = API[name], []
    older = {spelling: method_for_older(name, spelling, calls)}
    cls = make(anyone_for(name), without=[name], extra=older, result=lambda _: None)
    if spelling not in row["older"]:
        with pytest.raises(ContractError if row["needed"] else HookNotProvided) as raised:
            getattr(load(cls).hooks, name)
        assert spelling not in str(raised.value)
        return
    served = row["older"][spelling]
    if served is None and not row["needed"]:
        with pytest.raises(HookNotProvided, match=rf"{spelling} \(.*is the spelling of another vLLM version"):
            getattr(load(cls).hooks, name)
        return
    if served is None:
        with pytest.raises(ContractError, match=rf"{spelling} \(.*is the spelling of another vLLM version") as raised:
            load(cls)
        assert f"this hook is {name}" in str(raised.value)
        return
    given = {
        argument: {"pixels": torch.ones(1)} if argument == "kwargs" else torch.tensor([index])
        for index, argument in enumerate(HOOKS[name].signature.parameters)
        if re.search(rf"\b{argument}\b", served.partition("(")[2])
    }
    called(load(cls).hooks, name, given)
    (arrived,) = calls
    assert arrived == given, "exactly the arguments of the older call, by their names"


@every_hook
def test_an_older_spelling_is_served_by_a_call_of_it_with_arguments_of_the_hook(name):
    for spelling, served in HOOKS[name].older.items():
        if served is not None:
            call = ast.parse(served, mode="eval").body
            assert call.func.id == spelling
            values = [*call.args, *(keyword.value for keyword in call.keywords)]
            assert {value.id for value in values} <= set(HOOKS[name].signature.parameters)


def method_for_older(name, spelling, calls):
    """The method of an older class, with the arguments of its spelling: notes them, returns what the hook accepts."""
    arguments = re.sub(r"(\w+)=\w+", r"\1", (API[name]["older"].get(spelling) or "(").partition("(")[2].rstrip(")"))
    scope = {"note": calls.append, "result": RESULTS[min(ACCEPTED[name])]}
    first = f"me, {arguments}" if arguments else "me"
    noted = ", ".join(f"{p}={p}" for p in arguments.replace("*", "").split(", ") if p)
    exec(f"def {spelling}({first}):\n    note(dict({noted}))\n    return result", scope)
    return classmethod(scope[spelling]) if API[name]["phase"] == "class" else scope[spelling]
