"""Every hook of torchplug's table, called through the installed tour: right and wrong, direct and wrapped.

    python hook_trials.py [DEVICE ...]     prints one JSON document: where the code came from, what each trial found

The trials are made from the cases and from the table: called directly and under two wrappers, on a loaded model and,
for class-phase hooks, on the class; with every result that the author or a wrapper could get wrong; and with each
tensor argument in a wrong place. Nothing but torchplug, torch and the tour is needed to run them.
"""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from hook_cases import ARCHITECTURE, CASES, Arguments, Tour, write_checkpoint
from torchplug import ContractError, HookNotProvided, Host, hookimpl, observer
from torchplug.hookspecs import HOOKS, Phase, Place
from torchplug_tour import TourForCausalLM


@dataclass(frozen=True)
class Trial:
    """One thing to try; `run()` raises AssertionError where something else happens than must."""

    hook: str
    kind: str
    run: Callable[[], None]


def trials(name: str, directory: Path, device: str) -> Iterator[Trial]:
    """Everything that is tried of one hook on one device."""
    hook, case = HOOKS[name], CASES[name]
    handles = ["model", "class"] if hook.phase is Phase.CLASS else ["model"]
    for handle in handles:
        for wrapped in (False, True):
            face = f"{'wrapped' if wrapped else 'direct'}, {handle}"
            yield Trial(name, f"right, {face}", lambda h=handle, w=wrapped: try_right(name, directory, device, h, w))
            for fault in case.wrong(torch.device(device)):
                yield Trial(
                    name,
                    f"author returns wrong {fault}, {face}",
                    lambda h=handle, w=wrapped, f=fault: try_wrong_author(name, directory, device, h, w, f),
                )
        for fault in case.wrong(torch.device(device)):
            yield Trial(
                name,
                f"wrapper returns wrong {fault}, {handle}",
                lambda h=handle, f=fault: try_wrong_wrapper(name, directory, device, h, f),
            )
    for argument, place in hook.places.items():
        for wrapped in (False, True):
            yield Trial(
                name,
                f"{argument} in a wrong place, {'wrapped' if wrapped else 'direct'}",
                lambda a=argument, w=wrapped: try_wrong_place(name, directory, device, a, w),
            )
            if device != "cpu":
                yield Trial(
                    name,
                    f"{argument} on the CPU, {'wrapped' if wrapped else 'direct'}",
                    lambda a=argument, p=place, w=wrapped: try_cpu(name, directory, device, a, p, w),
                )
    if hook.phase is not Phase.CLASS:
        yield Trial(name, "needs a loaded model", lambda: try_class_handle(name))


def try_right(name: str, directory: Path, device: str, handle: str, wrapped: bool) -> None:
    tour = Tour(directory, device)
    arguments = CASES[name].arguments(tour)
    given = given_arguments(name, arguments)
    for (one, first), (other, second) in combinations(given.items(), 2):
        assert not alike(first, second), f"{one} and {other} are alike: a swap would not show"
    target = tour.model if handle == "model" else tour.host.model_class(ARCHITECTURE)
    owner = tour.module if handle == "model" else TourForCausalLM
    assert name in dir(target.hooks)
    with under_wrappers(target, name, owner, given) if wrapped else ExitStack():
        result = getattr(target.hooks, name)(*arguments[0], **arguments[1])
        CASES[name].check(tour, arguments, result)


def try_wrong_author(name: str, directory: Path, device: str, handle: str, wrapped: bool, fault: str) -> None:
    with wrong_method(name) as returned:
        tour = Tour(directory, device)
        arguments = CASES[name].arguments(tour)
        returned.append(CASES[name].wrong(tour.device)[fault])
        target = tour.model if handle == "model" else tour.host.model_class(ARCHITECTURE)
        with target.attached(observer()) if wrapped else ExitStack():
            refused(
                lambda: getattr(target.hooks, name)(*arguments[0], **arguments[1]),
                f"plugin '{ARCHITECTURE}' (torchplug-tour==0.1.0, torchplug_tour:TourForCausalLM)",
                f"{name} (",
                HOOKS[name].returns.says,
                *what_was_found(returned[0]),
            )


def try_wrong_wrapper(name: str, directory: Path, device: str, handle: str, fault: str) -> None:
    tour = Tour(directory, device)
    arguments = CASES[name].arguments(tour)
    target = tour.model if handle == "model" else tour.host.model_class(ARCHITECTURE)
    wrong = CASES[name].wrong(tour.device)[fault]

    class Spoiler:
        pass

    def spoil(self: Any) -> Any:
        yield
        return wrong

    spoil.__name__ = name
    setattr(Spoiler, name, hookimpl(wrapper=True)(spoil))
    fix = "end with `return result`" if wrong is None else HOOKS[name].returns.says
    with target.attached(observer()), target.attached(Spoiler()):
        call = lambda: getattr(target.hooks, name)(*arguments[0], **arguments[1])  # noqa: E731
        refused(call, "wrapper plugin 'Spoiler'", f"{name} (", fix, *what_was_found(wrong))
    CASES[name].check(tour, arguments, getattr(target.hooks, name)(*arguments[0], **arguments[1]))


def try_wrong_place(name: str, directory: Path, device: str, argument: str, wrapped: bool) -> None:
    """`meta` is another device than the model's on every machine."""
    tour = Tour(directory, device)
    arguments = replaced(CASES[name].arguments(tour), name, argument, lambda tensor: tensor.to("meta"))
    with tour.model.attached(observer()) if wrapped else ExitStack():
        refused(
            lambda: getattr(tour.model.hooks, name)(*arguments[0], **arguments[1]),
            f"call of {name} on plugin '{ARCHITECTURE}' (torchplug-tour==0.1.0",
            argument,
            "is on meta",
            str(tour.device),
        )


def try_cpu(name: str, directory: Path, device: str, argument: str, place: Place, wrapped: bool) -> None:
    """On an accelerator: a CPU tensor is moved, and a view is refused."""
    tour = Tour(directory, device)
    arguments = replaced(CASES[name].arguments(tour), name, argument, lambda tensor: tensor.cpu())
    call = getattr(tour.model.hooks, name)
    with tour.model.attached(observer()) if wrapped else ExitStack():
        call = getattr(tour.model.hooks, name)
        if place is Place.VIEW:
            refused(lambda: call(*arguments[0], **arguments[1]), argument, "is on cpu; a view", str(tour.device))
        else:
            CASES[name].check(tour, arguments, call(*arguments[0], **arguments[1]))


def try_class_handle(name: str) -> None:
    hooks = Host().model_class(ARCHITECTURE).hooks
    assert name not in dir(hooks)
    try:
        getattr(hooks, name)
    except HookNotProvided as error:
        experts = "MixtureOfExperts" in HOOKS[name].interfaces  # which only a loaded model can claim
        assert f"{name}: " in str(error), error
        assert ("MixtureOfExperts" if experts else "needs a loaded model: host.load(...)") in str(error), error
    else:
        raise AssertionError("a class without weights has it")


# -- tools -----------------------------------------------------------------------------------------------


def given_arguments(name: str, arguments: Arguments) -> dict[str, Any]:
    """Every argument of the hook by its name in a wrapper. It is an error to leave one out."""
    signature = HOOKS[name].signature
    given = signature.bind(*arguments[0], **arguments[1]).arguments
    assert set(given) == set(signature.parameters), f"the case of {name} leaves out an argument"
    return dict(zip(HOOKS[name].arguments, given.values(), strict=True))


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and bool((one == other).all())
    return type(one) is type(other) and not isinstance(one, torch.Tensor) and repr(one) == repr(other)


def identical(found: Any, given: Any) -> bool:
    """The same objects; containers may be others, as long as what they hold is the same."""
    if type(given) in (list, tuple):
        return len(found) == len(given) and all(map(identical, found, given))
    if type(given) is dict:
        return found.keys() == given.keys() and all(identical(found[key], given[key]) for key in given)
    return found is given


@contextmanager
def under_wrappers(target: Any, name: str, owner: Any, given: dict[str, Any]) -> Iterator[None]:
    """An observer inside, a plugin with all arguments outside; both must see what was given, once for each call."""
    seen: list[tuple[str, Any]] = []

    class Outer:
        pass

    function = (
        "def {0}(self, model{1}):\n    enter(model, dict({2}))\n    result = yield\n    leave()\n    return result"
    )
    scope: dict[str, Any] = {
        "enter": lambda model, arguments: seen.append(("outer", (model, arguments))),
        "leave": lambda: seen.append(("outer after", None)),
    }
    names = list(given)
    exec(function.format(name, "".join(f", {n}" for n in names), ", ".join(f"{n}={n}" for n in names)), scope)
    setattr(Outer, name, hookimpl(wrapper=True)(scope[name]))
    inner = observer(
        before=lambda hook, model, arguments: seen.append(("inner", (model, dict(arguments)))),
        after=lambda hook, model, arguments, result: seen.append(("inner after", None)),
    )
    with target.attached(inner), target.attached(Outer()):
        yield
    assert [what for what, _ in seen[:4]] == ["outer", "inner", "inner after", "outer after"], "the last is outermost"
    for _, (model, arguments) in (seen[0], seen[1]):
        assert model is owner and list(arguments) == names
        for argument, value in given.items():
            assert identical(arguments[argument], value), f"{argument} arrived as {arguments[argument]!r}"


@contextmanager
def wrong_method(name: str) -> Iterator[list[Any]]:
    """The author's method returns the first item of the list."""
    returned: list[Any] = []
    own = vars(TourForCausalLM).get(name)

    def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return returned[0]

    setattr(TourForCausalLM, name, classmethod(method) if HOOKS[name].phase is Phase.CLASS else method)
    try:
        yield returned
    finally:
        if own is None:
            delattr(TourForCausalLM, name)
        else:
            setattr(TourForCausalLM, name, own)


def refused(call: Callable[[], Any], *texts: str) -> None:
    """A ContractError that says all of `texts`."""
    try:
        result = call()
    except ContractError as error:
        for text in texts:
            assert text in str(error), f"{text!r} is not in: {error}"
    else:
        raise AssertionError(f"accepted {result!r}")


def what_was_found(value: Any) -> list[str]:
    """Words that an error about this result must have."""
    if isinstance(value, (tuple, list)):
        wrong = [item for item in value if isinstance(item, torch.Tensor)]
        return what_was_found(wrong[-1]) if wrong and isinstance(value[-1], torch.Tensor) else []
    if isinstance(value, torch.Tensor):
        return [f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"]
    return ["None"] if value is None else [type(value).__name__]


def replaced(arguments: Arguments, name: str, argument: str, change: Callable[[Any], Any]) -> Arguments:
    """The same call with every tensor in one argument changed."""
    bound = HOOKS[name].signature.bind(*arguments[0], **arguments[1])
    bound.arguments[argument] = mapped(bound.arguments[argument], change)
    return bound.args, bound.kwargs


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list):
        return [mapped(item, change) for item in value]
    return {key: mapped(item, change) for key, item in value.items()}


def devices() -> list[str]:
    """The CPU, and the accelerator of this machine if it has one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu", *([] if accelerator is None else [accelerator.type])]


def outcome(trial: Trial) -> str | None:
    """None where everything happened as it must, else what did not."""
    try:
        trial.run()
    except Exception:
        return traceback.format_exc()
    return None


def main(wanted: list[str]) -> None:
    wanted = wanted or devices()
    with tempfile.TemporaryDirectory() as folder:
        directory = write_checkpoint(Path(folder))
        results = [
            {"hook": trial.hook, "device": device, "kind": trial.kind, "failed": outcome(trial)}
            for device in wanted
            for name in CASES
            for trial in trials(name, directory, device)
        ]
    plugin = Host().architectures[ARCHITECTURE]
    report = {
        "files": [inspect.getfile(Host), inspect.getfile(TourForCausalLM)],
        "plugin": [plugin.distribution, plugin.version],
        "devices": wanted,
        "hooks": list(HOOKS),
        "results": results,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
