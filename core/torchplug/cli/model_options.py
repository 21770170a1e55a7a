"""Options of the commands that run a model: which one, where, and how its answers are sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from torchplug.cli.options import compile_option, device_options, selection_options

if TYPE_CHECKING:
    from torchplug.engine.llm import LLM
    from torchplug.engine.sampling_params import SamplingParams

Function = TypeVar("Function", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--model",
        "-m",
        default="demo",
        show_default=True,
        metavar="TARGET",
        help="A checkpoint directory, a GGUF file, or demo.",
    ),
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
class Choices:
    """What the user chose: arguments of `LLM` and of `SamplingParams`, checked when they are used."""

    model: str
    llm: dict[str, Any]
    sampling: dict[str, Any]
    system: str | None

    def sampling_params(self, **more: Any) -> SamplingParams:
        """Raises RequestError, before any model is loaded."""
        from torchplug.engine.sampling_params import SamplingParams

        return SamplingParams(**self.sampling, **more)

    def open_llm(self, **more: Any) -> LLM:
        """Load the model; progress on standard error where that is a terminal."""
        from torchplug.engine.llm import LLM

        return LLM(self.model, **self.llm, **more)


def model_options(*, max_tokens: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds all these options; the command receives one argument, `choices`. `max_tokens` is that option's default."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        from functools import wraps

        @wraps(function)
        def command(
            *,
            model: str,
            max_model_len: int | None,
            device: str,
            dtype: str,
            compile: bool,
            plugins: str | None,
            owners: dict[str, str],
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
                model=model,
                llm={
                    "max_model_len": max_model_len,
                    "device": device,
                    "dtype": dtype,
                    "compile": compile,
                    "plugins": plugins,
                    "owners": owners,
                },
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
        result = device_options(compile_option(selection_options(command)))
        for option in reversed((_OPTIONS[0], limit, *_OPTIONS[1:])):
            result = option(result)
        return result

    return decorate
