"""`LLM`: offline generation, with the names, arguments and results of vLLM's class of that name."""

from __future__ import annotations

import difflib
import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from torchplug.config import size_problems
from torchplug.engine.outputs import RequestOutput
from torchplug.engine.progress import progress_bar
from torchplug.engine.prompts import CHAT_NOT_SERVED, Prompt, chat_prompt, refuse_others, split_prompts
from torchplug.engine.sampling_params import RequestOutputKind, SamplingParams
from torchplug.errors import Problem, RequestError

if TYPE_CHECKING:
    import os

    import torch

    from torchplug.engine.chat_template import Message
    from torchplug.engine.llm_engine import LLMEngine
    from torchplug.engine.metrics import EngineMetrics
    from torchplug.engine.parallel_sampling import ParallelRequest
    from torchplug.engine.request import Request
    from torchplug.engine.tokenizer import Tokenizer

_NOT_SERVED: Final[dict[str, Any]] = {
    "tokenizer": None,
    "tokenizer_mode": "auto",
    "trust_remote_code": False,
    "allowed_local_media_path": "",
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "quantization": None,
    "revision": None,
    "tokenizer_revision": None,
    "chat_template": None,
    "gpu_memory_utilization": None,
    "kv_cache_dtype": "auto",
    "swap_space": 0,
    "cpu_offload_gb": 0,
    "disable_custom_all_reduce": False,
    "hf_token": None,
    "hf_overrides": None,
    "mm_processor_kwargs": None,
    "limit_mm_per_prompt": None,
    "pooler_config": None,
    "structured_outputs_config": None,
    "allowed_media_domains": None,
    "attention_config": None,
    "profiler_config": None,
    "quantization_config": None,
    "spec_method": None,
    "spec_model": None,
    "spec_tokens": None,
    "offload_group_size": 0,
    "offload_num_in_group": 1,
    "offload_prefetch_step": 1,
    "offload_params": None,
    "enable_return_routed_experts": False,
    "return_sampling_mask": False,
    "compilation_config": None,
    "speculative_config": None,
    "enable_lora": False,
    "enable_chunked_prefill": True,
    "runner": "auto",
    "convert": "auto",
    "task": "auto",
    "load_format": "auto",
    "max_logprobs": None,
    "logits_processors": None,
    "num_gpu_blocks_override": None,
    "disable_log_stats": True,
    "generation_config": "vllm",
    "distributed_executor_backend": None,
}
"""vLLM's other arguments, with the value that means what this version does anyway: any other value is an error."""

_INSTEAD: Final = {
    "gpu_memory_utilization": "leave it out, or give kv_cache_gib",
    "num_gpu_blocks_override": "leave it out, or give kv_cache_gib",
    "tokenizer": "leave it out: the checkpoint's own is used",
    "chat_template": "leave it out, or give it to LLM.chat",
}

_MAX_NUM_BATCHED_TOKENS: Final = 2048
_BLOCK_SIZE: Final = 16


class LLM:
    """A model with its tokenizer and an engine.

    One thread at a time uses it. It is a context manager; `close` frees the model.

    Args:
        model: A checkpoint directory, a GGUF file, or "demo".
        device: "auto", "cpu", "cuda", "cuda:1", ...; a device that is missing is an error.
        dtype: "auto" (the checkpoint's), "float32", "bfloat16" or "float16".
        skip_tokenizer_init: Token ids in, token ids out.
        enforce_eager: Call the model itself in every step. False: on CUDA, decode steps are replayed from CUDA graphs
            where the model allows it. Nothing to decide on other devices.
        compile: Run the model through `torch.compile`: minutes at the start, for steps that may be faster.
        max_model_len: Longest prompt and output together, in tokens; None: what the checkpoint says.
        max_num_seqs: Most requests that run at once.
        max_num_batched_tokens: Most tokens in one step; longer prompts are read in chunks.
        block_size: Tokens of a block of the KV cache; None: 16.
        enable_prefix_caching: Keep what prompts have in common in the cache; None: True.
        kv_cache_memory_bytes: Most bytes of the KV cache; None: a share of what is free after loading.
        kv_cache_gib: The same in GiB (2**30 bytes); give one of the two.
        seed: For the draws of requests without a seed of their own.
        use_tqdm_on_load: Show progress while weights load, where standard error is a terminal, and print the size of
            the KV cache and how many requests it has room for to standard error.
        plugins: Which distributions' plugins take part, e.g. "*,-foo"; None reads TORCHPLUG_PLUGINS.
        owners: Architecture to distribution, where more than one offers it.

    Raises:
        RequestError: An argument is unknown (with the nearest name), not served by this version, or out of range.
        CheckpointError, PluginError, DeviceError: As `Host.load`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        skip_tokenizer_init: bool = False,
        enforce_eager: bool = False,
        compile: bool = False,
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int | None = None,
        block_size: int | None = None,
        enable_prefix_caching: bool | None = None,
        kv_cache_memory_bytes: int | None = None,
        kv_cache_gib: float | None = None,
        seed: int | None = 0,
        use_tqdm_on_load: bool = True,
        plugins: str | None = None,
        owners: Mapping[str, str] | None = None,
        **others: Any,
    ) -> None:
        names = list(LLM.__init__.__kwdefaults__ or {})
        problems = _argument_problems(others, names)
        if enable_prefix_caching not in (None, True, False):
            says = f"expected True, False or None, got {enable_prefix_caching!r}"
            problems.append(Problem("enable_prefix_caching", says, "correct enable_prefix_caching"))
        problems += size_problems(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
        )
        if kv_cache_gib is not None:
            problems += _gib_problems(kv_cache_gib, kv_cache_memory_bytes)
        if compile and enforce_eager:
            says = "compile=True runs what torch.compile makes of the model, enforce_eager=True the model itself"
            problems.append(Problem("enforce_eager", says, "leave one of them out"))
        if problems:
            raise RequestError("LLM(...)", problems)

        from torchplug.host.torch_import import import_torch

        import_torch()
        from torchplug.engine.llm_engine import LLMEngine
        from torchplug.engine.tokenizer import Tokenizer
        from torchplug.host import Host
        from torchplug.host.checkpoint import open_checkpoint

        checkpoint = open_checkpoint(model)
        # Before the weights, so that a missing tokenizer is said at once.
        tokenizer = None if skip_tokenizer_init else Tokenizer.from_checkpoint(checkpoint)
        with progress_bar(f"loading {checkpoint.name}", enabled=use_tqdm_on_load, unit="bytes") as progress:
            loaded = Host(plugins, owners).load(
                checkpoint,
                device=device,
                dtype=dtype,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens or _MAX_NUM_BATCHED_TOKENS,
                block_size=block_size or _BLOCK_SIZE,
                enable_prefix_caching=enable_prefix_caching is not False,
                kv_cache_memory_bytes=kv_cache_memory_bytes if kv_cache_gib is None else int(kv_cache_gib * 2**30),
                enforce_eager=enforce_eager,
                compile=compile,
                progress=progress,
            )
        self.model = loaded
        slow = compile or loaded.device.type == "cuda"
        doing = "compiling" if compile else "recording decode steps of"
        with progress_bar(f"{doing} {checkpoint.name}", enabled=use_tqdm_on_load and slow) as progress:
            self._engine: LLMEngine | None = LLMEngine(loaded, tokenizer, seed=seed, progress=progress)
        if use_tqdm_on_load:
            print(self._engine.kv_cache, file=sys.stderr)
            if slow:
                print(self._engine.execution, file=sys.stderr)
        self._ids = itertools.count()
        self._mailboxes: dict[str, deque[RequestOutput]] = {}
        self._lock = threading.Lock()

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine, for requests that come and go one by one."""
        if self._engine is None:
            raise RequestError("LLM", Problem("", "is closed", "make a new LLM(...)"))
        return self._engine

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer: encode, decode, apply_chat_template.

        Raises:
            RequestError: There is none (skip_tokenizer_init=True).
        """
        tokenizer = self.llm_engine.tokenizer
        if tokenizer is None:
            raise RequestError("LLM", Problem("tokenizer", "there is none", "load without skip_tokenizer_init=True"))
        return tokenizer

    def metrics(self) -> EngineMetrics:
        """Requests, waiting times and cache use so far."""
        return self.llm_engine.metrics()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        **others: Any,
    ) -> list[RequestOutput]:
        """Continue each prompt. The text is taken as it is: `chat` applies the chat template.

        Args:
            prompts: One prompt or several: a text, token ids, {"prompt": ...}, {"prompt_token_ids": ...}.
            sampling_params: One for all, or one for each prompt; None: `SamplingParams()`.
            use_tqdm: Show progress, where standard error is a terminal.

        Returns one output for each prompt, in their order.

        Raises:
            RequestError: Naming the prompts that are not acceptable, before anything runs; or an argument that is not
                served.
        """
        refuse_others("LLM.generate", others, ("lora_request", "priority", "tokenization_kwargs", "prompt_type"))
        return self._run(split_prompts(prompts), sampling_params, bool(use_tqdm))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer each conversation, written out by the model's chat template.

        Args:
            messages: One conversation (a list of {"role": ..., "content": ...}), or a list of conversations.
            sampling_params: As in `generate`.
            use_tqdm: As in `generate`.
            chat_template: Jinja source instead of the model's own.
            add_generation_prompt: End with what opens the assistant's turn.
            tools: Tool schemas for the template.
            chat_template_kwargs: Further variables for the template.

        Raises:
            RequestError: As `generate`; and what the template refuses.
        """
        refuse_others("LLM.chat", others, CHAT_NOT_SERVED)
        tokenizer = self.get_tokenizer()
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
            says = f"expected a conversation or a list of conversations, got {type(messages).__name__}"
            raise RequestError("LLM.chat", Problem("messages", says, 'pass [{"role": "user", "content": "..."}]'))
        one = bool(messages) and isinstance(messages[0], Mapping)
        prompts: list[Prompt] = []
        problems: list[Problem] = []
        for index, conversation in enumerate([messages] if one else messages):
            try:
                prompt = chat_prompt(
                    tokenizer,
                    conversation,  # type: ignore[arg-type]
                    add_generation_prompt=add_generation_prompt,
                    chat_template=chat_template,
                    tools=tools,
                    chat_template_kwargs=chat_template_kwargs,
                )
                prompts.append(prompt)
            except RequestError as error:
                problems += error.problems if one else _at("conversation", index, error)
        if problems:
            raise RequestError("LLM.chat", problems)
        return self._run(prompts, sampling_params, bool(use_tqdm))

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Continue one prompt; yields what each step adds (`text` and `token_ids` hold only the new part).

        Leaving the loop early, by an exception or by closing the iterator, drops the request.

        Raises:
            RequestError: The prompt or the parameters are not acceptable.
        """
        engine = self.llm_engine
        params = replace(sampling_params or SamplingParams(), output_kind=RequestOutputKind.DELTA)
        request = engine.build_request(str(next(self._ids)), prompt, params)
        return self._outputs(engine, [request])

    def close(self) -> None:
        """Drop what is running and free the model. Harmless when repeated."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            self.model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _outputs(
        self, engine: LLMEngine, requests: Sequence[Request | ParallelRequest]
    ) -> Generator[RequestOutput, None, None]:
        """Run requests to their end, yielding their outputs as they come. However the caller leaves, none stays behind.

        Several of these may be under way at once (two streams, `generate` inside the loop over a stream, or calls on
        several threads): whoever needs a step takes one for all, and each finds its own outputs in its mailbox.
        """
        mailbox: deque[RequestOutput] = deque()
        ids = [request.request_id for request in requests]
        try:
            with self._lock:
                for request in requests:
                    self._mailboxes[request.request_id] = mailbox
                    engine.submit(request)
            unfinished = len(requests)
            while unfinished:
                with self._lock:
                    if not mailbox:  # another thread's step may have filled it meanwhile
                        for output in engine.step():
                            if output.request_id in self._mailboxes:
                                self._mailboxes[output.request_id].append(output)
                    lost = not mailbox and not engine.has_unfinished_requests()
                if lost:
                    says = f"{unfinished} were dropped: aborted, or running when a step failed"
                    raise RequestError("requests", Problem("", says, "ask again"))
                while mailbox:
                    output = mailbox.popleft()
                    unfinished -= output.finished
                    yield output
        finally:
            with self._lock:
                engine.abort_request(ids)
                for name in ids:
                    self._mailboxes.pop(name, None)

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        show_progress: bool,
    ) -> list[RequestOutput]:
        engine = self.llm_engine
        requests = self._checked_requests(engine, prompts, _params_for(prompts, sampling_params))
        finished: dict[str, RequestOutput] = {}
        with (
            progress_bar("generating", enabled=show_progress) as progress,
            closing(self._outputs(engine, requests)) as outputs,
        ):
            for output in outputs:
                finished[output.request_id] = output
                progress(len(finished), len(requests))
        return [finished[request.request_id] for request in requests]

    def _checked_requests(
        self, engine: LLMEngine, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> list[Request | ParallelRequest]:
        """All requests, or one error that names every prompt that is not acceptable."""
        requests: list[Request | ParallelRequest] = []
        problems: list[Problem] = []
        for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            try:
                requests.append(engine.build_request(str(next(self._ids)), prompt, one))
            except RequestError as error:
                problems += _at("prompt", index, error)
        if problems:
            raise RequestError("LLM.generate", problems)
        return requests


def _params_for(
    prompts: Sequence[Prompt], given: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """Parameters for each prompt; only the final output of a request is wanted."""
    if given is None:
        given = SamplingParams()
    if isinstance(given, SamplingParams):
        return [replace(given, output_kind=RequestOutputKind.FINAL_ONLY)] * len(prompts)
    if not isinstance(given, Sequence) or not all(isinstance(item, SamplingParams) for item in given):
        raise RequestError(
            "sampling_params", Problem("", "expected SamplingParams or a list of them", "pass SamplingParams(...)")
        )
    if len(given) != len(prompts):
        raise RequestError(
            "sampling_params",
            Problem("", f"{len(given)} for {len(prompts)} prompts", "pass one for all prompts, or one for each"),
        )
    return [replace(item, output_kind=RequestOutputKind.FINAL_ONLY) for item in given]


def _at(what: str, index: int, error: RequestError) -> list[Problem]:
    """The error's problems, each with the place of its prompt in the list."""
    return [
        Problem(f"{what} {index}" + (f": {problem.where}" if problem.where else ""), problem.says, problem.fix)
        for problem in error.problems
    ]


def _gib_problems(gib: Any, memory_bytes: Any) -> list[Problem]:
    if memory_bytes is not None:
        return [Problem("kv_cache_gib", "kv_cache_memory_bytes says the same in bytes", "give one of the two")]
    if not isinstance(gib, (int, float)) or isinstance(gib, bool) or not 0 < gib < 2**33:
        says = f"expected a number of GiB above 0, got {gib!r:.80}"
        return [Problem("kv_cache_gib", says, "correct kv_cache_gib, e.g. 0.5")]
    return []


def _argument_problems(others: Mapping[str, Any], names: Sequence[str]) -> list[Problem]:
    problems = []
    for name, value in others.items():
        if name not in _NOT_SERVED:
            close = difflib.get_close_matches(name, ["model", *names, *_NOT_SERVED], n=1)
            fix = f"did you mean {close[0]!r}?" if close else f"the names are model, {', '.join(names)}"
            problems.append(Problem(name, "no such argument", fix))
        elif value is not None and value != _NOT_SERVED[name]:
            fix = _INSTEAD.get(name, "leave it out")
            problems.append(Problem(name, f"not served by this version, got {value!r:.80}", fix))
    return problems
