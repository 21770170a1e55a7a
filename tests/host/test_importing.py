"""What an import that fails is told as: the line, the missing package or attribute, and who can mend it."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from torchplug.errors import PluginError
from torchplug.host.catalogue import Catalogue, ModelPlugin, WrapperPlugin
from torchplug.host.importing import import_object, import_problem, import_wrappers, other_version, subject_of
from torchplug.host.metadata import Kind, scan


def row_of(site, source, attribute="Plug", **more):
    site.add("plug", "0.3", models={"Plug": f"plug.model:{attribute}"}, modules=False, **more)
    site.module("plug.model", source)
    return Catalogue().owner("Plug")


def problem_of(row):
    with pytest.raises(PluginError) as raised:
        import_object(row)
    assert raised.value.subject == "plugin 'Plug' (plug==0.3, " + row.value + ")"
    assert raised.value.__cause__ is not None
    (problem,) = raised.value.problems
    return problem


def test_the_line_is_the_last_one_of_the_plugins_own_package(site):
    site.module("helper", "def fail():\n    raise ValueError('deep down')\n")
    site.module("plug.inner", "import helper\n\n\nhelper.fail()\n")
    problem = problem_of(row_of(site, "import plug.inner\n"))
    assert problem.where == "import of plug.model (plug/inner.py:4)" and problem.says == "ValueError: deep down"


def test_a_package_that_bears_its_directorys_name_twice_is_told_from_the_inner_one_on(site):
    site.add("plug", "0.3", models={"Plug": "plug.plug:Plug"}, modules=False)
    site.module("plug.plug", "1 / 0\n")
    assert problem_of(Catalogue().owner("Plug")).where.endswith("plug.py:1)")


def test_an_error_without_a_text_is_told_by_its_type(site):
    assert problem_of(row_of(site, "raise NotImplementedError\n")).says == "NotImplementedError"


def test_an_import_outside_the_plugins_package_has_no_line(site):
    row = row_of(site, "")
    problem = import_problem(row, RuntimeError("elsewhere"))
    assert problem.where == "import of plug.model" and problem.fix == other_version(row)


@pytest.mark.parametrize(
    ("requires", "fix"),
    [
        (["numpy", "No_Such.module>=3; python_version > '3'"], "`pip install 'No_Such.module>=3'`"),
        (["no-such-module; extra == 'fast'"], "it comes with an extra of plug: `pip install 'plug[fast]'`"),
        (["numpy"], "install the package that provides 'no_such_module'"),
        (None, "install the package that provides 'no_such_module'"),
        (ValueError("torn metadata"), "install the package that provides 'no_such_module'"),
    ],
)
def test_a_missing_module_is_looked_up_in_what_the_distribution_requires(site, requires, fix):
    row = row_of(site, "import no_such_module.part\n")

    class Distribution:
        metadata = {"Name": "plug", "Version": "0.3"}

        @property
        def requires(self):
            if isinstance(requires, Exception):
                raise requires
            return requires

    row = ModelPlugin(
        SimpleNamespace(name="Plug", value=row.value, group="", load=row.entry_point.load, dist=Distribution())
    )
    assert fix in problem_of(row).fix


@pytest.mark.parametrize("kind", ["package", "module"])
def test_a_directory_that_hides_the_package_is_named(site, kind):
    row = row_of(site, "class Plug: ...\n")
    here = site.root / "here"  # inside, so that what is imported from it is forgotten too
    here.mkdir()
    culprit = here / ("plug" if kind == "package" else "plug.py")
    if kind == "package":
        culprit.mkdir()
        culprit = culprit / "__init__.py"
    culprit.write_text("")
    sys.path.insert(0, str(here))  # the site's own list, which goes with it
    problem = problem_of(row)
    shown = here / ("plug" if kind == "package" else "plug.py")
    assert f"Python takes {shown} for the package 'plug'" in problem.says
    assert problem.says.endswith(f"it hides the one of plug==0.3, {site.root / 'plug'}")
    assert problem.fix.startswith(f"rename or move {shown}")
    (found,) = [each for installed in scan() for each in installed.findings if each.kind is Kind.MISSING_MODULE]
    assert (found.says, found.fix) == (problem.says, problem.fix)


@pytest.mark.parametrize(
    ("source", "attribute", "says"),
    [
        ("class Plugg: ...", "Plug", "plug.model has no 'Plug'; did you mean 'Plugg'?"),
        ("class Outer:\n    class Inner: ...", "Outer.Iner", "plug.model:Outer has no 'Iner'; did you mean 'Inner'?"),
        ("class Outer: ...", "Outer.Plug.More", "plug.model:Outer has no 'Plug'"),
        ("class A:\n    class B: ...", "A.B.C", "plug.model:A.B has no 'C'"),
        ("thing = 3", "thing.Plug", "plug.model:thing has no 'Plug'"),
    ],
)
def test_a_missing_attribute_is_told_with_its_owner_and_what_was_meant(site, source, attribute, says):
    problem = problem_of(row_of(site, source, attribute))
    assert (problem.where, problem.says) == ("import of plug.model", says)
    assert problem.fix.startswith(
        "its author has to correct the entry point 'Plug'; until then install another version"
    )


def test_an_attribute_that_cannot_be_read_twice_alike(site):
    """A module whose `__getattr__` refuses once and answers then: nothing can be said but that."""
    row = row_of(site, "")
    problem_of(row)
    sys.modules["plug.model"].Plug = 1
    assert import_problem(row, AttributeError()).says == "'Plug' cannot be read from plug.model"


def test_a_distribution_without_a_name_can_still_be_blamed():
    entry_point = SimpleNamespace(name="watch", value="watch:it", group="", dist=None)
    row = WrapperPlugin(entry_point)
    assert subject_of(row) == "wrapper plugin 'watch' (unnamed distribution, watch:it)"
    assert other_version(row) == "install another version of it, or remove it"
    assert "metadata of the plugin" in import_problem(row, ModuleNotFoundError("x", name="x")).fix


def test_no_wrapper_is_no_warning(recwarn):
    assert import_wrappers([]) == () and not recwarn.list


def test_what_raises_a_keyboard_interrupt_is_not_caught(site):
    row = row_of(site, "raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        import_object(row)
    assert "plug.model" not in sys.modules
