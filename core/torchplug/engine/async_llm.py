"""`AsyncLLM`: the engine for asyncio programs. Steps run on a thread of their own; answers arrive as async iterators.

The event loop never waits for a step, and the engine never waits for a consumer. Only the engine's thread touches the
engine: requests and aborts go to it through an inbox, outputs come back through `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from torchplug.engine.outputs import RequestOutput
from torchplug.engine.prompts import CHAT_NOT_SERVED, CHAT_OPTIONS, chat_prompt, refuse_others
from torchplug.engine.sampling_params import RequestOutputKind, SamplingParams
from torchplug.errors import Problem, RequestError, TorchplugError

if TYPE_CHECKING:
    import os

    from torchplug.engine.chat_template import Message
    from torchplug.engine.llm_engine import LLMEngine
    from torchplug.engine.metrics import EngineMetrics
    from torchplug.engine.parallel_sampling import ParallelRequest
    from torchplug.engine.prompts import Prompt
    from torchplug.engine.request import Request
    from torchplug.engine.tokenizer import Tokenizer


class AsyncLLM:
    """A model with its tokenizer and an engine that runs on its own thread.

    Any number of tasks, of one or of several event loops, ask at the same time; their requests share the steps.
    Loading blocks: inside a running loop, `llm = await asyncio.to_thread(AsyncLLM, "demo")`. It is a context manager,
    for `with` and for `async with`; a forgotten one stops its thread when it is collected or the interpreter ends.

    Args:
        model: As `LLM`.
        arguments: Every keyword of `LLM`.

    Raises:
        RequestError, CheckpointError, PluginError, DeviceError: As `LLM`.
    """

    def __init__(self, model: str | os.PathLike[str], **arguments: Any) -> None:
        from torchplug.engine.llm import LLM

        self._llm = LLM(model, **arguments)
        self.model = self._llm.model
        self._engine = self._llm.llm_engine
        self._ids = itertools.count()
        self._thread = _EngineThread(self._engine)
        # Also at interpreter exit, before modules are torn down under a thread that is inside a step.
        self._stop = weakref.finalize(self, self._thread.stop)

    @property
    def is_running(self) -> bool:
        """Whether requests are taken."""
        return self._thread.is_alive()

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer; raises RequestError where there is none."""
        return self._llm.get_tokenizer()

    def metrics(self) -> EngineMetrics:
        """Requests, waiting times and cache use so far. May be asked for at any time, also while a step runs."""
        return self._engine.metrics()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue one prompt: `async for output in llm.generate(...)`.

        Args:
            prompt: A text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}.
            sampling_params: None: `SamplingParams()`. Its `output_kind` says what each output holds: all so far
                (the default; a slow consumer gets the latest), only what is new, or nothing before the end.
            request_id: Unlike that of any request under way; None: a new one.

        Leaving the loop, closing the iterator or cancelling the task aborts the request and frees its cache.

        Raises:
            RequestError: The prompt or the parameters are not acceptable, the id is in use, the request was aborted
                with `abort`, the engine was shut down, or the step that the request took part in failed (the exception
                of the model is its cause; other requests go on).
        """
        name = f"request {next(self._ids)}" if request_id is None else request_id
        # Tokenizing a long prompt and compiling a schema take a while, so neither happens on the event loop.
        request = await asyncio.to_thread(self._engine.build_request, name, prompt, sampling_params)
        kind = RequestOutputKind.CUMULATIVE if sampling_params is None else sampling_params.output_kind
        stream = _Stream(name, asyncio.get_running_loop(), latest_only=kind is RequestOutputKind.CUMULATIVE)
        self._thread.submit(request, stream)
        try:
            while True:
                output = await stream.next()
                yield output
                if output.finished:
                    return
        finally:
            if not stream.ended:
                self._thread.abort(stream)

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **template: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation, written out by the model's chat template: `async for output in llm.chat(...)`.

        Args:
            messages: The conversation, a list of {"role": ..., "content": ...}.
            sampling_params: As in `generate`.
            request_id: As in `generate`.
            template: add_generation_prompt, chat_template, tools and chat_template_kwargs, as in `LLM.chat`.

        Raises:
            RequestError: As `generate`; what the template refuses; an argument that is not served.
        """
        refuse_others("AsyncLLM.chat", {k: v for k, v in template.items() if k not in CHAT_OPTIONS}, CHAT_NOT_SERVED)
        # Rendering and tokenizing take a while for a long conversation, so they do not happen on the event loop.
        prompt = await asyncio.to_thread(chat_prompt, self.get_tokenizer(), messages, **template)
        async with aclosing(self.generate(prompt, sampling_params, request_id)) as outputs:
            async for output in outputs:
                yield output

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Drop requests; their iterators raise RequestError. An id that is not (or no longer) here is ignored."""
        self._thread.abort_ids([request_id] if isinstance(request_id, str) else list(request_id))

    def shutdown(self) -> None:
        """Stop after the step under way, end every iterator with RequestError, free the model. May be repeated."""
        self._stop()
        self._llm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)


class _Stream:
    """One request's outputs on their way from the engine's thread to the task that reads them.

    `ended` and the contents are touched on the stream's event loop only.
    """

    __slots__ = ("_items", "_latest_only", "_waiter", "ended", "loop", "name")

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop, *, latest_only: bool) -> None:
        self.name = name
        self.loop = loop
        self.ended = False
        self._latest_only = latest_only
        self._items: deque[RequestOutput | RequestError] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: RequestOutput | RequestError) -> None:
        """Add an output, or what ends the stream."""
        if self.ended:
            return
        self.ended = isinstance(item, RequestError) or item.finished
        last = self._items[-1] if self._items else None
        if (
            self._latest_only
            and isinstance(item, RequestOutput)
            and isinstance(last, RequestOutput)
            and [one.index for one in last.outputs] == [one.index for one in item.outputs]
        ):
            self._items[-1] = item
        else:
            self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> RequestOutput:
        while not self._items:
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        item = self._items.popleft()
        if isinstance(item, RequestError):
            raise item
        return item


class _EngineThread:
    """Steps the engine while it has requests, and sleeps otherwise."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._wake = threading.Condition()
        # Shared with the callers, under `_wake`.
        self._inbox: deque[tuple[Request | ParallelRequest, _Stream]] = deque()
        self._dropped: deque[_Stream] = deque()
        self._names_to_abort: deque[str] = deque()
        self._stopping = False
        # Only this thread's.
        self._streams: dict[str, _Stream] = {}
        self._thread = threading.Thread(target=self._run, name="torchplug-engine", daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        return not self._stopping and self._thread.is_alive()

    def submit(self, request: Request | ParallelRequest, stream: _Stream) -> None:
        with self._wake:
            if self._stopping:
                raise _ended(stream.name, "the engine was shut down", "make a new AsyncLLM(...)")
            self._inbox.append((request, stream))
            self._wake.notify()

    def abort(self, stream: _Stream) -> None:
        """Drop the request of a stream that nobody reads any more: this stream's, not a later one's of the same id."""
        with self._wake:
            self._dropped.append(stream)
            self._wake.notify()

    def abort_ids(self, names: Iterable[str]) -> None:
        with self._wake:
            self._names_to_abort.extend(names)
            self._wake.notify()

    def stop(self) -> None:
        """End the thread, after the step under way; every stream ends."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._take_in():
                try:
                    outputs = self._engine.step()
                except Exception as error:
                    self._step_failed(error)
                else:
                    self._hand_out(outputs)
        finally:  # whatever ends this thread, no task is left waiting
            with self._wake:
                self._stopping = True
                streams = [*self._streams.values(), *(stream for _, stream in self._inbox)]
            says, fix = "the engine was shut down", "make a new AsyncLLM(...)"
            _send((stream, _ended(stream.name, says, fix)) for stream in streams)
            self._engine.abort_request(list(self._streams))

    def _take_in(self) -> bool:
        """Wait until there is something to do, and take in what the callers want. False: stop."""
        with self._wake:
            while not (
                self._stopping
                or self._inbox
                or self._dropped
                or self._names_to_abort
                or self._engine.has_unfinished_requests()
            ):
                self._wake.wait()
            if self._stopping:
                return False
            new, dropped, names = list(self._inbox), list(self._dropped), list(self._names_to_abort)
            self._inbox.clear()
            self._dropped.clear()
            self._names_to_abort.clear()
        for request, stream in new:
            try:
                self._engine.submit(request)
            except RequestError as error:
                _send([(stream, error)])
            else:
                self._streams[stream.name] = stream
        for stream in dropped:
            if self._streams.get(stream.name) is stream:
                self._engine.abort_request(stream.name)
                del self._streams[stream.name]
        known = [name for name in names if name in self._streams]
        self._engine.abort_request(known)
        self._end(known, "was aborted", "")
        return True

    def _hand_out(self, outputs: Iterable[RequestOutput]) -> None:
        sent: list[tuple[_Stream, RequestOutput | RequestError]] = []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                sent.append((stream, output))
                if output.finished:
                    del self._streams[output.request_id]
        for stream in _send(sent):  # their event loops are closed
            self.abort(stream)

    def _step_failed(self, error: Exception) -> None:
        """Tell the requests that the failed step has dropped; the others go on."""
        lost = [name for name in self._streams if name not in self._engine]
        if not lost:  # the failure is no request's own, and the next step would only repeat it
            lost = list(self._streams)
            self._engine.abort_request(lost)
        says = f"{type(error).__name__}: {error}"
        if isinstance(error, TorchplugError):
            says = str(error).removeprefix("torchplug: ")
        fix = "ask again, or with less; the cause has the traceback"
        self._end(lost, f"a step that it took part in failed: {says}", fix, error)

    def _end(self, names: Iterable[str], says: str, fix: str, cause: Exception | None = None) -> None:
        ends = []
        for name in names:
            stream = self._streams.pop(name, None)
            if stream is not None:
                # An exception of its own for each: several tasks raising one would share its traceback.
                end = _ended(name, says, fix)
                end.__cause__ = cause
                ends.append((stream, end))
        _send(ends)


def _send(items: Iterable[tuple[_Stream, RequestOutput | RequestError]]) -> list[_Stream]:
    """Put items into streams, with one wake-up for each event loop; returns the streams whose loop is closed."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput | RequestError]]] = {}
    for stream, item in items:
        by_loop.setdefault(stream.loop, []).append((stream, item))
    closed: list[_Stream] = []
    for loop, its in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put_all, its)
        except RuntimeError:
            if not loop.is_closed():
                raise
            closed += [stream for stream, _ in its]
    return closed


def _put_all(items: Iterable[tuple[_Stream, RequestOutput | RequestError]]) -> None:
    for stream, item in items:
        stream.put(item)


def _ended(name: str, says: str, fix: str) -> RequestError:
    return RequestError(f"request {name!r}", Problem("", says, fix))
