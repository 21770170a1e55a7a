"""What the pages say is what happens: docs/hooks.md and the hook table, its examples, links and names on all pages."""

from __future__ import annotations

import doctest
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from torchplug.cli import COMMANDS, main
from torchplug.cli.api import api_as_dict
from torchplug.hookspecs import BASE, HOOKS, Phase

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("sample_plugins/*/README.md"))]
HOOKS_PAGE = (ROOT / "docs" / "hooks.md").read_text()


def sections(page):
    """Heading to what stands below it, up to the next heading of any level."""
    found, title, inside = {}, "", False
    for line in page.splitlines(keepends=True):
        inside ^= line.startswith("```")
        if line.startswith("#") and not inside:
            title = line.lstrip("#").strip()
        else:
            found[title] = found.get(title, "") + line
    return found


def outside_blocks(page):
    """The page without its code blocks, in which `#` begins a comment."""
    return re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)


SECTIONS = sections(HOOKS_PAGE)


# -- a section for every hook ----------------------------------------------------------------------------


def heading(name):
    return f"`{name}{api_as_dict()['hooks'][name]['signature']}`"


def facts(hook):
    """The lines that the table has for a hook, in the page's form."""
    yield f"- **Phase**: {hook.phase.value}"
    if hook.needed:
        lifted = f", unless the class has `{hook.unless}`" if hook.unless else ""
        yield f"- **Needed by**: {', '.join('every model' if name == BASE else name for name in hook.needed)}{lifted}"
    if hook.optional:
        yield f"- **Optional for**: {', '.join(hook.optional)}"
    places = ", ".join(f"`{argument}` {place.value}" for argument, place in hook.places.items())
    yield f"- **Places**: {places or 'no tensor argument'}"
    yield f"- **Returns**: {hook.returns.says}"
    if hook.older:
        yield "- **Other spellings**: " + ", ".join(
            f"`{name}` is refused" if call is None else f"`{name}` is called as `{call}`"
            for name, call in hook.older.items()
        )


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_has_its_exact_signature_and_the_facts_of_the_table(name):
    section = SECTIONS[heading(name)]
    shown = [line for line in section.splitlines() if line.startswith("- **") and not line.startswith("- **Engine")]
    assert shown == list(facts(HOOKS[name]))


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_has_an_example_that_calls_it(name):
    calls = [example.source for example in examples(SECTIONS[heading(name)])]
    assert any(f".hooks.{name}(" in call for call in calls)


def test_the_page_describes_the_hooks_of_each_phase_and_no_others():
    _, *parts = re.split(r"^## (\w+)-phase hooks$", HOOKS_PAGE, flags=re.MULTILINE)
    found = {
        phase: re.findall(r"^### (.*)$", text, re.MULTILINE)
        for phase, text in zip(parts[::2], parts[1::2], strict=True)
    }
    assert found == {
        phase.value.title(): [heading(name) for name, hook in HOOKS.items() if hook.phase is phase] for phase in Phase
    }


@pytest.mark.parametrize("name", HOOKS)
def test_what_the_page_says_of_the_engine_is_true(name):
    """As far as a search can tell: the engine, or what it asks of recurrent layers, calls a hook through `hooks`."""
    files = [*ROOT.glob("core/torchplug/engine/**/*.py"), ROOT / "core/torchplug/host/recurrent_layers.py"]
    source = "".join(file.read_text() for file in files)
    called = re.search(rf"\bhooks\.{name}\b", source) is not None
    (line,) = re.findall(r"^- \*\*Engine\*\*: (.*)$", SECTIONS[heading(name)], re.MULTILINE)
    assert line.startswith("not called yet; for ") is not called


def test_every_hook_has_a_test_named_after_it():
    """`test_NAME...`, or a parametrised test with the name among its parameters, in the tests of the tour."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "sample_plugins/torchplug-tour/tests"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tests = re.findall(r"^\S+::(test_\w+)(?:\[(.*)\])?$", done.stdout, re.MULTILINE)
    named = {
        name
        for name in HOOKS
        for function, parameters in tests
        if re.match(rf"test_{name}(_|$)", function) or name in parameters.split("-")
    }
    assert named == set(HOOKS)


# -- examples --------------------------------------------------------------------------------------------


class SameButLines(doctest.OutputChecker):
    """Line numbers do not count, nor does the name of the file where an example itself is the source."""

    def check_output(self, want, got, optionflags):
        return super().check_output(without_lines(want), without_lines(got), optionflags)


def without_lines(text):
    return re.sub(r"\.py:\d+", ".py:N", re.sub(r"(<stdin>|<doctest [^>]*>):\d+", "<stdin>:N", text))


def blocks(text, language="python"):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def examples(text):
    return [example for block in blocks(text) for example in doctest.DocTestParser().get_examples(block)]


def test_every_python_block_of_the_hook_page_but_the_first_is_run():
    beginning, *others = blocks(HOOKS_PAGE)
    assert "model = " in beginning and all(block.startswith(">>> ") for block in others)


@pytest.mark.parametrize("title", [title for title, text in SECTIONS.items() if examples(text)])
def test_the_examples_run(title, monkeypatch):
    """Each section on its own, with the names that the page begins with."""
    monkeypatch.delenv("TORCHPLUG_PLUGINS", raising=False)
    names: dict[str, object] = {"__name__": "__main__"}
    exec(blocks(HOOKS_PAGE)[0], names)
    test = doctest.DocTest(examples(SECTIONS[title]), names, title, "docs/hooks.md", None, None)
    said: list[str] = []
    doctest.DocTestRunner(SameButLines()).run(test, out=said.append)
    assert not said, "".join(said)


# -- all pages -------------------------------------------------------------------------------------------


def pages():
    return pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page):
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.+)$", outside_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pages()
def test_relative_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", outside_blocks(page.read_text())):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file.read_text()), target


@pages()
def test_commands_exist_with_their_options(page):
    text = page.read_text()
    mentioned = re.findall(r"`torchplug ([^`\n]+)`", text) + re.findall(r"^(?:\$|==>) torchplug (.+)$", text, re.M)
    for command in mentioned:
        name, *rest = shlex.split(command, comments=True)
        if name == "COMMAND":
            continue
        assert name in COMMANDS, command
        found = main.get_command(None, name)
        if isinstance(found, click.Group) and rest and not rest[0].startswith("-"):
            assert rest[0] in found.commands, command
            found = found.commands[rest[0]]
        known = {option for each in found.params for option in each.opts} | {"--help"}
        assert {word.partition("=")[0] for word in rest if word.startswith("--")} <= known, command


@pages()
def test_the_paths_and_names_in_code_spans_are_there(page):
    for span in re.findall(r"`([^`\n]+)`", outside_blocks(page.read_text())):
        if re.match(r"(core|plugins|sample_plugins|tests|benchmarks|docs)/\S*$", span):
            assert (ROOT / span).exists() or (page.parent / span).exists(), span
        if re.fullmatch(r"torchplug(\.\w+)+", span) and not re.search(r"\.v\d+$", span):  # that is an entry-point group
            pkgutil.resolve_name(span)
