"""Output that keeps to a JSON schema, a regular expression, a list of choices or a grammar: what may be asked for.

`SamplingParams(structured_outputs=StructuredOutputsParams(json=...))`, in vLLM's names. `engine/grammar.py` turns it
into a bitmask over the vocabulary for each token.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torchplug.errors import Problem, RequestError

FORMS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Exactly one of these says what the output must be."""

_NOT_SERVED: Final = ("disable_fallback",)


@dataclass(frozen=True, slots=True, init=False)
class StructuredOutputsParams:
    """What the output must be; exactly one of the first five and `structural_tag`.

    Args:
        json: A JSON schema, as a dict, as JSON text, or a pydantic model class.
        regex: A regular expression in Rust's syntax (no look-around, no back references); the whole output matches it.
        choice: The output is one of these texts.
        grammar: A context-free grammar, in Lark's or llama.cpp's (GBNF) notation.
        json_object: True: any JSON object.
        structural_tag: Free text with tagged parts that keep to a JSON schema, as a dict or as JSON text: {"type":
            "structural_tag", "structures": [{"begin": "<f>", "schema": {...}, "end": "</f>"}], "triggers": ["<f"]}. A
            text that begins like a trigger goes on as a `begin` that starts with it.
        disable_any_whitespace: For JSON: no white space between its parts.
        disable_additional_properties: For `json`: objects have no other properties than the schema names, where it
            does not say otherwise itself.
        whitespace_pattern: For JSON: a regular expression for the white space between its parts.

    Raises:
        RequestError: Not exactly one of them, a value of another type, or an argument that nobody knows. Whether a
            schema or an expression is sound is told when a request with it is added.
    """

    json: str | dict[str, Any] | None
    regex: str | None
    choice: tuple[str, ...] | None
    grammar: str | None
    json_object: bool | None
    disable_any_whitespace: bool
    disable_additional_properties: bool
    whitespace_pattern: str | None
    structural_tag: str | dict[str, Any] | None

    def __init__(
        self,
        *,
        json: str | Mapping[str, Any] | type | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        json_object: bool | None = None,
        disable_any_whitespace: bool = False,
        disable_additional_properties: bool = False,
        whitespace_pattern: str | None = None,
        structural_tag: str | Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        problems: list[Problem] = []
        schema_of = getattr(json, "model_json_schema", None)
        if schema_of is not None:
            json = schema_of()
        if isinstance(json, Mapping):
            json = dict(json)
            try:
                json_module.dumps(json)
            except (TypeError, ValueError) as error:
                problems.append(Problem("json", f"is no JSON schema: {error}", "pass a dict that JSON can carry"))
        if json_object is False:
            json_object = None
        if isinstance(structural_tag, Mapping):
            structural_tag = dict(structural_tag)
        given = {
            "json": json,
            "regex": regex,
            "choice": choice,
            "grammar": grammar,
            "json_object": json_object,
            "structural_tag": structural_tag,
        }
        forms = [name for name, value in given.items() if value is not None]
        if len(forms) != 1:
            found = " and ".join(forms) or "none of them"
            problems.append(Problem("", f"expected exactly one of {', '.join(FORMS)}, got {found}", "keep one"))
        if isinstance(choice, str) or not (
            choice is None
            or (isinstance(choice, Sequence) and choice and all(isinstance(text, str) and text for text in choice))
        ):
            problems.append(Problem("choice", f"expected texts, at least one and none empty, got {choice!r}", ""))
        for name, value, kinds in (
            ("json", json, (str, dict)),
            ("regex", regex, (str,)),
            ("grammar", grammar, (str,)),
            ("json_object", json_object, (bool,)),
            ("whitespace_pattern", whitespace_pattern, (str,)),
            ("structural_tag", structural_tag, (str, dict)),
        ):
            if value is not None and not isinstance(value, kinds):
                expected = " or ".join(kind.__name__ for kind in kinds)
                problems.append(Problem(name, f"expected {expected}, got {type(value).__name__}", f"correct {name}"))
            elif isinstance(value, str) and not is_unicode(value):
                says = f"holds half of a surrogate pair, which no text can hold: {value!a:.80}"
                problems.append(Problem(name, says, "pass valid Unicode"))
        for name, flag in (
            ("disable_any_whitespace", disable_any_whitespace),
            ("disable_additional_properties", disable_additional_properties),
        ):
            if not isinstance(flag, bool):
                problems.append(Problem(name, f"expected True or False, got {flag!r}", f"correct {name}"))
        for name, value in others.items():
            if name not in _NOT_SERVED:
                problems.append(Problem(name, "no such argument", f"the names are {', '.join(FORMS)}"))
            elif value not in (None, False):
                problems.append(Problem(name, f"not served by this version, got {value!r}", "leave it out"))
        if structural_tag is not None and not problems:
            problems += _tag_problems(structural_tag)
        if problems:
            raise RequestError("StructuredOutputsParams(...)", problems)
        accepted = {
            **given,
            "choice": None if choice is None else tuple(choice),
            "disable_any_whitespace": disable_any_whitespace,
            "disable_additional_properties": disable_additional_properties,
            "whitespace_pattern": whitespace_pattern,
        }
        for name in self.__slots__:
            object.__setattr__(self, name, accepted[name])

    @property
    def form(self) -> str:
        """Which of `FORMS` it is."""
        return next(name for name in FORMS if getattr(self, name) is not None)

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def key(self) -> str:
        """Equal for requests of the same structure."""
        return json_module.dumps({name: getattr(self, name) for name in self.__slots__})


def tag_of(structural_tag: str | Mapping[str, Any]) -> Any:
    """The structural tag as data; raises ValueError where its text is not JSON."""
    return json_module.loads(structural_tag) if isinstance(structural_tag, str) else structural_tag


def _tag_problems(structural_tag: str | Mapping[str, Any]) -> list[Problem]:
    """Everything about a structural tag but its schemas."""
    try:
        tag = tag_of(structural_tag)
        json_module.dumps(tag)
    except (TypeError, ValueError, RecursionError) as error:
        return [Problem("structural_tag", f"is not JSON: {error}", "pass a dict, or JSON text")]
    if isinstance(tag, dict) and "format" in tag:
        fix = 'write "structures" and "triggers"'
        return [Problem("structural_tag", "the form with a 'format' is not served by this version", fix)]
    problems = []
    if not isinstance(tag, dict) or tag.keys() != {"type", "structures", "triggers"} or tag["type"] != "structural_tag":
        says = "expected an object with type 'structural_tag', structures and triggers"
        return [Problem("structural_tag", says, "correct structural_tag")]
    triggers, structures = tag["triggers"], tag["structures"]
    if not isinstance(triggers, list) or not triggers or not all(isinstance(each, str) and each for each in triggers):
        problems.append(Problem("structural_tag", "triggers: expected texts, at least one and none empty", ""))
    if not isinstance(structures, list) or not structures:
        problems.append(Problem("structural_tag", "structures: expected a list with at least one", ""))
    for index, each in enumerate([] if problems else structures):
        if (
            not isinstance(each, dict)
            or each.keys() != {"begin", "schema", "end"}
            or not isinstance(each["begin"], str)
            or not isinstance(each["end"], str)
            or not isinstance(each["schema"], dict)
        ):
            says = f"structures[{index}]: expected an object with begin (a text), schema (an object) and end (a text)"
            problems.append(Problem("structural_tag", says, "correct structural_tag"))
        elif not any(each["begin"].startswith(trigger) for trigger in triggers):
            says = f"structures[{index}]: begin {each['begin']!a:.80} starts with none of the triggers"
            problems.append(Problem("structural_tag", says, "name a trigger that it starts with"))
    return problems


def is_unicode(text: str) -> bool:
    """Whether a text has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
