"""What a caller may give as a prompt (a text, token ids, or vLLM's dicts of either), and the token ids it becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias

from torchplug.errors import Problem, RequestError

if TYPE_CHECKING:
    from torchplug.engine.chat_template import Message
    from torchplug.engine.tokenizer import Tokenizer

Prompt: TypeAlias = "str | Sequence[int] | Mapping[str, Any]"
"""A text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; the last may carry its text as "prompt" too."""

CHAT_OPTIONS = ("add_generation_prompt", "chat_template", "tools", "chat_template_kwargs")
CHAT_NOT_SERVED = (
    "lora_request",
    "chat_template_content_format",
    "continue_final_message",
    "mm_processor_kwargs",
    "tokenization_kwargs",
)

_CHAT_ARGUMENTS = {
    "messages": "pass the conversation itself",
    "conversation": "pass the conversation itself",
    "self": "leave it out",
    "add_generation_prompt": "use the argument of that name",
    "chat_template": "use the argument of that name",
    "tools": "use the argument of that name",
}
"""Names that `chat_template_kwargs` cannot use, and what to do instead."""

_NOT_SERVED = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "prompt_embeds", "cache_salt")


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as the model reads it; `text` is None where only ids were given."""

    text: str | None
    token_ids: list[int]


def tokenize_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> TokenizedPrompt:
    """The prompt's token ids.

    Raises:
        RequestError: The prompt has no form that is served, or it is a text and there is no tokenizer.
    """
    if isinstance(prompt, str):
        return TokenizedPrompt(prompt, _encode(prompt, tokenizer))
    if isinstance(prompt, Mapping):
        return _from_mapping(prompt, tokenizer)
    if isinstance(prompt, Sequence):
        return TokenizedPrompt(None, _ids(prompt))
    raise _refusal("", f"expected a text, token ids or a dict, got {type(prompt).__name__}")


def chat_prompt(
    tokenizer: Tokenizer,
    conversation: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    chat_template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Prompt:
    """A conversation as the model's chat template writes it, as a prompt; it holds the special tokens already.

    Args:
        tokenizer: With the template.
        conversation: Messages, oldest first.
        add_generation_prompt: End with what opens the assistant's turn.
        chat_template: Jinja source instead of the model's own.
        tools: Tool schemas for the template.
        chat_template_kwargs: Further variables for the template.

    Raises:
        RequestError: An argument is of another kind, there is no template, or it refuses the conversation.
    """
    problems = []
    if not isinstance(add_generation_prompt, bool):
        says = f"expected True or False, got {add_generation_prompt!r:.80}"
        problems.append(Problem("add_generation_prompt", says, "correct add_generation_prompt"))
    if tools is not None and (isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence)):
        says = f"expected a list of schemas, got {type(tools).__name__}"
        problems.append(Problem("tools", says, "pass a list of dicts, or None"))
    more = {} if chat_template_kwargs is None else chat_template_kwargs
    if not isinstance(more, Mapping) or not all(isinstance(name, str) for name in more):
        says = f"expected a dict of variables by name, got {more!r:.80}"
        problems.append(Problem("chat_template_kwargs", says, 'pass e.g. {"enable_thinking": False}'))
    else:
        taken = [name for name in more if name in _CHAT_ARGUMENTS]
        problems += [
            Problem("chat_template_kwargs", f"{name!r} is given otherwise", _CHAT_ARGUMENTS[name]) for name in taken
        ]
    if problems:
        raise RequestError("chat", problems)
    text = tokenizer.render_chat(
        conversation, add_generation_prompt=add_generation_prompt, chat_template=chat_template, tools=tools, **more
    )
    return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}


def split_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several, as a list of prompts. A list of integers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, Sequence):
        if prompts and all(isinstance(item, Integral) for item in prompts):
            return [prompts]  # type: ignore[list-item]
        return list(prompts)  # type: ignore[arg-type]
    raise _refusal("", f"expected a prompt or a list of prompts, got {type(prompts).__name__}")


def refuse_others(where: str, others: Mapping[str, Any], known: Sequence[str]) -> None:
    """Arguments of vLLM's method that are not served may be None; names that nobody knows are an error."""
    problems = [
        Problem(name, "not served by this version" if name in known else "no such argument", "leave it out")
        for name, value in others.items()
        if name not in known or value is not None
    ]
    if problems:
        raise RequestError(where, problems)


def _from_mapping(prompt: Mapping[str, Any], tokenizer: Tokenizer | None) -> TokenizedPrompt:
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    problems = [
        Problem(str(key), "not served by this version" if key in _NOT_SERVED else "no such key", "leave it out")
        for key, value in prompt.items()
        if key not in ("prompt", "prompt_token_ids") and not (key in _NOT_SERVED and value is None)
    ]
    if text is not None and not isinstance(text, str):
        problems.append(Problem("prompt", f"expected a text, got {type(text).__name__}", 'write {"prompt": "..."}'))
    if text is None and ids is None:
        problems.append(Problem("", "has neither 'prompt' nor 'prompt_token_ids'", 'write {"prompt": "..."}'))
    if problems:
        raise RequestError("prompt", problems)
    if ids is not None:
        return TokenizedPrompt(text, _ids(ids))
    assert isinstance(text, str)
    return TokenizedPrompt(text, _encode(text, tokenizer))


def _encode(text: str, tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        raise _refusal(
            "", "is a text, but there is no tokenizer (skip_tokenizer_init=True)", 'pass {"prompt_token_ids": [...]}'
        )
    return tokenizer.encode(text)


def _ids(ids: Any) -> list[int]:
    if hasattr(ids, "tolist"):  # a numpy array or a tensor
        ids = ids.tolist()
    if not isinstance(ids, Sequence) or not all(isinstance(i, Integral) and not isinstance(i, bool) for i in ids):
        raise _refusal("prompt_token_ids", f"expected a list of integers, got {ids!r:.80}")
    return [int(i) for i in ids]


def _refusal(
    where: str, says: str, fix: str = 'pass a text, {"prompt": "..."} or {"prompt_token_ids": [...]}'
) -> RequestError:
    return RequestError("prompt", Problem(where, says, fix))
