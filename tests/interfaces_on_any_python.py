"""Checks of torchplug.interfaces that need neither torch nor pytest: run as a script by every Python at hand.

`test_interfaces.py` starts it. Module stands in for torch.nn.Module: submodules are reached through `__getattr__` only,
and assigning one before `__init__` ran is an error.
"""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Protocol, runtime_checkable

from torchplug import interfaces as i
from torchplug.interfaces import definitions


class Module:
    def __init__(self) -> None:
        self.__dict__["_modules"] = {}

    def __setattr__(self, name, value):
        if isinstance(value, Module):
            if "_modules" not in self.__dict__:
                raise AttributeError("cannot assign module before Module.__init__() call")
            self._modules[name] = value
        else:
            object.__setattr__(self, name, value)

    def __getattr__(self, name):
        modules = self.__dict__.get("_modules", {})
        if name in modules:
            return modules[name]
        raise AttributeError(name)

    def named_children(self):
        return iter(self._modules.items())


class ModuleList(Module):
    def __init__(self, *items):
        super().__init__()
        self.items = items

    def __iter__(self):
        return iter(self.items)


GUARDS = {
    "HasInnerState": i.has_inner_state,
    "HasNoOps": i.has_noops,
    "IsAttentionFree": i.is_attention_free,
    "IsHybrid": i.is_hybrid,
    "SupportsCrossEncoding": i.supports_cross_encoding,
    "SupportsEagle": i.supports_eagle,
    "SupportsEagle3": i.supports_eagle3,
    "SupportsLoRA": i.supports_lora,
    "SupportsMRoPE": i.supports_mrope,
    "SupportsMambaPrefixCaching": i.supports_mamba_prefix_caching,
    "SupportsMultiModal": i.supports_multimodal,
}
FLAGS = {
    "HasInnerState": "has_inner_state",
    "HasNoOps": "has_noops",
    "IsAttentionFree": "is_attention_free",
    "IsHybrid": "is_hybrid",
    "SupportsCrossEncoding": "supports_cross_encoding",
    "SupportsEagle": "supports_eagle",
    "SupportsEagle3": "supports_eagle3",
    "SupportsLoRA": "supports_lora",
    "SupportsMRoPE": "supports_mrope",
    "SupportsMambaPrefixCaching": "supports_mamba_prefix_caching",
    "SupportsMultiModal": "supports_multimodal",
}


def no_heavy_import():
    heavy = {"torch", "numpy", "transformers", "rich", "jinja2", "tokenizers"} & set(sys.modules)
    assert not heavy, heavy


def table_and_guards_name_the_same_interfaces():
    assert set(i.INTERFACES) == {*GUARDS, "MixtureOfExperts"}
    for name, row in i.INTERFACES.items():
        assert row.name == name == row.protocol.__name__
        assert row.flag == FLAGS.get(name)


def each_flag_claims_on_class_and_instance_in_either_order_of_bases():
    for name, guard in GUARDS.items():
        protocol = i.INTERFACES[name].protocol
        first = type("First", (protocol, Module), {})
        last = type("Last", (Module, protocol), {})
        duck = type("Duck", (Module,), {FLAGS[name]: True})
        below = type("Below", (duck,), {})
        off = type("Off", (first,), {FLAGS[name]: False})
        plain = type("Plain", (Module,), {})
        for cls in (first, last, duck, below):
            assert guard(cls) is True, (name, cls)
            assert guard(cls()) is True, (name, cls)
            assert i.interfaces_of(cls) == i.interfaces_of(cls()) == {name}
            assert i.flag_problem(cls, FLAGS[name]) is None
            assert i.flag_problem(cls(), FLAGS[name]) is None
        for cls in (off, plain):
            assert guard(cls) is False, (name, cls)
            assert guard(cls()) is False, (name, cls)
            assert i.interfaces_of(cls) == frozenset()
            assert i.flag_problem(cls, FLAGS[name]) is None
        for other, other_guard in GUARDS.items():
            assert other_guard(duck) is (other == name)


def only_the_literal_true_in_the_class_claims():
    for value in (1, 1.0, "yes", "True", [True], None, property(lambda self: True), lambda self: True):
        cls = type("Odd", (Module,), {"supports_lora": value})
        assert i.supports_lora(cls) is False, value
        assert i.supports_lora(cls()) is False, value
        says = i.flag_problem(cls, "supports_lora")
        assert says and "supports_lora" in says and "Odd" in says, (value, says)
        assert i.flag_problem(cls(), "supports_lora") == says

    class Late(Module):
        def __init__(self):
            super().__init__()
            self.supports_lora = True

    assert i.supports_lora(Late()) is False
    assert i.flag_problem(Late, "supports_lora") is None
    assert "instance" in i.flag_problem(Late(), "supports_lora")

    class Meta(type):
        supports_lora = True

    assert i.supports_lora(Meta("OfMeta", (Module,), {})) is False

    class Forwards(Module):
        def __getattr__(self, name):
            return True

    assert i.supports_lora(Forwards()) is False


def any_eagle_is_one_of_two():
    assert i.supports_any_eagle(type("A", (i.SupportsEagle, Module), {}))
    assert i.supports_any_eagle(type("B", (i.SupportsEagle3, Module), {})())
    assert not i.supports_any_eagle(type("C", (i.SupportsEagleBase, Module), {}))
    assert not i.supports_any_eagle(type("D", (i.SupportsEagle, Module), {"supports_eagle": False}))


def multimodal_flags_have_guards():
    table = {
        "supports_multimodal_raw_input_only": i.supports_multimodal_raw_input_only,
        "supports_encoder_tp_data": i.supports_multimodal_encoder_tp_data,
        "requires_raw_input_tokens": i.requires_raw_input_tokens,
    }
    assert set(table) == set(i.MULTIMODAL_FLAGS)
    for flag, guard in table.items():
        plain = type("Plain", (i.SupportsMultiModal, Module), {})
        claims = type("Claims", (plain,), {flag: True})
        assert not guard(plain) and not guard(plain())
        assert guard(claims) and guard(claims())
        assert not guard(type("One", (plain,), {flag: 1}))
        assert sum(other(claims) for other in table.values()) == 1


class Experts(Module):
    def __init__(self):
        super().__init__()
        self.seen = []

    def get_expert_weights(self):
        return [self]

    def set_eplb_state(self, **kwargs):
        self.seen.append(kwargs)


class Mixture(i.MixtureOfExperts, Module):
    def __init__(self, layers=2, leave_out=()):
        super().__init__()
        numbers = dict.fromkeys(i.MOE_ATTRIBUTES, 4) | {"num_moe_layers": layers, "expert_weights": []}
        del numbers["moe_layers"]
        for name, value in numbers.items():
            if name not in leave_out:
                setattr(self, name, value)
        if "moe_layers" not in leave_out:
            self.moe_layers = ModuleList(*(Experts() for _ in range(layers)))


def experts_are_claimed_by_what_an_instance_has():
    model = Mixture()
    assert "moe_layers" not in vars(model), "the point is that __getattr__ forwards it"
    assert i.is_mixture_of_experts(model) is True
    assert i.interfaces_of(model) == {"MixtureOfExperts"}
    assert i.is_mixture_of_experts(Mixture) is False
    assert i.interfaces_of(Mixture) == frozenset()
    assert i.is_mixture_of_experts(Mixture(layers=0)) is False
    for name in i.MOE_ATTRIBUTES:
        lacking = Mixture(leave_out=(name,))
        assert i.missing_moe_attributes(lacking) == (name,)
        assert i.is_mixture_of_experts(lacking) is False

    class Duck(Module):
        def __init__(self):
            super().__init__()
            vars(self).update(vars(Mixture()))

    assert i.is_mixture_of_experts(Duck()) is True
    assert i.may_be_mixture_of_experts(Mixture) and not i.may_be_mixture_of_experts(Duck)
    assert len(set(i.MOE_ATTRIBUTES)) == 10


def eplb_state_reaches_every_layer_and_does_not_double():
    model = Mixture()
    view, places, counts = object(), object(), object()
    for _ in range(2):
        model.set_eplb_state(view, places, counts)
    assert model.expert_weights == [[layer] for layer in model.moe_layers]
    for index, layer in enumerate(model.moe_layers):
        assert layer.seen[-1] == {
            "moe_layer_idx": index,
            "expert_load_view": view,
            "logical_to_physical_map": places,
            "logical_replica_count": counts,
        }


def constructors_reach_the_module_through_any_protocol():
    @runtime_checkable
    class Foreign(Protocol):
        z: int

    class Derived(i.SupportsLoRA, Protocol): ...

    protocols = [row.protocol for row in i.INTERFACES.values()]
    protocols += [i.VllmModel, i.MambaStateDtype, i.SupportsEagleBase, Derived]
    for protocol in protocols:
        for bases in ((protocol, Module), (Module, protocol), (protocol, Foreign, Module)):

            class Model(*bases):
                def __init__(self, *, prefix=""):
                    super().__init__()
                    self.layer = Module()

            assert isinstance(Model(prefix="x").layer, Module), bases

            class Explicit(*bases):
                def __init__(self):
                    Module.__init__(self)
                    self.layer = Module()

            assert isinstance(Explicit().layer, Module), bases

            class Below(Model):
                def __init__(self):
                    super().__init__(prefix="y")

            assert isinstance(Below().layer, Module), bases
            assert type("Silent", bases, {})()._modules == {}, bases
        try:
            protocol()
        except TypeError as error:
            assert protocol.__name__ in str(error), error
        else:
            raise AssertionError(f"{protocol} can be instantiated")


def mutable_defaults_belong_to_each_class():
    for protocol, name in (
        (i.SupportsLoRA, "embedding_modules"),
        (i.SupportsLoRA, "packed_modules_mapping"),
        (i.SupportsMultiModal, "_language_model_names"),
        (i.SupportsMultiModal, "_tower_model_names"),
    ):
        default = getattr(protocol, name)
        kind = type(default)

        def put(cls, name=name, kind=kind):
            value = getattr(cls, name)
            value.update(a=["b"]) if kind is dict else value.append("a")

        one = type("One", (protocol, Module), {})
        two = type("Two", (Module, protocol), {})
        child = type("Child", (one,), {})
        late_mixin = type("Mixin", (), {name: {"q": ["r"]} if kind is dict else ["q"]})
        mixed = type("Mixed", (late_mixin, protocol, Module), {})
        own_value = kind()
        own = type("Own", (protocol, Module), {name: own_value})
        assert getattr(own, name) is own_value
        assert getattr(mixed, name) == getattr(late_mixin, name)
        for cls in (one, child, two, mixed):
            before = {c: repr(getattr(c, name)) for c in (protocol, one, child, two, mixed, late_mixin, own)}
            put(cls)
            after = {c: repr(getattr(c, name)) for c in before}
            assert [c for c in before if before[c] != after[c]] == [cls], (name, cls)
    nested = type("Nested", (i.SupportsLoRA, Module), {"packed_modules_mapping": {"qkv": ["q"]}})
    below = type("Below", (nested,), {})
    below.packed_modules_mapping["qkv"].append("k")
    assert nested.packed_modules_mapping == {"qkv": ["q"]}


@runtime_checkable
class Theirs(Protocol):
    def only_text(self, x):
        """Does nothing."""

    def dots(self, x): ...
    def text_and_dots(self, x):
        """Does nothing."""
        ...

    def passes(self, x):
        pass

    def several(self, x):
        """Does nothing."""
        ...
        return

    def returns(self, x):
        return

    def returns_none(self, x):
        """Does nothing."""
        return None

    def raises(self, x):
        raise NotImplementedError

    def raises_call(self, x):
        """Does nothing."""
        raise NotImplementedError()

    def raises_text(self, x):
        """Does nothing."""
        raise NotImplementedError("implement me")

    @classmethod
    def of_class(cls, x): ...
    @staticmethod
    def of_nobody(x): ...


@runtime_checkable
class Bodies(Protocol):
    def zero(self):
        return 0

    def false(self):
        return False

    def text(self):
        return "text"

    def other_error(self):
        raise ValueError("text")

    def effect(self):
        self.done = True

    def call(self):
        print()

    def argument(self, x):
        return x

    def condition(self, x):
        if x:
            raise NotImplementedError
        return None

    def loop(self):
        for _ in ():
            pass

    def generator(self):
        yield

    def closure(self):
        return super().__repr__()

    @classmethod
    def of_class(cls):
        return cls


def stubs_are_told_from_bodies():
    class Claims(Theirs, Module): ...

    class Empty(Module):
        def dots(self, x): ...

    class Overrides(Theirs, Module):
        def dots(self, x):
            """Truly nothing to do, says the author."""

    names = [name for name in vars(Theirs) if not name.startswith("_")]
    assert len(names) == 12
    for name in names:
        owner, function = i.find_method(Claims, name)
        assert owner is Theirs, name
        assert i.is_stub(function, owner) and i.is_stub(function, Claims), name
        assert i.is_stub(getattr(Claims, name), Claims), name
    for name in (name for name in vars(Bodies) if not name.startswith("_")):
        owner, function = i.find_method(Bodies, name)
        assert not i.is_stub(function, owner), name
    assert not i.is_stub(Empty.dots, Empty)
    assert not i.is_stub(Overrides.dots, Overrides)
    assert not i.is_stub(print, Theirs)


def stubs_of_the_interfaces_are_known_and_default_bodies_are_not():
    stubs = {
        (owner.__name__, name)
        for owner in [row.protocol for row in i.INTERFACES.values()] + [i.VllmModel, i.MambaStateDtype]
        for name in vars(owner)
        if not name.startswith("__") and (found := i.find_method(owner, name)) and i.is_stub(found[1], found[0])
    }
    assert stubs == {
        ("IsHybrid", "get_mamba_state_shape_from_config"),
        ("IsHybrid", "get_mamba_state_copy_func"),
        ("MambaStateDtype", "get_mamba_state_dtype_from_config"),
        ("MixtureOfExperts", "update_physical_experts_metadata"),
        ("SupportsEagle3", "set_aux_hidden_state_layers"),
        ("SupportsEagle3", "get_eagle3_aux_hidden_state_layers"),
        ("SupportsMRoPE", "get_mrope_input_positions"),
        ("SupportsMultiModal", "get_placeholder_str"),
        ("SupportsMultiModal", "embed_multimodal"),
        ("SupportsMultiModal", "get_num_mm_encoder_tokens"),
        ("SupportsMultiModal", "get_num_mm_connector_tokens"),
        ("VllmModel", "embed_input_ids"),
        ("VllmModel", "forward"),
        ("VllmModel", "compute_logits"),
    }


def find_method_looks_where_python_looks():
    class Base(Module):
        def hook(self): ...
        @classmethod
        def of_class(cls): ...
        @staticmethod
        def of_nobody(): ...

    class Switched(Base):
        hook = None

    assert i.find_method(Base, "hook") == (Base, vars(Base)["hook"])
    assert i.find_method(Switched, "hook") is None
    assert i.find_method(Base, "absent") is None
    assert i.find_method(Switched, "of_class") == (Base, vars(Base)["of_class"].__func__)
    assert i.find_method(Switched, "of_nobody") == (Base, vars(Base)["of_nobody"].__func__)


class Language(Module):
    def embed_input_ids(self, input_ids):
        return input_ids


def language_model_is_the_marked_one_else_the_first_that_embeds():
    class Wrapper(i.SupportsMultiModal, Module):
        def __init__(self):
            super().__init__()
            self.tower = Module()
            self.first = Language()
            self.second = Language()
            self.box = Module()
            self.box.inner = Language()

    model = Wrapper()
    assert model.get_language_model() is model.first
    for names, expected in (
        (["second"], "second"),
        (["second.layers", "second.head"], "second"),
        (["tower"], "first"),
        (["absent"], "first"),
        (["first", "second"], "first"),
    ):
        model = Wrapper()
        model._language_model_names = names
        assert model.get_language_model() is getattr(model, expected), names
    model = Wrapper()
    model._language_model_names = ["box.inner"]
    assert model.get_language_model() is model.box.inner
    model = Wrapper()
    vars(model)["me"] = model
    model._language_model_names = ["me"]
    assert model.get_language_model() is model.first, "a model that embeds through itself never ends"
    model = Wrapper()
    assert model.get_language_model() is model.first
    model.first = Language()
    assert model.get_language_model() is model.first, "a child that was replaced after the first call"
    bare = type("Bare", (i.SupportsMultiModal, Module), {})()
    try:
        bare.get_language_model()
    except NotImplementedError as error:
        assert "Bare" in str(error) and "fix:" in str(error)
    else:
        raise AssertionError("no error")


def language_model_cache_keeps_no_model_alive():
    class Wrapper(i.SupportsMultiModal, Module):
        def __init__(self):
            super().__init__()
            self.language_model = Language()

    gc.collect()
    before = len(definitions._language_model_paths)
    model = Wrapper()
    model.language_model.parent = weakref.ref(model)
    model.get_language_model()
    assert len(definitions._language_model_paths) == before + 1
    seen = [weakref.ref(model), weakref.ref(model.language_model)]
    del model
    gc.collect()
    assert [ref() for ref in seen] == [None, None]
    assert len(definitions._language_model_paths) == before


CHECKS = [
    check
    for check in list(globals().values())
    if callable(check) and getattr(check, "__module__", "") == __name__ and not isinstance(check, type)
]

if __name__ == "__main__":
    for check in CHECKS:
        check()
    print(f"{len(CHECKS)} checks passed on Python {sys.version_info.major}.{sys.version_info.minor}")
