"""What a benchmark found: per round, summed up as a table, as JSON, and as a plot."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from torchplug.cli.options import print_json
from torchplug.cli.tables import print_table
from torchplug.errors import Problem, RequestError

_PLOT_FORMATS: Final = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp", ".eps", ".ps", ".tif", ".tiff")


@dataclass(slots=True)
class Report:
    """One benchmark's rounds.

    Attributes:
        name: "throughput", "latency" or "startup".
        units: What is measured, in the order in which it is shown, and its unit.
        settings: What it was measured with.
        rounds: For each round, a figure for each of `units`.
        interrupted: Whether it was stopped before its last round.
    """

    name: str
    units: Mapping[str, str]
    settings: dict[str, Any]
    rounds: list[dict[str, float]] = field(default_factory=list)
    interrupted: bool = False

    def summary(self) -> dict[str, dict[str, float]]:
        """Median, least and most of each figure over the rounds."""
        found = {}
        for metric in self.units:
            values = [each[metric] for each in self.rounds]
            found[metric] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
        return found

    def print(self, *, as_json: bool) -> None:
        """Show what was measured, be it all or the rounds before an interrupt; at least one round."""
        if as_json:
            print_json(
                {
                    "benchmark": self.name,
                    "settings": self.settings,
                    "machine": machine(),
                    "units": dict(self.units),
                    "rounds": self.rounds,
                    "summary": self.summary(),
                    "interrupted": self.interrupted,
                }
            )
            return
        rows = [
            (metric, _number(of["median"]), _number(of["min"]), _number(of["max"]), self.units[metric])
            for metric, of in self.summary().items()
        ]
        print_table((f"{self.name}, {len(self.rounds)} rounds", "median", "least", "most", "unit"), rows)

    def plot(self, file: Path) -> None:
        """One panel for each figure: a point for each round, a line at the median."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(3.2 * len(self.units), 3.2), layout="constrained")
        summary = self.summary()
        rounds = range(1, len(self.rounds) + 1)
        panels = figure.subplots(1, len(self.units), squeeze=False)[0]
        for axes, (metric, unit) in zip(panels, self.units.items(), strict=True):
            axes.plot(rounds, [each[metric] for each in self.rounds], "o")
            axes.axhline(summary[metric]["median"], linewidth=1)
            axes.set(title=metric, xlabel="round", ylabel=unit)
            axes.set_ylim(0, 1.1 * summary[metric]["max"] or None)
            axes.xaxis.get_major_locator().set_params(integer=True)
        shown = ("model", "dtype", "device", "input_len", "output_len")
        figure.suptitle(", ".join(f"{key} {self.settings[key]}" for key in shown if key in self.settings), fontsize=9)
        figure.savefig(file)


def check_plot(file: Path | None) -> None:
    """Find out before a long run whether its plot could be drawn.

    Raises:
        RequestError: matplotlib is not installed (with the pip line), the ending names no format, or the directory is
            not there.
    """
    if file is None:
        return
    if find_spec("matplotlib") is None:
        fix = 'pip install "torchplug[plot]", or leave out --plot'
        raise RequestError("--plot", Problem("", "needs the package matplotlib, which is not installed", fix))
    if file.suffix.lower() not in _PLOT_FORMATS:
        fix = f"end the name with one of {', '.join(_PLOT_FORMATS)}"
        raise RequestError("--plot", Problem(str(file), "has an ending that names no picture format", fix))
    if not os.access(file.parent, os.W_OK):
        fix = "name a directory that is there and may be written to"
        raise RequestError("--plot", Problem(str(file), f"cannot be written to {str(file.parent)!r}", fix))


def machine() -> dict[str, Any]:
    """Where it was measured."""
    import torch

    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        found["accelerator"] = torch.cuda.get_device_name()
    return found


def _number(value: float) -> str:
    """Three significant digits and more where the number is large."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
