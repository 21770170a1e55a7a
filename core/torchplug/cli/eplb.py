"""`torchplug eplb simulate`: what expert load balancing would do, on a recorded trace or a synthetic load."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from torchplug.cli.bench_report import check_plot
from torchplug.cli.options import json_option, print_json
from torchplug.cli.tables import print_table

if TYPE_CHECKING:
    from torchplug.engine.eplb_simulation import Interval

_DEFAULTS: Final = {"experts": 256, "layers": 58, "top_k": 8, "groups": 1, "expert_bytes": 3 * 7168 * 2048}
"""The shape of DeepSeek-V3, whose weights are of one byte."""

_LEAST_1 = click.IntRange(min=1)
_LEAST_0 = click.IntRange(min=0)


@click.group()
def eplb() -> None:
    """Expert-parallel load balancing."""


@eplb.command()
@click.option("--trace", type=click.Path(path_type=Path), help="A recorded trace; its experts and layers count.")
@click.option(
    "--checkpoint", type=click.Path(path_type=Path), help="A directory: experts, layers, bytes of its config."
)
@click.option("--experts", type=_LEAST_1, help="Logical experts of a layer.  [default: 256]")
@click.option("--layers", type=_LEAST_1, help="Layers with experts.  [default: 58]")
@click.option("--redundant", type=_LEAST_0, default=32, show_default=True, help="Slots beyond one for each expert.")
@click.option("--ranks", type=_LEAST_1, default=32, show_default=True, help="Processes that share the experts.")
@click.option("--nodes", type=_LEAST_1, default=1, show_default=True, help="Machines that the ranks are on.")
@click.option("--groups", type=_LEAST_1, help="Groups of experts that the router chooses among.  [default: 1]")
@click.option("--interval", type=_LEAST_1, default=100, show_default=True, help="Steps from one rebalance to the next.")
@click.option("--expert-bytes", type=_LEAST_1, help="Bytes of an expert of a layer.  [default: DeepSeek-V3's]")
@click.option("--steps", type=_LEAST_1, help="Synthetic: steps.  [default: 1000]")
@click.option("--tokens", type=_LEAST_1, help="Synthetic: tokens of a step, of all ranks.  [default: 4096]")
@click.option("--top-k", type=_LEAST_1, help="Synthetic: experts of a token.  [default: 8]")
@click.option("--skew", type=click.FloatRange(min=0), help="Synthetic: exponent of the power law.  [default: 1.0]")
@click.option("--drift", type=click.FloatRange(min=0), help="Synthetic: change of popularity a step.  [default: 0.01]")
@click.option("--seed", type=_LEAST_0, help="Synthetic: of the random numbers.  [default: 0]")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw balance and bytes into a picture, e.g. eplb.png; needs torchplug[plot].",
)
@json_option
def simulate(
    trace: Path | None,
    checkpoint: Path | None,
    experts: int | None,
    layers: int | None,
    redundant: int,
    ranks: int,
    nodes: int,
    groups: int | None,
    interval: int,
    expert_bytes: int | None,
    plot: Path | None,
    as_json: bool,
    **synthetic: Any,
) -> None:
    """Go through a load step by step, with a rebalance after every interval.

    For each interval: how even the ranks are where nothing is balanced (before) and where the balancer has put the
    experts from the load of the interval before (after), as mean over greatest load, 1 being perfect; what moves
    between ranks; and how long the decision takes on this machine. Ctrl-C shows the intervals so far.
    """
    from torchplug.engine.eplb_simulation import simulate as intervals_of
    from torchplug.engine.expert_placement import ExpertLayout
    from torchplug.engine.load_trace import LoadTrace, RecordedTrace, SyntheticTrace
    from torchplug.engine.moe_config import moe_shape
    from torchplug.engine.progress import progress_bar

    check_plot(plot)
    chosen = {key: value for key, value in synthetic.items() if value is not None}
    if trace is not None and chosen:
        options = ", ".join(f"--{key.replace('_', '-')}" for key in chosen)
        raise click.UsageError(f"{options}: of a synthetic load, and --trace gives a recorded one")
    found = _DEFAULTS | (moe_shape(checkpoint) if checkpoint is not None else {})
    load: LoadTrace
    if trace is not None:
        load = RecordedTrace(trace)
        for name, value, of_trace in (("experts", experts, load.shape[2]), ("layers", layers, load.shape[1])):
            if value not in (None, of_trace):
                raise click.UsageError(f"--{name} {value}: the trace has {of_trace}")
    else:
        shape = {"num_experts": experts or found["experts"], "num_layers": layers or found["layers"]}
        load = SyntheticTrace(num_steps=chosen.pop("steps", 1000), **shape, **({"top_k": found["top_k"]} | chosen))
    num_steps, num_layers, num_experts = load.shape
    layout = ExpertLayout(num_experts, num_experts + redundant, ranks, groups or found["groups"], nodes)
    size = expert_bytes or found["expert_bytes"]
    intervals: list[Interval] = []
    interrupted = False
    try:
        with progress_bar("simulating steps", enabled=not as_json) as progress:
            for each in intervals_of(load, layout, interval, size):
                intervals.append(each)
                progress(each.first_step + each.num_steps, num_steps)
    except KeyboardInterrupt:
        interrupted = True
        if not intervals:
            click.echo("interrupted before the first interval was complete", err=True)
            raise
    settings = {"trace": str(trace) if trace else None, **(asdict(load) if isinstance(load, SyntheticTrace) else {})}
    settings |= {**asdict(layout), "num_layers": num_layers, "interval": interval, "expert_bytes": size}
    if as_json:
        rows = [asdict(each) for each in intervals]
        print_json(
            {"settings": settings, "intervals": rows, "summary": _summary(intervals), "interrupted": interrupted}
        )
    else:
        _print(intervals)
    if plot is not None:
        _draw(intervals, plot, f"{num_experts} + {redundant} experts, {num_layers} layers, {ranks} ranks")
    if interrupted:
        click.echo(f"interrupted after {sum(each.num_steps for each in intervals)} of {num_steps} steps", err=True)
        raise KeyboardInterrupt


def _summary(intervals: list[Interval]) -> dict[str, float]:
    """Over the intervals that follow a rebalance, or over all where there is none."""
    rebalanced = intervals[1:] or intervals
    steps = sum(each.num_steps for each in rebalanced)

    def over_steps(name: str) -> float:
        # Balance is a ratio of times: what is averaged is the time.
        return float(steps / sum(each.num_steps / getattr(each, name) for each in rebalanced))

    def mean(name: str) -> float:
        return float(sum(getattr(each, name) for each in rebalanced) / len(rebalanced))

    before, after = over_steps("balance_before"), over_steps("balance_after")
    names = ("bytes_moved", "bytes_between_nodes", "most_bytes_of_rank", "policy_seconds", "plan_seconds")
    return {
        "balance_before": before,
        "balance_after": after,
        "step_time_before": 1 / before,
        "step_time_after": 1 / after,
        **{name: mean(name) for name in names},
    }


def _print(intervals: list[Interval]) -> None:
    columns = ("steps", "before", "after", "slots changed", "moved", "busiest rank", "decided in")
    rows = [
        (
            f"{each.first_step}-{each.first_step + each.num_steps - 1}",
            f"{each.balance_before:.3f}",
            f"{each.balance_after:.3f}",
            str(each.slots_changed),
            _gigabytes(each.bytes_moved),
            _gigabytes(each.most_bytes_of_rank),
            f"{1000 * (each.policy_seconds + each.plan_seconds):.0f} ms",
        )
        for each in intervals
    ]
    print_table(columns, rows)
    found = _summary(intervals)
    without, balanced = (f"{found[f'balance_{each}']:.3f}" for each in ("before", "after"))
    times = " and ".join(f"{found[f'step_time_{each}']:.2f}" for each in ("before", "after"))
    moved, between = _gigabytes(found["bytes_moved"]), _gigabytes(found["bytes_between_nodes"])
    click.echo(
        f"\nafter the first interval: balance {without} without and {balanced} with balancing, so a step's experts take"
        f" {times} times the time of even ranks;\n{moved} moved per rebalance, {between} of it between nodes"
    )


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


def _draw(intervals: list[Interval], file: Path, title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    balance, moved = figure.subplots(1, 2)
    steps = [each.first_step + each.num_steps for each in intervals]
    balance.plot(steps, [each.balance_before for each in intervals], "o-", label="without balancing")
    balance.plot(steps, [each.balance_after for each in intervals], "o-", label="with balancing")
    balance.set(xlabel="step", ylabel="mean over greatest load of the ranks", ylim=(0, 1.02))
    balance.legend()
    moved.bar(steps, [each.bytes_moved / 1e9 for each in intervals], width=0.6 * intervals[0].num_steps)
    moved.set(xlabel="step", ylabel="GB moved between ranks")
    figure.suptitle(title, fontsize=9)
    figure.savefig(file)
