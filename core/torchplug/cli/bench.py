"""`torchplug bench throughput | latency | startup`: how fast a model runs on this machine."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from torchplug.cli.bench_report import Report, check_plot
from torchplug.cli.model_options import Loading, loading_options
from torchplug.cli.options import json_option

if TYPE_CHECKING:
    from torchplug.engine.llm import LLM
    from torchplug.engine.outputs import RequestOutput

Function = TypeVar("Function", bound=Callable[..., Any])


@click.group()
def bench() -> None:
    """How fast a model runs here. Prompts are random tokens, the end-of-sequence token is ignored, answers are greedy.

    Every figure is taken in several rounds after a warm-up; Ctrl-C shows the rounds so far.
    """


@dataclass(frozen=True, slots=True)
class Plan:
    """What every benchmark is told: which model, how often, and where the figures go."""

    loading: Loading
    rounds: int
    warmup: int
    seed: int
    plot: Path | None
    as_json: bool

    def report(self, name: str, units: dict[str, str], **settings: Any) -> Report:
        """An empty report; a plot that could not be drawn is refused now."""
        check_plot(self.plot)
        return Report(name, units, {"model": self.loading.model, **settings, **self.loading.chosen})


def _plan_options(function: Function) -> Function:
    """The options of every benchmark; they arrive as one argument, `plan`."""

    @wraps(function)
    def command(
        *, loading: Loading, rounds: int, warmup: int, seed: int, plot: Path | None, as_json: bool, **others: Any
    ) -> Any:
        return function(plan=Plan(loading, rounds, warmup, seed, plot, as_json), **others)

    at_least_1 = click.IntRange(min=1)
    result: Any = json_option(command)
    for option in reversed(
        (
            click.option("--rounds", type=at_least_1, default=5, show_default=True, help="Rounds that count."),
            click.option(
                "--warmup", type=click.IntRange(min=0), default=1, show_default=True, help="Rounds before these."
            ),
            click.option("--seed", type=int, default=0, show_default=True, help="Of the random prompts."),
            click.option(
                "--plot",
                type=click.Path(dir_okay=False, path_type=Path),
                metavar="FILE",
                help="Draw the rounds into a picture, e.g. bench.png; needs torchplug[plot].",
            ),
        )
    ):
        result = option(result)
    return loading_options(result)  # type: ignore[no-any-return]


def _length(name: str, default: int, text: str) -> Callable[[Function], Function]:
    return click.option(name, type=click.IntRange(min=1), default=default, show_default=True, help=text)


@bench.command()
@_length("--input-len", 128, "Tokens of each prompt.")
@_length("--output-len", 128, "New tokens of each answer.")
@_length("--num-prompts", 64, "Prompts that are given at once.")
@_length("--max-num-seqs", 32, "Requests that run at once.")
@click.option(
    "--shared-len",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Tokens with which all prompts of a round begin; of --input-len.",
)
@click.option("--prefix-caching/--no-prefix-caching", default=True, show_default=True, help="Compute a beginning once.")
@_plan_options
def throughput(
    input_len: int,
    output_len: int,
    num_prompts: int,
    max_num_seqs: int,
    shared_len: int,
    prefix_caching: bool,
    plan: Plan,
) -> None:
    """Many prompts at once: how much is done per second."""
    units = {"requests": "1/s", "output tokens": "tokens/s", "all tokens": "tokens/s", "time": "s"}
    if shared_len > input_len:
        raise click.UsageError(f"--shared-len {shared_len} is more than --input-len {input_len}")
    report = plan.report(
        "throughput",
        units,
        input_len=input_len,
        output_len=output_len,
        num_prompts=num_prompts,
        max_num_seqs=max_num_seqs,
        shared_len=shared_len,
        prefix_caching=prefix_caching,
    )
    with _loaded(report, plan, input_len + output_len, max_num_seqs, enable_prefix_caching=prefix_caching) as llm:

        def one_round(index: int) -> dict[str, float]:
            seconds, _ = _timed(llm, num_prompts, input_len, output_len, f"{plan.seed} {index}", shared_len)
            return {
                "requests": num_prompts / seconds,
                "output tokens": num_prompts * output_len / seconds,
                "all tokens": num_prompts * (input_len + output_len) / seconds,
                "time": seconds,
            }

        _run(report, plan, one_round)


@bench.command()
@_length("--input-len", 128, "Tokens of each prompt.")
@_length("--output-len", 128, "New tokens of each answer.")
@_length("--batch", 1, "Prompts that run together.")
@_plan_options
def latency(input_len: int, output_len: int, batch: int, plan: Plan) -> None:
    """One batch at a time: how long an answer takes, its first token, and each token after it."""
    units = {"time": "s", "time to first token": "ms", "time per token": "ms", "decode": "tokens/s"}
    if output_len < 2:
        raise click.UsageError("--output-len must be at least 2: the time per token is taken after the first one")
    report = plan.report("latency", units, input_len=input_len, output_len=output_len, batch=batch)
    with _loaded(report, plan, input_len + output_len, batch) as llm:

        def one_round(index: int) -> dict[str, float]:
            seconds, outputs = _timed(llm, batch, input_len, output_len, f"{plan.seed} {index}")
            stats = [output.metrics for output in outputs if output.metrics is not None]
            first = statistics.median(each.first_token_latency for each in stats)
            between = statistics.median(each.inter_token_time or 0.0 for each in stats)
            return {
                "time": seconds,
                "time to first token": 1000 * first,
                "time per token": 1000 * between,
                "decode": batch / between if between else 0.0,
            }

        _run(report, plan, one_round)


@bench.command()
@_length("--input-len", 16, "Tokens of the prompt.")
@_plan_options
def startup(input_len: int, plan: Plan) -> None:
    """A fresh process in each round, from its creation to the first token of an answer."""
    units = {"first token": "s", "python": "s", "import": "s", "load": "s", "answer": "s"}
    report = plan.report("startup", units, input_len=input_len)

    def one_round(index: int) -> dict[str, float]:
        task = {**asdict(plan.loading), "input_len": input_len, "seed": f"{plan.seed} {index}"}
        begin = time.time()
        done = subprocess.run(
            [sys.executable, "-c", _START, json.dumps(task)], stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode:
            click.echo(done.stderr, err=True, nl=False)
            click.get_current_context().exit(1)
        times = json.loads(done.stdout.splitlines()[-1])
        if "kv_cache_bytes" not in report.settings:
            click.echo(times["says"], err=True)
            report.settings |= times["cache"]
        return {
            "first token": times["answered"] - begin,
            "python": times["started"] - begin,
            "import": times["imported"] - times["started"],
            "load": times["loaded"] - times["imported"],
            "answer": times["answered"] - times["loaded"],
        }

    _run(report, plan, one_round)


_START: Final = """
import json, random, sys, time
times = {"started": time.time()}
from torchplug import LLM, SamplingParams, TorchplugError
from torchplug.host.torch_import import import_torch
try:
    import_torch()
except TorchplugError as error:
    sys.exit(str(error))
times["imported"] = time.time()
task = json.loads(sys.argv[1])
try:
    options = dict(skip_tokenizer_init=True, max_num_seqs=1, max_model_len=task["input_len"] + 1, **task["arguments"])
    llm = LLM(task["model"], use_tqdm_on_load=False, **options)
    times["loaded"] = time.time()
    draw = random.Random(task["seed"])
    ids = [draw.randrange(llm.llm_engine.vocab_size or 256) for _ in range(task["input_len"])]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    times["answered"] = time.time()
    times |= {"cache": llm.llm_engine.kv_cache.as_dict(), "says": str(llm.llm_engine.kv_cache)}
except TorchplugError as error:
    sys.exit(str(error))
print(json.dumps(times))
"""
"""What a fresh process does; wall-clock times, because its parent's clock must be the same."""


@contextmanager
def _loaded(report: Report, plan: Plan, length: int, max_num_seqs: int, **more: Any) -> Iterator[LLM]:
    """The model of a benchmark; what was found out about it goes into the report's settings."""
    options = {"skip_tokenizer_init": True, "max_model_len": length, "max_num_seqs": max_num_seqs, **more}
    with plan.loading.open_llm(**options) as llm:
        found = {"device": str(llm.model.device), "dtype": str(llm.model.dtype).removeprefix("torch.")}
        report.settings |= {**found, **llm.llm_engine.kv_cache.as_dict()}
        yield llm


def _timed(
    llm: LLM, count: int, input_len: int, output_len: int, seed: str, shared_len: int = 0
) -> tuple[float, list[RequestOutput]]:
    """Seconds for `count` new random prompts together, and their outputs. New ones, so that no cache knows them."""
    from torchplug.engine.sampling_params import SamplingParams

    draw = random.Random(seed)
    vocab_size = llm.llm_engine.vocab_size or 256
    shared = [draw.randrange(vocab_size) for _ in range(shared_len)]
    own = input_len - shared_len
    prompts = [{"prompt_token_ids": shared + [draw.randrange(vocab_size) for _ in range(own)]} for _ in range(count)]
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin, outputs


def _run(report: Report, plan: Plan, one_round: Callable[[int], dict[str, float]]) -> None:
    """Warm up, measure, show. An interrupt ends the measuring, not the showing."""
    from torchplug.engine.progress import progress_bar

    rounds, warmup = plan.rounds, plan.warmup
    report.settings |= {"rounds": rounds, "warmup": warmup}
    try:
        with progress_bar(f"{report.name} of {report.settings['model']}", enabled=True) as progress:
            for index in range(-warmup, rounds):
                progress(index + warmup, rounds + warmup)
                figures = one_round(index)
                if index >= 0:
                    report.rounds.append(figures)
    except KeyboardInterrupt:
        report.interrupted = True
        if not report.rounds:
            click.echo("interrupted before the first round was complete", err=True)
            raise
    report.print(as_json=plan.as_json)
    if plan.plot is not None:
        report.plot(plan.plot)
    if report.interrupted:
        click.echo(f"interrupted after {len(report.rounds)} of {rounds} rounds", err=True)
        raise KeyboardInterrupt
