"""The plugin plan: a child process whose import path lacks the plugin, has another version, or an edited copy of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner
from torchplug.cli import main
from torchplug.errors import PlanMismatch, PluginError
from torchplug.host import Host
from torchplug.host.plan import Plan

CHILD = """
import sys
from torchplug.errors import PlanMismatch
from torchplug.host.plan import Plan
try:
    host = Plan.verify(open(sys.argv[1]).read())
except PlanMismatch as error:
    print(error)
    sys.exit(3)
print("the same:", host.architectures["MyModel"].origin, host.catalogue.selection.text)
assert "my_plug" not in sys.modules and "torch" not in sys.modules
"""


def fill(site, version="1.0"):
    directory = site.add("my-plug", version, models={"MyModel": "my_plug.model:MyModel"}, wrappers={"w": "my_plug:w"})
    site.module("my_plug.layers", "SCALE = 1\n")
    record = ["my_plug/__init__.py", "my_plug/model.py", "my_plug/layers.py", "my_plug_extra.py", "../bin/tool"]
    site.module("my_plug_extra", "EXTRA = 1\n")
    (directory / "RECORD").write_text("".join(f"{name},,\n" for name in record))
    return site


@pytest.fixture
def planned(make_site):
    """The parent's site, and its plan for MyModel."""
    site = fill(make_site("parent"))
    return site, Host().plan(["MyModel"])


@pytest.fixture
def child(planned, tmp_path):
    """child(*directories, **environment): exit code and output of a worker with these on its import path."""

    def run(*directories, **environment):
        file = tmp_path / "plan.json"
        file.write_text(planned[1].to_json())
        path = os.pathsep.join(map(str, directories))
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(file)],
            env={**os.environ, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
        )
        assert not done.stderr, done.stderr
        return done.returncode, done.stdout

    return run


@pytest.fixture
def other(make_site):
    """A site that is on nobody's import path yet."""
    return make_site.elsewhere


def test_the_plan_says_everything_and_survives_json(planned):
    site, plan = planned
    model, wrapper = plan.plugins
    assert (model.kind, model.name, model.value) == ("model", "MyModel", "my_plug.model:MyModel")
    assert (model.distribution, model.version) == ("my-plug", "1.0")
    assert model.file == str(site.root / "my_plug" / "model.py")
    assert set(model.files) == {"my_plug/__init__.py", "my_plug/model.py", "my_plug/layers.py", "my_plug_extra.py"}
    assert (wrapper.kind, wrapper.name) == ("wrapper", "w")
    assert (plan.selection, plan.owners, plan.allowlist) == ("*", {"MyModel": "my-plug"}, None)
    assert Plan.from_json(plan.to_json()) == plan
    assert len(plan.to_json().splitlines()) == 1


def test_a_child_with_the_same_plugin_agrees_and_imports_nothing(planned, child):
    site, _ = planned
    assert child(site.root) == (0, "the same: my-plug==1.0 *\n")


def test_a_copy_elsewhere_is_the_same_plugin(child, other):
    assert child(fill(other("elsewhere")).root)[0] == 0


def test_a_child_without_the_plugin_says_what_to_install(child, other):
    empty = other("empty")
    code, text = child(empty.root)
    assert code == 3
    assert "no distribution 'my-plug' is installed here" in text and "pip install my-plug==1.0" in text
    assert "plugin 'MyModel'" in text and "wrapper plugin 'w'" in text


def test_a_child_with_another_version_names_both(child, other):
    code, text = child(fill(other("newer"), "2.0").root)
    assert code == 3
    assert "versions differ: 1.0 in the parent, 2.0 here" in text
    assert "SHA-256" not in text
    for name in ("parent", "newer"):
        assert f"{name}/my_plug/model.py" in text


def test_a_child_with_an_edited_copy_names_the_files(child, other):
    site = fill(other("edited"))
    site.module("my_plug.layers", "SCALE = 2\n")
    site.module("my_plug.more", "")
    (site.root / "my_plug_extra.py").unlink()
    code, text = child(site.root)
    assert code == 3
    assert "the version is the same and the code is not" in text
    assert "my_plug/layers.py: SHA-256" in text
    assert "my_plug/more.py: only here" in text and "my_plug_extra.py: missing here" in text
    assert "my_plug/model.py: " not in text


def test_a_copy_that_hides_the_installed_one_is_the_one_that_counts(planned, child, other):
    site, _ = planned
    shadow = other("shadow")
    for name in ("layers", "model"):
        shadow.module(f"my_plug.{name}", (site.root / "my_plug" / f"{name}.py").read_text())
    shadow.module("my_plug.layers", "SCALE = 3\n")
    code, text = child(shadow.root, site.root)
    assert code == 3 and "my_plug/layers.py: SHA-256" in text


def test_a_wrapper_that_only_the_child_has_is_a_difference(planned, child, other):
    site, _ = planned
    more = other("more")
    more.add("your-trace", wrappers={"trace": "your_trace:it"})
    code, text = child(site.root, more.root)
    assert code == 3 and "wrapper plugin 'trace': your-trace==1.0 offers it here" in text


def test_the_plans_selection_counts_and_not_the_childs_environment(planned, child):
    site, _ = planned
    assert child(site.root, TORCHPLUG_PLUGINS="none")[0] == 0


def test_a_childs_own_allowlist_is_kept_and_named(planned, child):
    site, _ = planned
    code, text = child(site.root, TORCHPLUG_ALLOWLIST="something-else")
    assert code == 3 and "it is blocked" in text and "TORCHPLUG_ALLOWLIST" in text


def test_another_entry_point_of_the_same_version_is_a_difference(planned, child, other):
    site = other("renamed")
    site.add("my-plug", models={"MyModel": "my_plug.other:MyModel"}, wrappers={"w": "my_plug:w"})
    code, text = child(site.root)
    assert code == 3 and "my_plug.model:MyModel in the parent, my_plug.other:MyModel here" in text


def test_a_distribution_that_does_not_offer_it_any_more_is_told_from_a_missing_one(child, other):
    site = other("fewer")
    site.add("my-plug", "1.5", models={"YourModel": "my_plug.model:MyModel"})
    code, text = child(site.root)
    assert code == 3 and "my-plug==1.5 is installed here and does not offer it" in text


def test_a_plan_pins_the_owner_that_was_chosen(make_site):
    for name in ("one", "two"):
        make_site(name).add(f"plug-{name}", models={"MyModel": f"plug_{name}:MyModel"})
    with pytest.raises(PluginError, match="none was chosen"):
        Host().plan(["MyModel"])
    plan = Host().plan(["plug-two:MyModel"])
    assert plan.owners == {"MyModel": "plug-two"}
    assert Plan.verify(plan.to_json()).architectures["MyModel"].distribution == "plug-two"


def test_another_torchplug_is_a_difference(planned):
    values = json.loads(planned[1].to_json()) | {"torchplug": "0.0.9"}
    with pytest.raises(PlanMismatch, match=r"the parent has torchplug 0\.0\.9"):
        Plan.verify(json.dumps(values))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "torchplug.plan.v9"}', '{"format": "torchplug.plan.v1"}'])
def test_what_is_not_a_plan_is_refused(text):
    with pytest.raises(PlanMismatch, match="not a plan that this torchplug can read"):
        Plan.verify(text)


# -- trust ----------------------------------------------------------------------------------------------------


@pytest.fixture
def two_plugins(site):
    site.add("my-plug", models={"MyModel": "my_plug:MyModel"}, wrappers={"mine": "my_plug:w"})
    site.add("your-plug", models={"YourModel": "your_plug:YourModel"}, wrappers={"yours": "your_plug:w"})


@pytest.mark.usefixtures("two_plugins")
def test_an_allowlist_lets_only_its_distributions_in():
    assert set(Host().architectures) == {"MyModel", "YourModel"}
    host = Host(allowlist="My_Plug")
    assert set(host.architectures) == {"MyModel"}
    assert [row.name for row in host.catalogue.wrappers] == ["mine"]
    with pytest.raises(PluginError) as caught:
        host.architectures["YourModel"]
    assert "your-plug==1.0 offers it" in str(caught.value) and "allowlist 'my-plug'" in str(caught.value)
    assert "add 'your-plug' to allowlist" in str(caught.value)


@pytest.mark.usefixtures("two_plugins")
def test_what_is_asked_for_does_not_overrule_the_allowlist():
    host = Host("*", {"YourModel": "your-plug"}, allowlist="my-plug")
    with pytest.raises(PluginError, match="not on the allowlist"):
        host.model_class("your-plug:YourModel")
    assert set(Host("none", allowlist="my-plug").architectures) == set(), "the selection narrows it further"


@pytest.mark.usefixtures("two_plugins")
def test_the_environments_allowlist_can_be_narrowed_and_not_widened(monkeypatch):
    monkeypatch.setenv("TORCHPLUG_ALLOWLIST", "my-plug,other")
    assert set(Host().architectures) == {"MyModel"}
    assert set(Host(allowlist="my-plug,your-plug").architectures) == {"MyModel"}
    assert set(Host(allowlist="your-plug").architectures) == set()
    monkeypatch.setenv("TORCHPLUG_ALLOWLIST", "")
    assert set(Host().architectures) == set(), "an empty list trusts nobody"


def test_torchplug_itself_is_always_trusted():
    assert "LlamaForCausalLM" in Host(allowlist="").architectures


@pytest.mark.parametrize("text", ["*", "-my-plug", "a,b==1.0"])
def test_an_allowlist_holds_names_only(text):
    with pytest.raises(PluginError, match="is not the name of a distribution"):
        Host(allowlist=text)


@pytest.mark.usefixtures("two_plugins")
def test_list_says_why_a_plugin_is_blocked(monkeypatch):
    monkeypatch.setenv("TORCHPLUG_ALLOWLIST", "my-plug")
    shown = CliRunner().invoke(main, ["list"]).output
    assert "YourModel of your-plug: blocked, its distribution is not on the allowlist 'my-plug'" in shown


@pytest.mark.usefixtures("two_plugins")
def test_the_plan_carries_the_allowlist():
    plan = Host(allowlist="my-plug").plan(["MyModel"])
    assert plan.allowlist == ("my-plug", "torchplug")
    assert set(Plan.verify(plan.to_json()).architectures) == {"MyModel"}
