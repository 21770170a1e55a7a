"""`torchplug chat`: a conversation in the terminal, or line by line through a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Final

import click

from torchplug.cli.answer import AnswerWriter
from torchplug.cli.model_options import Choices, model_options
from torchplug.cli.tables import printable
from torchplug.errors import Problem, RequestError

if TYPE_CHECKING:
    from torchplug.engine.llm import LLM
    from torchplug.engine.sampling_params import SamplingParams

_HELP: Final = """\
/system TEXT  set the system message and start anew; without TEXT, remove it
/reset        forget the conversation, keep the system message
/help         these lines
/quit         leave (Ctrl-D too)
Ctrl-C stops an answer; what it has said so far stays part of the conversation."""


@click.command()
@model_options(max_tokens=1024)
@click.pass_context
def chat(context: click.Context, choices: Choices) -> None:
    """Talk to a model; /help lists what can be typed.

    Without a terminal, every line of standard input is a message, and the answers go to standard output.
    """
    params = choices.sampling_params()
    with choices.loading.open_llm() as llm:
        if llm.get_tokenizer().chat_template is None:
            raise RequestError(
                f"model {choices.loading.model!r}",
                Problem(
                    "chat template", "the model has none", "use `torchplug generate --raw` for a model without one"
                ),
            )
        if sys.stdin.isatty():
            click.secho(f"{choices.loading.model} on {llm.model.device}. /help lists commands.", dim=True, err=True)
        conversation = _Conversation(llm, params, choices.system)
        for line in _lines():
            if line == "/quit":
                break
            conversation.take(line)
    if conversation.failed and not sys.stdin.isatty():
        context.exit(1)


class _Conversation:
    """The messages so far, and what a typed line does to them. `failed`: some line had no answer."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self.failed = False
        self._llm = llm
        self._params = params
        self._system = system
        self._messages: list[dict[str, str]] = []

    def take(self, line: str) -> None:
        """One line: a command that starts with a slash, or a message."""
        command, _, rest = line.partition(" ")
        if command == "/help":
            click.echo(_HELP, err=True)
        elif command == "/reset":
            self._messages.clear()
        elif command == "/system":
            self._system = rest.strip() or None
            self._messages.clear()
        elif command.startswith("/"):
            self._complain(f"no such command {command}; /help lists them, a leading space makes it a message")
        elif line.strip():
            self._answer(line.strip())

    def _answer(self, text: str) -> None:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        messages = [*system, *self._messages, {"role": "user", "content": text}]
        tokenizer, writer, said = self._llm.get_tokenizer(), AnswerWriter(), ""
        try:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            with closing(self._llm.stream({"prompt_token_ids": ids}, self._params)) as outputs:
                for output in outputs:
                    (part,) = output.outputs
                    writer.count(len(part.token_ids))
                    writer.write(part.text)
                    said += part.text
        except KeyboardInterrupt:
            writer.end_line()
            click.secho("stopped", dim=True, err=True)
        except RequestError as error:
            # The conversation has outgrown the model, or its template refuses it. The message is not part of it then.
            self._complain(f"{error}\n  /reset starts a new conversation")
        writer.end_line()
        if sys.stdin.isatty():
            writer.print_figures()
        if said:
            self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": said}]

    def _complain(self, text: str) -> None:
        self.failed = True
        click.echo(printable(text), err=True)


def _lines() -> Iterator[str]:
    """Lines as they are typed, until Ctrl-D; Ctrl-C gives a new line."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.rstrip("\r\n")
        return
    with suppress(ImportError):  # not on every platform
        import readline  # noqa: F401  (its import gives input() history and editing)
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            click.echo(err=True)
        except EOFError:
            click.echo(err=True)
            return
