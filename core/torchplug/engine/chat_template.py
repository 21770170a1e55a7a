"""Chat templates: a conversation to the text that a model was trained on, by the checkpoint's own Jinja template.

A template comes with a checkpoint, so it is untrusted: it runs in jinja2's immutable sandbox, and how much work it may
do is bounded by the size of the conversation (`template_budget`). The environment (trimmed
blocks, loop controls, `raise_exception`, `strftime_now`, `tojson` that keeps Unicode, `{% generation %}` blocks) is
what templates are written for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from torchplug.errors import Problem, RequestError

if TYPE_CHECKING:
    from jinja2 import Template

Message = Mapping[str, Any]
"""One message: {"role": "user", "content": "..."}; other keys reach the template as they are."""


def render_chat_template(template: str, messages: Sequence[Message], /, **variables: Any) -> str:
    """The conversation as text.

    Args:
        template: Jinja source.
        messages: Oldest first. A content given as a list of {"type": "text", "text": ...} parts is joined with line
            breaks.
        **variables: add_generation_prompt, tools, bos_token, ... as the template reads them.

    Raises:
        RequestError: The messages are malformed, or the template does not compile, refuses them, fails, or does not
            come to an end within its budget.
    """
    conversation = _checked(messages)
    if not isinstance(template, str):
        says = f"expected Jinja source, got {type(template).__name__}"
        raise RequestError("chat template", Problem("", says, "pass a text"))
    from jinja2 import TemplateSyntaxError

    from torchplug.engine.template_budget import BudgetSpent, budget

    given = {"tools": None, "documents": None, **variables, "messages": conversation}
    try:
        compiled = _compile(template)
    except TemplateSyntaxError as error:
        raise RequestError(
            "chat template",
            Problem(f"line {error.lineno}", f"is not valid Jinja: {error.message}", "correct the template"),
        ) from error
    except Exception as error:  # nested too deeply for a parser, Jinja's or Python's
        raise RequestError(
            "chat template",
            Problem("", f"cannot be compiled: {type(error).__name__}: {error}", "pass another chat_template"),
        ) from error
    try:
        with budget(given):
            return compiled.render(given)
    except BudgetSpent as error:
        raise RequestError(
            "chat template",
            Problem(
                "",
                "the template loops or grows without end: it wants far more than a conversation of this size needs",
                "pass another chat_template; a checkpoint with this one is not to be trusted",
            ),
        ) from error
    except _Refused as error:
        raise RequestError(
            "chat template",
            Problem("", f"the template refuses this conversation: {error}", "change the messages accordingly"),
        ) from error
    except Exception as error:
        raise RequestError(
            "chat template",
            Problem(
                "",
                f"the template failed: {type(error).__name__}: {error}",
                "check that the messages have the roles and keys that it reads, or pass another chat_template",
            ),
        ) from error


class _Refused(Exception):
    """A template called `raise_exception`."""


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(
            "chat",
            Problem(
                "messages",
                f"expected a list of messages, got {type(messages).__name__}",
                'pass [{"role": "user", "content": "..."}]',
            ),
        )
    problems: list[Problem] = []
    checked: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            problems.append(
                Problem(where, f"expected a dict with a 'role', got {message!r}", 'write {"role": "user", ...}')
            )
            continue
        content = message.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str):
            texts = [_text_of(part) for part in content]
            if None in texts:
                problems.append(
                    Problem(
                        where,
                        "has a content part that is not text",
                        'this version serves only {"type": "text", "text": ...} parts',
                    )
                )
            content = "\n".join(text for text in texts if text is not None)
        elif content is not None and not isinstance(content, str):
            problems.append(
                Problem(where, f"content is {type(content).__name__}", "pass a text or a list of text parts")
            )
        checked.append(dict(message) | ({"content": content} if "content" in message else {}))
    if not messages:
        problems.append(Problem("messages", "the conversation is empty", "pass at least one message"))
    if problems:
        raise RequestError("chat", problems)
    return checked


def _text_of(part: Any) -> str | None:
    text = (
        part
        if isinstance(part, str)
        else part.get("text")
        if isinstance(part, Mapping) and part.get("type") == "text"
        else None
    )
    return text if isinstance(text, str) else None


@lru_cache(maxsize=32)
def _compile(template: str) -> Template:
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    from torchplug.engine.template_budget import MeteredEnvironment

    class GenerationBlock(Extension):
        """`{% generation %}...{% endgeneration %}` marks the assistant's words, for training; its body is the text."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    environment = MeteredEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlock]
    )
    environment.replace_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment.metered(template)


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, > and &, for HTML; templates are written for plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
