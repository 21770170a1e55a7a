"""What discovery adds to start-up: `Host()` plus one lookup, against bare `importlib_metadata.entry_points(group=...)`.

    python benchmarks/startup_discovery.py [--json] [--cpu] [--rounds 15] [--sizes 50 500 1000]

Every sample is a fresh process, and the two sides take turns, so that a busy machine disturbs both; the minimum of all
rounds counts. Two times are taken: `whole` from before the first import to the answer, so that what we import counts,
and `scan` from after the imports, so that the price of importing importlib_metadata cannot hide what we do. With --cpu
it is processor time, which other programs on the machine disturb less.

The import path holds n made-up distributions (35 % with an entry_points.txt, 10 of them with a model plugin) and,
beside them, only the standard library, torchplug and importlib_metadata with its dependencies: the processes run with
-S -E.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path

BAR = 1.20
NEEDED = ("torchplug", "importlib_metadata", "zipp", "lazy_importer", "typing_extensions")

PROGRAM = """
import sys
from time import {clock}
sys.path[1:1] = sys.argv[1].split({separator!r})
start = {clock}()
{imports}
imported = {clock}()
found = {call}
stop = {clock}()
assert found
print(stop - start, stop - imported)
"""
SIDES = {
    "bare": ("import importlib_metadata", "importlib_metadata.entry_points(group='torchplug.models.v1')"),
    "torchplug": ("from torchplug import Host", "Host().architectures['Model7ForCausalLM']"),
}


def make_distributions(directory: Path, count: int) -> None:
    """`count` distributions of a usual size; 7 in 20 have entry points, and ten of those offer a model."""
    directory.mkdir()
    with_entry_points = [number for number in range(count) if number % 20 < 7]
    ours = {with_entry_points[int(each * len(with_entry_points) / 10)]: each for each in range(10)}
    for number in range(count):
        metadata = directory / f"made_up_{number:04}-1.{number}.0.dist-info"
        metadata.mkdir()
        header = f"Metadata-Version: 2.1\nName: made-up-{number:04}\nVersion: 1.{number}.0\nSummary: made up\n\n"
        (metadata / "METADATA").write_text(header + "A line of the description.\n" * 150)
        (metadata / "RECORD").write_text("".join(f"made_up_{number:04}/module_{file}.py,,\n" for file in range(20)))
        if number % 20 < 7:
            text = f"[console_scripts]\nmade-up-{number} = made_up_{number:04}.cli:main\n"
            if number in ours:
                each = ours[number]
                text += f"\n[torchplug.models.v1]\nModel{each}ForCausalLM = made_up_{number:04}.model:Model{each}\n"
            (metadata / "entry_points.txt").write_text(text)


def link_libraries(directory: Path) -> None:
    """Links to the packages that either side imports, without the site-packages around them."""
    directory.mkdir()
    for name in NEEDED:
        spec = PathFinder.find_spec(name)
        if spec is not None and spec.origin is not None:
            source = Path(spec.origin)
            source = source.parent if source.name == "__init__.py" else source
            (directory / source.name).symlink_to(source)


def sample(side: str, path: str, clock: str) -> tuple[float, float]:
    """Seconds that one side takes in a fresh interpreter: (whole, scan)."""
    imports, call = SIDES[side]
    program = PROGRAM.format(separator=os.pathsep, imports=imports, call=call, clock=clock)
    environment = {key: value for key, value in os.environ.items() if key != "TORCHPLUG_PLUGINS"}
    command = [sys.executable, "-S", "-E", "-c", program, path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"a sample failed:\n{done.stderr}")
    whole, scan = map(float, done.stdout.split())
    return whole, scan


def measure(count: int, rounds: int, clock: str) -> dict[str, float]:
    """At `count` distributions: the minimum of each time and side in milliseconds, and the ratios."""
    with tempfile.TemporaryDirectory() as temporary:
        libraries, distributions = Path(temporary, "lib"), Path(temporary, "site")
        link_libraries(libraries)
        make_distributions(distributions, count)
        path = os.pathsep.join((str(libraries), str(distributions)))
        samples: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
        for side in SIDES:
            sample(side, path, clock)  # writes the .pyc files
        for _ in range(rounds):
            for side in SIDES:
                samples[side].append(sample(side, path, clock))
    result: dict[str, float] = {"distributions": count}
    for index, time in enumerate(("whole", "scan")):
        best = {side: 1e3 * min(each[index] for each in samples[side]) for side in SIDES}
        result |= {f"{side}_{time}_ms": round(best[side], 3) for side in SIDES}
        result[f"{time}_ratio"] = round(best["torchplug"] / best["bare"], 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[50, 500, 1000], help="numbers of installed distributions"
    )
    parser.add_argument("--rounds", type=int, default=15, help="cold processes per side and size")
    parser.add_argument("--cpu", action="store_true", help="processor time instead of elapsed time")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    if min(arguments.sizes) < 29:
        parser.error("a size below 29 has no room for ten plugins among 35 %")
    import_module("torchplug")  # a clear error now, rather than in a sample
    clock = "process_time" if arguments.cpu else "perf_counter"
    results = [measure(count, arguments.rounds, clock) for count in arguments.sizes]
    if arguments.json:
        setting = {"bar": BAR, "clock": clock, "rounds": arguments.rounds, "python": sys.version.split()[0]}
        print(json.dumps({**setting, "results": results}, indent=2))
        return
    print(f"minimum of {arguments.rounds} interleaved cold processes, {clock} in ms; bar: ratio at most {BAR:.2f}")
    print(f"{'distributions':>13}  {'time':<5}  {'entry_points':>12}  {'Host + lookup':>13}  {'ratio':>5}")
    for row in results:
        for time in ("whole", "scan"):
            bare, ours, ratio = row[f"bare_{time}_ms"], row[f"torchplug_{time}_ms"], row[f"{time}_ratio"]
            verdict = "ok" if ratio <= BAR else "missed"
            print(f"{row['distributions']:>13}  {time:<5}  {bare:>12.2f}  {ours:>13.2f}  {ratio:>5.2f}  {verdict}")


if __name__ == "__main__":
    main()
