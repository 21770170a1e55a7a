"""`torchplug generate --input FILE --output FILE`: a file of requests, one JSON object a line, and a file of answers.

The output is only ever appended to, one whole record at a time, in the order in which requests finish. A record names
its input line, so a run that was killed goes on where it stopped: what has a record is done, and a record that was cut
by the kill is dropped and its line asked again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchplug.errors import Problem, RequestError, TorchplugError

if TYPE_CHECKING:
    from torchplug.engine.llm import LLM
    from torchplug.engine.llm_engine import LLMEngine
    from torchplug.engine.outputs import RequestOutput
    from torchplug.engine.prompts import Prompt
    from torchplug.engine.sampling_params import SamplingParams

_PROMPTS: Final = ("prompt", "messages", "prompt_token_ids")
_KEYS: Final = (*_PROMPTS, "id", "sampling_params")


@dataclass(slots=True)
class Tally:
    """How far a batch file is. `failed`: lines (from 1) whose record is an error, of this run or an earlier one."""

    total: int
    done_before: int
    answered: int
    failed: list[int]

    @property
    def done(self) -> int:
        """Lines with a record."""
        return self.done_before + self.answered


class BatchFile:
    """The two files of one run.

    Args:
        source: The requests; blank lines are skipped.
        target: The answers; made where it does not exist.
        defaults: Sampling parameters of lines that do not say otherwise.
        model: What the user called the model. A line that was answered by another model, or with other defaults, is
            not done.

    Raises:
        RequestError: The output is not one of this input, this model and these parameters, or another run writes it.
    """

    def __init__(self, source: Path, target: Path, *, defaults: Mapping[str, Any], model: str) -> None:
        if target.exists() and source.samefile(target):
            raise _refusal(target, "is the input file too", "give another --output")
        self._source = source
        self._target = target
        self._defaults = dict(defaults)
        self._setting = json.dumps([model, self._defaults], sort_keys=True, default=list).encode()
        self._done: dict[int, str] = {}
        self.tally = Tally(0, 0, 0, [])

    @contextmanager
    def open(self) -> Iterator[None]:
        """Take the output for this run: drop a cut record, find out what is done. Nothing is lost however it ends."""
        try:
            descriptor = os.open(self._target, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise _refusal(self._target, f"cannot be written: {error.strerror}", "give another --output") from None
        try:
            _lock(descriptor, self._target)
            self._descriptor = descriptor
            self._read_records()
            for number, line in self._lines():
                self.tally.total += 1
                if number in self._done and self._done[number] != self._fingerprint(line):
                    raise _refusal(
                        self._target,
                        f"line {number} of {self._source} was answered as another text, by another model or with other "
                        "parameters",
                        "give another --output, or what was given before",
                    )
            beyond = self._done.keys() - {number for number, _ in self._lines()}
            if beyond:
                says = f"answers line {min(beyond)}, which {self._source} does not have"
                raise _refusal(self._target, says, "give the --output of this --input")
            self.tally.done_before = len(self._done)
            yield
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def run(self, llm: LLM, *, most_in_flight: int) -> Iterator[Tally]:
        """Answer what has no record yet; yields after every record that is written.

        The lines of a step that fails have its error for a record, and the others go on; two such steps in a row end
        the run, with the second one's error and no record of its lines.
        """
        engine = llm.llm_engine
        asked: dict[str, tuple[int, bytes, Any]] = {}
        todo = ((number, line) for number, line in self._lines() if number not in self._done)
        exhausted = failed = False
        try:
            while not exhausted or asked:
                while not exhausted and len(asked) < most_in_flight:
                    number, line = next(todo, (0, b""))
                    if not number:
                        exhausted = True
                        break
                    name = f"line {number}"
                    identity = None
                    try:
                        fields = _fields(line)
                        identity = fields.get("id")
                        self._submit(llm, engine, name, fields)
                    except RequestError as error:
                        self._write(number, line, identity, {"error": error.as_dict()})
                        self.tally.failed.append(number)
                        yield self.tally
                    else:
                        asked[name] = number, line, identity
                try:
                    outputs, failed = engine.step(), False
                except TorchplugError as error:
                    # It cannot be told whose fault it was. A second failure in a row is not a line's.
                    lost = [name for name in asked if name not in engine]
                    if failed or not lost:
                        raise
                    failed = True
                    for name in lost:
                        number, line, identity = asked.pop(name)
                        self._write(number, line, identity, {"error": error.as_dict()})
                        self.tally.failed.append(number)
                        yield self.tally
                    continue
                for output in outputs:
                    if output.finished and output.request_id in asked:
                        number, line, identity = asked.pop(output.request_id)
                        self._write(number, line, identity, _answer(output))
                        yield self.tally
        finally:
            engine.abort_request(list(asked))

    def _submit(self, llm: LLM, engine: LLMEngine, name: str, fields: Mapping[str, Any]) -> None:
        engine.submit(engine.build_request(name, _prompt(llm, fields), self._params(fields.get("sampling_params"))))

    def _params(self, own: Any) -> SamplingParams:
        from torchplug.engine.sampling_params import RequestOutputKind, SamplingParams
        from torchplug.engine.structured_outputs import StructuredOutputsParams

        if own is None:
            own = {}
        if not isinstance(own, dict):
            raise RequestError(
                "line", Problem("sampling_params", "expected an object", 'write {"max_tokens": 64, ...}')
            )
        structure = own.get("structured_outputs")
        if isinstance(structure, dict):
            own = {**own, "structured_outputs": StructuredOutputsParams(**structure)}
        if "self" in own:  # not a keyword that can be passed on
            raise RequestError("line", Problem("self", "no such sampling parameter", "leave it out"))
        return SamplingParams(**{**self._defaults, **own, "output_kind": RequestOutputKind.FINAL_ONLY})

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Number, from 1, and text of every line that is not blank."""
        with self._source.open("rb") as file:
            for number, line in enumerate(file, 1):
                line = line.strip()
                if line:
                    yield number, line

    def _fingerprint(self, line: bytes) -> str:
        return hashlib.blake2b(self._setting + b"\n" + line, digest_size=8).hexdigest()

    def _write(self, number: int, line: bytes, identity: Any, answer: Mapping[str, Any]) -> None:
        record = {"line": number} | ({} if identity is None else {"id": identity})
        text = json.dumps({**record, **answer, "input": self._fingerprint(line)}) + "\n"
        rest = memoryview(text.encode())
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:  # a record that was cut by it is dropped by the next run
            fix = "make room and give the same command again: it goes on from here"
            raise _refusal(self._target, f"cannot be written: {error.strerror}", fix) from None
        self.tally.answered += 1

    def _read_records(self) -> None:
        """What is done. What stands after the last line end was cut by a kill: it is dropped."""
        whole = 0
        with self._target.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                try:
                    record = json.loads(line)
                    source_line, fingerprint = record["line"], record["input"]
                    failed = "error" in record
                except (ValueError, TypeError, KeyError):
                    says = f"line {number} is no record of a batch"
                    raise _refusal(
                        self._target, says, "give an --output that this command wrote, or a new one"
                    ) from None
                if not isinstance(source_line, int) or not isinstance(fingerprint, str):
                    says = f"line {number} is no record of a batch"
                    raise _refusal(self._target, says, "give an --output that this command wrote, or a new one")
                self._done[source_line] = fingerprint
                if failed:
                    self.tally.failed.append(source_line)
        os.ftruncate(self._descriptor, whole)


def _fields(line: bytes) -> dict[str, Any]:
    """One input line.

    Raises:
        RequestError: It is no JSON object, has a key that nobody knows, or not exactly one prompt.
    """
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError("line", Problem("", f"is not JSON: {error}", "write one JSON object a line")) from None
    if not isinstance(fields, dict):
        found = type(fields).__name__
        raise RequestError("line", Problem("", f"expected a JSON object, got {found}", 'write {"prompt": "..."}'))
    problems = [Problem(key, "no such key", f"the keys are {', '.join(_KEYS)}") for key in fields if key not in _KEYS]
    given = [key for key in _PROMPTS if fields.get(key) is not None]
    if len(given) != 1:
        says = f"expected exactly one of {', '.join(_PROMPTS)}, got {' and '.join(given) or 'none'}"
        problems.append(Problem("", says, 'write {"prompt": "..."} or {"messages": [...]}'))
    if problems:
        raise RequestError("line", problems)
    return fields


def _prompt(llm: LLM, fields: Mapping[str, Any]) -> Prompt:
    from torchplug.engine.prompts import chat_prompt

    if fields.get("messages") is None:
        return {key: fields[key] for key in ("prompt", "prompt_token_ids") if fields.get(key) is not None}
    return chat_prompt(llm.get_tokenizer(), fields["messages"])


def _answer(output: RequestOutput) -> dict[str, Any]:
    answers = []
    for one in output.outputs:
        answer: dict[str, Any] = {
            "index": one.index,
            "text": one.text,
            "token_ids": one.token_ids,
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        if one.logprobs is not None:
            answer["logprobs"] = [
                [{"token_id": token_id, **asdict(entry)} for token_id, entry in entries.items()]
                for entries in one.logprobs
            ]
        answers.append(answer)
    return {"num_prompt_tokens": len(output.prompt_token_ids), "outputs": answers}


def _lock(descriptor: int, target: Path) -> None:
    """One run at a time writes a file, where the system can tell; the lock goes with the process, however it ends."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _refusal(target, "is being written by another run", "wait for it, or give another --output") from None


def _refusal(path: Path, says: str, fix: str) -> RequestError:
    return RequestError(f"output file {str(path)!r}", Problem("", says, fix))
