"""Options of the commands that run a model: which one, where, and how its answers are sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from torchplug.cli.options import device_options, selection_options

if TYPE_CHECKING:
    from torchplug.engine.llm import LLM
    from torchplug.engine.sampling_params import SamplingParams

Function = TypeVar("Function", bound=Callable[..., Any])

_MODEL = click.option(
    "--model",
    "-m",
    default="demo",
    show_default=True,
    metavar="TARGET",
    help="A checkpoint directory, a GGUF file, or demo.",
)
_BLOCK_SIZE = click.option("--block-size", type=int, metavar="N", help="Tokens of a block of the KV cache; default 16.")
_COMPILE = click.option(
    "--compile",
    is_flag=True,
    help="Run the model through torch.compile: up to minutes at the start, steps may be faster. Needs a compiler.",
)
_KV_CACHE_GIB = click.option(
    "--kv-cache-gib", type=float, metavar="GIB", help="Size of the KV cache; default: a share of the free memory."
)
_OPTIONS = (
    click.option("--max-model-len", type=int, metavar="N", help="Longest prompt and answer together, in tokens."),
    click.option(
        "--temperature", "-t", type=float, default=0.0, show_default=True, help="0 takes the most probable token."
    ),
    click.option(
        "--top-p", type=float, default=1.0, show_default=True, help="Sample among the tokens that make up this share."
    ),
    click.option("--top-k", type=int, default=0, show_default=True, help="Sample among this many tokens; 0 is all."),
    click.option(
        "--min-p", type=float, default=0.0, show_default=True, help="Drop tokens below this share of the best one."
    ),
    click.option(
        "--repetition-penalty", type=float, default=1.0, show_default=True, help="Above 1 discourages repetition."
    ),
    click.option("--seed", type=int, help="Makes sampled answers repeatable."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before this text. May be repeated."),
    click.option("--system", metavar="TEXT", help="System message of the conversation."),
)


@dataclass(frozen=True, slots=True)
class Loading:
    """What the user chose about loading: the model, and arguments of `LLM`, checked when they are used."""

    model: str
    arguments: dict[str, Any]

    @property
    def chosen(self) -> dict[str, Any]:
        """The arguments that say something other than the default, for a report."""
        return {name: value for name, value in self.arguments.items() if value}

    def open_llm(self, **more: Any) -> LLM:
        """Load the model; progress, where that is a terminal, and the size of the KV cache on standard error."""
        from torchplug.engine.llm import LLM

        return LLM(self.model, **self.arguments, **more)


def loading_options(function: Function) -> Function:
    """Adds the options of every command that loads a model; the command receives one argument, `loading`."""

    @wraps(function)
    def command(
        *,
        model: str,
        device: str,
        dtype: str,
        compile: bool,
        block_size: int | None,
        kv_cache_gib: float | None,
        plugins: str | None,
        owners: dict[str, str],
        **others: Any,
    ) -> Any:
        arguments = {
            "device": device,
            "dtype": dtype,
            "compile": compile,
            "block_size": block_size,
            "kv_cache_gib": kv_cache_gib,
            "plugins": plugins,
            "owners": owners,
        }
        return function(loading=Loading(model, arguments), **others)

    result = device_options(_COMPILE(_BLOCK_SIZE(_KV_CACHE_GIB(selection_options(command)))))
    return _MODEL(result)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Choices:
    """What the user chose: the model and arguments of `SamplingParams`, checked when they are used."""

    loading: Loading
    sampling: dict[str, Any]
    system: str | None

    def sampling_params(self, **more: Any) -> SamplingParams:
        """Raises RequestError, before any model is loaded."""
        from torchplug.engine.sampling_params import SamplingParams

        return SamplingParams(**self.sampling, **more)


def model_options(*, max_tokens: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds all these options; the command receives one argument, `choices`. `max_tokens` is that option's default."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def command(
            *,
            loading: Loading,
            max_model_len: int | None,
            system: str | None,
            temperature: float,
            top_p: float,
            top_k: int,
            min_p: float,
            repetition_penalty: float,
            seed: int | None,
            stop: tuple[str, ...],
            max_tokens: int,
            **others: Any,
        ) -> Any:
            choices = Choices(
                loading=replace(loading, arguments={**loading.arguments, "max_model_len": max_model_len}),
                sampling={
                    "temperature": temperature,
                    "top_p": top_p,
                    "top_k": top_k,
                    "min_p": min_p,
                    "repetition_penalty": repetition_penalty,
                    "seed": seed,
                    "stop": stop,
                    "max_tokens": max_tokens,
                },
                system=system,
            )
            return function(choices=choices, **others)

        limit = click.option(
            "--max-tokens", "-n", type=int, default=max_tokens, show_default=True, help="Most new tokens of an answer."
        )
        result: Any = command
        for option in reversed((limit, *_OPTIONS)):
            result = option(result)
        return loading_options(result)  # type: ignore[no-any-return]

    return decorate
