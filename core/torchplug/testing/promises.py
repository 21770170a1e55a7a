"""Checks of what a class says about itself, before anything of it runs: registration, claims, signatures, stubs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from torch import nn

from torchplug import interfaces
from torchplug.errors import ContractError, PluginError, Problem
from torchplug.hookspecs import HOOKS, TABLE
from torchplug.host.contracts import inspect_instance
from torchplug.testing.findings import Advice, Finding
from torchplug.testing.specimen import Skip, Specimen

_FLAGS: Final = {row.flag for row in interfaces.INTERFACES.values() if row.flag} | set(interfaces.MULTIMODAL_FLAGS)


def registration(specimen: Specimen) -> Iterator[Finding]:
    """One owner, in the group of models, whose entry point loads a class."""
    if isinstance(specimen.target, type):
        raise Skip("given as a class, not by its architecture")
    try:
        plugin = specimen.plugin
    except PluginError as error:
        yield from error.problems
        return
    if plugin is not None and plugin.problem:
        fix = f"{plugin.architecture} = {plugin.form}"
        yield Problem(f"entry point of {plugin.origin}", plugin.problem, f"write it as {fix}")
    try:
        _ = specimen.cls
    except PluginError as error:
        yield from error.problems
        return
    if plugin is None:
        raise Skip("given as package.module:Class, not by its architecture")


def claims(specimen: Specimen) -> Iterator[Finding]:
    """Flags are literals of the class, and every method and attribute that a claim needs is there."""
    yield from _of_kind(specimen, "claims")
    if specimen.class_problems:
        return
    for warning in specimen.report.warnings:
        yield Advice(warning)
    try:
        module = specimen.build()
    except Exception:
        return  # no config, or a constructor that raises: weights_round_trip says so
    try:
        inspect_instance(module, specimen.report)
    except ContractError as error:
        yield from error.problems


def signatures(specimen: Specimen) -> Iterator[Finding]:
    """The constructor and every method take the arguments that the host and the hooks pass."""
    yield from _of_kind(specimen, "signatures")


def stubs(specimen: Specimen) -> Iterator[Finding]:
    """No method that a claim needs is an interface's empty one."""
    yield from _of_kind(specimen, "stubs")


def _of_kind(specimen: Specimen, kind: str) -> Iterator[Problem]:
    for problem in specimen.class_problems:
        if _kind(specimen.cls, problem.where.partition(" ")[0]) == kind:
            yield problem


def _kind(cls: type, name: str) -> str:
    """Which of the three checks a problem of the class belongs to, by the attribute that it is about."""
    if name in _FLAGS or name in interfaces.INTERFACES:
        return "claims"
    if any(name in hook.older and hook.older[name] is None for hook in TABLE):
        return "claims"  # a spelling that is refused is a method that is not there
    found = interfaces.find_method(cls, name)
    if found is None or found[0] is nn.Module:
        # Hooks and the methods of every model can be absent; what else has no method is the class itself.
        return "claims" if name in HOOKS or name in ("forward", "compute_logits", "load_weights") else "signatures"
    return "stubs" if interfaces.is_stub(found[1], found[0]) else "signatures"
