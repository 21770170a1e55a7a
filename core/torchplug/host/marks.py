"""The marks that authors put on their code: `hookimpl` on a hook method."""

from __future__ import annotations

from typing import Final

from pluggy import HookimplMarker, HookspecMarker

PROJECT: Final = "torchplug"

hookspec: Final = HookspecMarker(PROJECT)

hookimpl: Final = HookimplMarker(PROJECT)
"""Marks a method of a model class as a hook, so that a misspelt name is an error instead of a method that nobody calls.

A wrapper plugin marks its generator functions with `hookimpl(wrapper=True)`; nothing else of pluggy's options is
accepted.
"""
