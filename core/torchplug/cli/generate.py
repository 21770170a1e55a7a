"""`torchplug generate`: answer one prompt, several in one batch, or a file of them."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchplug.cli.answer import AnswerWriter
from torchplug.cli.model_options import Choices, model_options
from torchplug.cli.options import json_option, print_json
from torchplug.engine.sampling_params import RequestOutputKind
from torchplug.errors import Problem, RequestError

if TYPE_CHECKING:
    from torchplug.engine.llm import LLM
    from torchplug.engine.outputs import CompletionOutput, Logprob, RequestOutput
    from torchplug.engine.prompts import Prompt
    from torchplug.engine.sampling_params import SamplingParams


@click.command()
@click.argument("prompts", nargs=-1, metavar="PROMPT...")
@model_options(max_tokens=256)
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the model's chat template.")
@click.option(
    "--logprobs", type=int, metavar="N", help="Show each token's log-probability and the N most probable ones."
)
@click.option(
    "--input",
    "source",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Answer a file of requests, one JSON object a line, into --output.",
)
@click.option(
    "--output",
    "target",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where the answers of --input go, one JSON object a line, in the order in which they are complete.",
)
@json_option
@click.pass_context
def generate(
    context: click.Context,
    choices: Choices,
    prompts: tuple[str, ...],
    raw: bool,
    logprobs: int | None,
    source: Path | None,
    target: Path | None,
    as_json: bool,
) -> None:
    """Answer each PROMPT; `-` is read from standard input.

    The model's chat template is applied where it has one. Answers go to standard output as they are written, figures
    to standard error.

        torchplug generate "What is the capital of France?"

    With --input, a line is {"prompt": "..."} (taken as it is), {"messages": [...]} (written out by the chat template)
    or {"prompt_token_ids": [...]}, with an "id" and "sampling_params" if you like; its answer is one line of --output.
    The same command goes on after a kill: a line that has an answer is not asked again, a bad line has its error there.

        torchplug generate --input requests.jsonl --output answers.jsonl
    """
    if source is not None or target is not None:
        if source is None or target is None:
            raise click.UsageError("--input and --output go together")
        if prompts or raw or choices.system is not None or as_json:
            raise click.UsageError("--input takes no PROMPT, --raw, --system or --json: each line says what it wants")
        _answer_file(context, choices, source, target, logprobs)
        return
    if not prompts:
        raise click.UsageError("Missing argument 'PROMPT...', or --input FILE --output FILE.")
    if raw and choices.system is not None:
        raise click.UsageError("--system is a message of a conversation; --raw has none")
    params = choices.sampling_params(logprobs=logprobs)
    if prompts.count("-") > 1:
        raise click.UsageError("standard input can be read once: give - once")
    texts = [_standard_input() if prompt == "-" else prompt for prompt in prompts]
    with choices.loading.open_llm() as llm:
        requests = [_prompt(llm, text, choices.system, raw) for text in texts]
        if as_json:
            outputs = llm.generate(requests, params, use_tqdm=False)
            print_json([_as_dict(text, output) for text, output in zip(texts, outputs, strict=True)])
        else:
            _stream(llm, texts, requests, params)


def _answer_file(context: click.Context, choices: Choices, source: Path, target: Path, logprobs: int | None) -> None:
    from torchplug.cli.batch_file import BatchFile
    from torchplug.engine.progress import progress_bar

    choices.sampling_params(logprobs=logprobs)  # refused now, not in every line
    batch = BatchFile(source, target, defaults={**choices.sampling, "logprobs": logprobs}, model=choices.loading.model)
    tally = batch.tally
    try:
        with batch.open():
            if tally.done < tally.total:
                with choices.loading.open_llm() as llm, progress_bar("answering", enabled=True) as progress:
                    most = 4 * llm.model.vllm_config.scheduler_config.max_num_seqs
                    progress(tally.done, tally.total)
                    for _ in batch.run(llm, most_in_flight=most):
                        progress(tally.done, tally.total)
    except KeyboardInterrupt:
        click.echo(f"{tally.done} of {tally.total} lines are done; the same command goes on from here", err=True)
        raise
    before = f", {tally.done_before} of them before this run" if tally.done_before else ""
    click.echo(f"{tally.done} of {tally.total} lines are done{before}", err=True)
    if tally.failed:
        shown = ", ".join(map(str, sorted(tally.failed)[:10])) + (", ..." if len(tally.failed) > 10 else "")
        click.echo(f"{len(tally.failed)} have an error instead of an answer: line {shown} of {source}", err=True)
        context.exit(1)


def _standard_input() -> str:
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        says = f"is not {error.encoding} text: byte {error.start} is 0x{error.object[error.start]:02x}"
        raise RequestError("standard input", Problem("", says, "convert it first, e.g. with iconv")) from None
    if not text.strip():
        raise RequestError("standard input", Problem("", "is empty", "write the prompt to it"))
    return text.removesuffix("\n")


def _prompt(llm: LLM, text: str, system: str | None, raw: bool) -> Prompt:
    from torchplug.engine.prompts import chat_prompt

    tokenizer = llm.get_tokenizer()
    if raw or (tokenizer.chat_template is None and system is None):
        return text
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return chat_prompt(tokenizer, messages)


def _stream(llm: LLM, texts: list[str], prompts: list[Prompt], params: SamplingParams) -> None:
    """Run all prompts in one batch; each answer is shown as it comes, once those before it are complete."""
    engine, writer = llm.llm_engine, AnswerWriter()
    params = replace(params, output_kind=RequestOutputKind.DELTA)
    arrived: dict[str, deque[RequestOutput]] = {}
    for index, prompt in enumerate(prompts):
        name = f"prompt {index}"
        engine.add_request(name, prompt, params)
        arrived[name] = deque()

    def parts(name: str) -> Iterator[CompletionOutput]:
        finished = False
        while not finished:
            while not arrived[name]:
                for output in engine.step():
                    arrived[output.request_id].append(output)
                    writer.count(len(output.outputs[0].token_ids))
            output = arrived[name].popleft()
            finished = output.finished
            yield output.outputs[0]

    try:
        for text, name in zip(texts, arrived, strict=True):
            if len(texts) > 1:
                writer.write(f">>> {text}\n")
            logprobs: list[dict[int, Logprob]] = []
            for part in parts(name):
                writer.write(part.text)
                logprobs += part.logprobs or []
            writer.end_line()
            for entries in logprobs:
                writer.write(_logprob_line(entries))
    finally:
        writer.end_line()
    writer.print_figures()


def _logprob_line(entries: dict[int, Logprob]) -> str:
    """The sampled token, then the most probable ones: `-0.013 'Paris'   -4.52 'Lyon'`."""
    return "   ".join(f"{entry.logprob:8.3f} {entry.decoded_token!r}" for entry in entries.values()) + "\n"


def _as_dict(text: str, output: RequestOutput) -> dict[str, Any]:
    (answer,) = output.outputs
    result: dict[str, Any] = {
        "prompt": text,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "token_ids": answer.token_ids,
    }
    if answer.logprobs is not None:
        result["logprobs"] = [
            [{"token_id": token_id, **asdict(entry)} for token_id, entry in entries.items()]
            for entries in answer.logprobs
        ]
    return result
