"""The engine: requests go in, steps are taken, outputs come out; always scheduler -> runner -> sampler -> request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from torchplug.config import CompilationMode
from torchplug.engine.block_manager import BlockManager, PrefixCacheStats
from torchplug.engine.compiled import CompiledForward
from torchplug.engine.cpu_threads import limit_threads
from torchplug.engine.decode_graphs import DecodeGraphs, graph_device, why_not_recorded
from torchplug.engine.grammar import Grammars
from torchplug.engine.kv_cache import PagedCache
from torchplug.engine.metrics import EngineMetrics, MetricsRecorder
from torchplug.engine.outputs import RequestOutput
from torchplug.engine.parallel_sampling import ParallelRequest, child_params
from torchplug.engine.prompts import Prompt, TokenizedPrompt, tokenize_prompt
from torchplug.engine.request import Request
from torchplug.engine.runner import Runner
from torchplug.engine.sampler import Sampler, SamplingState, token_logprobs
from torchplug.engine.sampling_params import SamplingParams
from torchplug.engine.scheduler import Scheduled, Scheduler
from torchplug.engine.state_pool import StatePool
from torchplug.engine.step_memory import check_step_memory
from torchplug.errors import PluginError, Problem, RequestError, TorchplugError
from torchplug.host.blame import RUNNING, lacks_memory, no_memory

if TYPE_CHECKING:
    from torchplug.engine.tokenizer import Tokenizer
    from torchplug.host.model import LoadedModel

_log = logging.getLogger(__name__)


class LLMEngine:
    """Serves any number of requests on one loaded model. Not thread-safe: one thread adds, steps and aborts.

    Args:
        model: The model; its `vllm_config` holds the limits (max_model_len, max_num_seqs, max_num_batched_tokens).
        tokenizer: For text prompts and text outputs; None: token ids only.
        seed: For the draws of requests without a seed of their own.
        progress: Called as progress(done, all) while the model is compiled, and again while its steps are recorded.

    Raises:
        PluginError: The model generates nothing, or cannot be compiled.
        DeviceError: The cache, or steps of the sizes that its `vllm_config` allows, need more memory than there is; or
            a model that is to be compiled finds no compiler.
    """

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: Tokenizer | None = None,
        *,
        seed: int | None = 0,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        if not hasattr(model.module, "compute_logits"):
            says = "is not there: a pooling model scores its input and generates nothing"
            raise PluginError(f"model {type(model.module).__name__!r}", Problem("compute_logits", says))
        config = model.vllm_config
        limits = config.scheduler_config
        self.model = model
        self.tokenizer = tokenizer
        self.max_model_len = config.model_config.max_model_len
        self.vocab_size: int | None = config.model_config.hf_text_config.get("vocab_size")
        self.eos_token_ids = _eos_token_ids(model, tokenizer)
        if model.device.type == "cpu":
            limit_threads()
        check_step_memory(config, self.vocab_size)
        graphs, self._why_no_graphs = self._decode_graphs(model)
        states = StatePool.of(model)
        prefix_caching = config.cache_config.enable_prefix_caching
        if prefix_caching and states is not None and not states.copies:
            prefix_caching = False
            _log.warning(
                "%s has recurrent layers and does not claim SupportsMambaPrefixCaching: it runs without prefix caching",
                type(model.module).__name__,
            )
        self.kv_cache = PagedCache(
            model.module,
            dtype=model.dtype,
            device=model.device,
            block_size=config.cache_config.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            memory_bytes=config.cache_config.kv_cache_memory_bytes,
            padding=graphs is not None,
            states=states,
            snapshots=prefix_caching,
        )
        max_num_seqs = self.kv_cache.max_num_seqs
        if graphs is not None and not self.kv_cache.padding_block:
            why = "attention plans its steps on the host" if self.kv_cache.groups else "no layer has a cache of ours"
            graphs, self._why_no_graphs = None, why
        self._graphs = graphs
        compiling = config.compilation_config.mode is CompilationMode.STOCK_TORCH_COMPILE
        self._compiled = CompiledForward(model.module) if compiling else None
        self._runner = Runner(
            model.module,
            self.kv_cache,
            device=model.device,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            embedding=lambda: model.hooks.embed_input_ids if self._wrappers else None,
            forward=self._compiled,
            graphs=graphs,
            subject=model.subject,
        )
        self._blocks = BlockManager(
            [(group.window, group.num_blocks) for group in self.kv_cache.groups],
            self.kv_cache.block_size,
            prefix_caching=prefix_caching,
            whole_above=self._runner.whole_above,
            state_snapshots=None if states is None else states.num_snapshots,
        )
        self._scheduler = Scheduler(
            self._blocks,
            max_num_seqs,
            limits.max_num_batched_tokens,
            whole_prefix=not self._runner.cached,
            whole_above=self._runner.whole_above,
        )
        self._sampler = Sampler(seed)
        self._requests: dict[str, Request] = {}
        self._wrappers = model.wrappers_of("embed_input_ids")
        self._grammars = Grammars(tokenizer, self.eos_token_ids)
        self._parallel: dict[str, ParallelRequest] = {}
        self._parents: dict[str, tuple[ParallelRequest, int]] = {}  # by child
        self._recorder = MetricsRecorder()
        try:
            with torch.inference_mode():
                if self._compiled is not None:
                    self._compiled.compile(self._runner.step_inputs, progress)
                self._runner.record(progress)
        except BaseException:
            self._runner.close()
            raise
        _log.info("%s", self.execution)

    @staticmethod
    def _decode_graphs(model: LoadedModel) -> tuple[DecodeGraphs | None, str]:
        """Graphs to be recorded, or why there are none; no reason where the device has no such thing."""
        config = model.vllm_config
        if config.model_config.enforce_eager:
            return None, "enforce_eager"
        device = graph_device(model.device)
        if device is None:
            return None, ""
        why = why_not_recorded(model.module)
        limits = config.scheduler_config
        most = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        return (None, why) if why else (DecodeGraphs(device, most), "")

    @property
    def execution(self) -> str:
        """How a step is executed, for a person: what attends, whether the model is compiled, whether decode steps are
        replayed, and why not."""
        forward = "eager" if self._compiled is None else "torch.compile"
        parts = [f"attention by {self.kv_cache.describe_backends()}", forward]
        graphs = self._graphs
        why = self._why_no_graphs if graphs is None else graphs.reason
        if why:
            parts.append(f"no CUDA graphs ({why})")
        elif graphs is not None:
            sizes = ", ".join(map(str, graphs.sizes))
            parts.append(f"CUDA graphs for decode steps of {sizes} requests, {graphs.num_bytes / 2**30:.2f} GiB")
        return "; ".join(parts)

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """Queue a request.

        Args:
            request_id: Unlike that of any request in the engine.
            prompt: A text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}.
            params: Sampling and stopping; None: `SamplingParams()`.

        Raises:
            RequestError: The prompt is empty, too long, not text or ids, or out of the vocabulary; or the id is taken.
                Requests in flight are not touched.
        """
        self.submit(self.build_request(request_id, prompt, params))

    def build_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None
    ) -> Request | ParallelRequest:
        """A checked request, not yet queued: `submit` does that. Raises as `add_request` does."""
        if params is None:
            params = SamplingParams()
        elif not isinstance(params, SamplingParams):
            raise RequestError(
                f"request {request_id!r}",
                Problem("params", f"expected SamplingParams, got {type(params).__name__}", "pass SamplingParams(...)"),
            )
        tokenized = tokenize_prompt(prompt, self.tokenizer)
        problems = [*self._prompt_problems(tokenized.token_ids), *self._params_problems(params)]
        if problems:
            raise RequestError(f"request {request_id!r}", problems)
        if params.n == 1:
            return self._request(request_id, tokenized, params)
        children = [
            self._request(f"{index}_{request_id}", tokenized, each) for index, each in enumerate(child_params(params))
        ]
        return ParallelRequest(request_id, params, children)

    def _request(self, request_id: str, tokenized: TokenizedPrompt, params: SamplingParams) -> Request:
        structure = params.structured_outputs
        sampling = SamplingState(
            params,
            tokenized.token_ids,
            sorted({*self.eos_token_ids, *params.stop_token_ids}),
            None if structure is None else self._grammars.matcher(structure),
            _spellings(params.bad_words, self.tokenizer),
        )
        request = Request(
            request_id,
            tokenized,
            params,
            sampling,
            eos_token_ids=self.eos_token_ids,
            max_model_len=min(self.max_model_len, self.kv_cache.max_tokens),
            tokenizer=self.tokenizer,
        )
        request.cache_extra = self._wrappers
        return request

    def submit(self, request: Request | ParallelRequest) -> None:
        """Queue what `build_request` made."""
        children = request.children if isinstance(request, ParallelRequest) else [request]
        if request.request_id in self or any(child.request_id in self for child in children):
            raise RequestError(
                f"request {request.request_id!r}", Problem("request_id", "is in use", "give every request its own id")
            )
        if isinstance(request, ParallelRequest):
            self._parallel[request.request_id] = request
        for index, child in enumerate(children):
            if isinstance(request, ParallelRequest):
                self._parents[child.request_id] = request, index
            self._requests[child.request_id] = child
            self._scheduler.add(child)

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Drop requests at once, with what they have cached; an id that is not (or no longer) here is ignored."""
        for name in (request_id,) if isinstance(request_id, str) else tuple(request_id):
            parallel = self._parallel.pop(name, None)
            children = [name] if parallel is None else [child.request_id for child in parallel.children]
            for child in children:
                self._drop(child)

    def _drop(self, name: str) -> None:
        self._parents.pop(name, None)
        request = self._requests.pop(name, None)
        if request is not None:
            request.finish_reason = "abort"
            self._scheduler.remove(request)
            self._recorder.num_aborted += 1

    def _follow_wrappers(self) -> None:
        """What a wrapper makes of the embeddings is in the cache: blocks are shared only under the same wrappers, and
        those of a request that saw a change never."""
        wrappers = self.model.wrappers_of("embed_input_ids")
        if wrappers != self._wrappers:
            self._wrappers = wrappers
            for request in self._requests.values():
                request.cache_extra = object() if request.num_computed else wrappers
                request.block_keys.clear()

    def __contains__(self, request_id: object) -> bool:
        """Whether the request of this id is waiting or running."""
        return request_id in self._requests or request_id in self._parallel

    def metrics(self) -> EngineMetrics:
        """A snapshot of the engine's load, times and cache. May be asked for on any thread."""
        return self._recorder.snapshot(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            cache_usage=self.cache_usage if self._runner.cached else None,
            prefix_cache_hit_rate=self.prefix_cache_stats.hit_rate if self.prefix_cache_stats.queries else None,
            prefix_cache_limited=self.prefix_cache_stats.limited,
        )

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._requests)

    def get_num_unfinished_requests(self) -> int:
        """Requests waiting or running."""
        return len(self._requests)

    @property
    def num_running(self) -> int:
        """Requests that own a slot."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that do not run yet, or not now."""
        return self._scheduler.num_waiting

    @property
    def num_preemptions(self) -> int:
        """How often a request has lost its cache blocks to an earlier one, and was computed again."""
        return self._scheduler.num_preemptions

    @property
    def num_held_blocks(self) -> int:
        """Cache blocks that requests hold; 0 when idle."""
        return self._blocks.num_held

    @property
    def cache_usage(self) -> float:
        """The share of cache blocks that requests hold, or of state slots where that is more, between 0 and 1."""
        rows = self.num_running / self.kv_cache.max_num_seqs if self.kv_cache.states is not None else 0.0
        return max(self._blocks.usage, rows)

    @property
    def prefix_cache_stats(self) -> PrefixCacheStats:
        """How much of the prompts was found in the prefix cache."""
        return self._blocks.stats

    @property
    def num_free_slots(self) -> int:
        """Slots without a running request; all of them when idle."""
        return self._scheduler.num_free_slots

    def step(self) -> list[RequestOutput]:
        """Run one step; returns what it changed, for each request as its `output_kind` wants it.

        After an error the running requests are gone, since what they have cached can no longer be trusted; waiting ones
        stay, their blocks are free, and the next step goes on with them.

        Raises:
            PluginError: A method of the model failed, or (a ContractError) gave what cannot be used.
            DeviceError: There was not enough memory.
        """
        batch: list[Scheduled] = []
        self._follow_wrappers()
        try:
            batch = self._scheduler.schedule()
            if not batch:
                return []
            for item in batch:
                item.request.stats.scheduled()
            with torch.inference_mode():
                logits = self._runner.run(batch)
                if logits is not None and any(item.request.wants_prompt_logits for item in batch):
                    logits = _take_prompt_logprobs(batch, logits)
                sampling = [item.request for item in batch if item.samples]
                sampled = None
                if sampling and logits is not None:
                    sampled = self._sampler.sample(logits, [r.sampling for r in sampling])
            for item in batch:
                item.request.num_computed = item.stop
            outputs: list[RequestOutput] = []
            if sampled is not None:
                for request, token, logprobs in zip(sampling, sampled.token_ids, sampled.logprobs, strict=True):
                    request.append(token, logprobs)
                    if request.finish_reason is not None:
                        self._scheduler.remove(request)
                        del self._requests[request.request_id]
                        self._recorder.finished(request.stats, request.num_prompt_tokens)
                    if (output := self._output(request)) is not None:
                        outputs.append(output)
            return outputs
        except BaseException as error:
            running = [name for name, request in self._requests.items() if request.slot is not None]
            # An output of several that is lost takes its request with it.
            lost = list(dict.fromkeys(self._parents[n][0].request_id if n in self._parents else n for n in running))
            self.abort_request(lost)
            self._scheduler.reset_cache()  # a prefix may have been registered that was never computed
            if isinstance(error, Exception):
                error.add_note(f"torchplug: in a step of {len(batch)} requests; dropped: {', '.join(lost)}")
                if lacks_memory(error) and not isinstance(error, TorchplugError):
                    raise no_memory(self.model.subject, error, RUNNING) from error
            raise

    def close(self) -> None:
        """Drop all requests and free the cache; the model itself stays open."""
        self.abort_request([*self._parallel, *self._requests])
        self._runner.close()

    def _output(self, request: Request) -> RequestOutput | None:
        """What to tell the caller after a step, in the name under which the request was added."""
        output = request.output()
        if request.request_id not in self._parents:
            return output
        parallel, index = self._parents[request.request_id]
        if request.finish_reason is not None:
            del self._parents[request.request_id]
        if output is not None:
            output = parallel.take(index, output)
        if output is not None and output.finished:
            del self._parallel[parallel.request_id]
        return output

    def _prompt_problems(self, token_ids: list[int]) -> list[Problem]:
        problems = []
        if not token_ids:
            problems.append(Problem("prompt", "has no tokens", "give at least one token"))
        if len(token_ids) >= self.max_model_len:
            problems.append(
                Problem(
                    "prompt",
                    f"has {len(token_ids)} tokens and needs room for a new one; max_model_len is {self.max_model_len}",
                    "shorten it, or raise max_model_len as far as the model allows",
                )
            )
        elif len(token_ids) >= self.kv_cache.max_tokens:
            problems.append(
                Problem(
                    "prompt",
                    f"has {len(token_ids)} tokens and needs room for a new one; the KV cache of "
                    f"{self.kv_cache.num_bytes} bytes holds {self.kv_cache.max_tokens} tokens of one request",
                    "shorten it, or load with a larger kv_cache_memory_bytes",
                )
            )
        whole_above, budget = self._runner.whole_above, self.model.vllm_config.scheduler_config.max_num_batched_tokens
        if whole_above is not None and len(token_ids) > max(whole_above, budget):
            problems.append(
                Problem(
                    "prompt",
                    f"has {len(token_ids)} tokens; with this model's dynamic rotary scaling, a prompt past its trained "
                    f"{whole_above} tokens is computed in one step, and max_num_batched_tokens is {budget}",
                    f"load with max_num_batched_tokens={len(token_ids)} or more",
                )
            )
        bad = [i for i in token_ids if i < 0 or (self.vocab_size is not None and i >= self.vocab_size)]
        if bad:
            shown = ", ".join(map(_written, bad[:5])) + (", ..." if len(bad) > 5 else "")
            limit = "0 or above" if self.vocab_size is None else f"from 0 to {self.vocab_size - 1}"
            problems.append(Problem("prompt", f"token ids {shown} are outside the vocabulary", f"use ids {limit}"))
        return problems

    def _params_problems(self, params: SamplingParams) -> list[Problem]:
        problems = []
        for name, texts, instead in (
            ("stop", params.stop, "stop_token_ids"),
            ("bad_words", params.bad_words, "logit_bias or allowed_token_ids"),
        ):
            if texts and self.tokenizer is None:
                fix = f"use {instead}, or load with a tokenizer"
                problems.append(Problem(name, f"{name} texts need a tokenizer, and there is none", fix))
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias or ()),
            ("allowed_token_ids", params.allowed_token_ids or ()),
        ):
            outside = [i for i in ids if self.vocab_size is not None and i >= self.vocab_size]
            if outside:
                shown = ", ".join(map(_written, outside[:5])) + (", ..." if len(outside) > 5 else "")
                says = f"token ids {shown} are outside the vocabulary"
                problems.append(Problem(name, says, f"use ids below {self.vocab_size}"))
        return problems


_ROWS: Final = 256
"""Prompt rows whose log-probabilities are computed at once: a row of a large vocabulary takes 0.6 MB."""


def _take_prompt_logprobs(batch: Sequence[Scheduled], logits: Tensor) -> Tensor:
    """Hand the prompts' rows to the requests that asked for them; returns the rows from which a token is sampled."""
    sampled: list[int] = []
    row = 0
    for item in batch:
        request, rows = item.request, item.request.prompt_rows(item.start, item.stop)
        number = request.params.prompt_logprobs or 0
        for first in range(0, len(rows), _ROWS):
            part = rows[first : first + _ROWS]
            tokens = [request.token_ids[item.start + each + 1] for each in part]
            numbers = [number] * len(part)
            request.take_prompt_logprobs(token_logprobs(logits[row + first : row + first + len(part)], tokens, numbers))
        row += len(rows)
        if item.samples:
            sampled.append(row)
            row += 1
    return logits[torch.tensor(sampled, dtype=torch.int64, device=logits.device)]


def _spellings(words: Iterable[str], tokenizer: Tokenizer | None) -> list[list[int]]:
    """The tokens of each word, as they follow a space and as they do not."""
    if tokenizer is None:
        return []
    found: list[list[int]] = []
    for word in words:
        spelt = [tokenizer.encode(text, add_special_tokens=False) for text in (word, f" {word.lstrip()}")]
        if not any(spelt):
            raise RequestError("request", Problem("bad_words", f"{word!r:.80} has no tokens", "leave it out"))
        found += [ids for ids in spelt if ids and ids not in found]
    return found


def _written(token_id: int) -> str:
    """A token id in a message; Python refuses to write out very large integers."""
    return str(token_id) if token_id < 10**18 else "above 10**18"


def _eos_token_ids(model: LoadedModel, tokenizer: Tokenizer | None) -> frozenset[int]:
    """End-of-sequence ids: generation_config's (config.json's where it has none), and the tokenizer's own."""
    ids: set[int] = set()
    checkpoint = model.checkpoint
    if checkpoint is not None:
        found: Any = checkpoint.generation_config.get("eos_token_id")
        if found is None:
            found = checkpoint.config.get("eos_token_id")
        ids.update(found if isinstance(found, list) else [] if found is None else [found])
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
