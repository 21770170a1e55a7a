"""The full scan tells shadowed, stale, duplicate, orphaned, malformed and missing things apart, each with its fix."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from torchplug.host.catalogue import Catalogue
from torchplug.host.locate import defined_names, module_exists, module_file
from torchplug.host.metadata import Kind, scan


def findings(kind):
    return [finding for installed in scan() for finding in installed.findings if finding.kind is kind]


def only(kind):
    (found,) = findings(kind)
    return found


def all_kinds():
    return {finding.kind for installed in scan() for finding in installed.findings}


def test_a_sound_distribution_has_no_finding(site):
    path = site.add("my-plug", "1.0", models={"Model": "my_plug.model:Model"}, wrappers={"w": "my_plug.wrap"})
    (installed,) = scan()
    assert (installed.name, installed.version, installed.path) == ("my-plug", "1.0", path)
    assert (installed.editable, installed.active, installed.findings) == (None, True, ())
    assert [row.name for row in installed.rows] == ["Model", "w"]
    assert "my_plug" not in sys.modules


def test_distributions_without_plugins_are_not_listed(site):
    site.add("ordinary", groups={"console_scripts": {"ordinary": "ordinary:main"}})
    site.add("bare")
    assert scan() == ()


# ---- several copies --------------------------------------------------------------------------------------------------


def test_stale_egg_info_ahead_of_the_real_one(make_site):
    source, installed = make_site("source"), make_site("installed")
    stale = source.add("my.plug", "0.1", egg_info=True)
    real = installed.add("my-plug", "1.0", models={"Model": "my_plug:Model"})
    found = only(Kind.STALE)
    assert found.hides == ("Model",) and not found.harmless
    assert str(stale) in found.says and str(real) in found.says and found.fix.startswith(f"delete {stale}")
    assert [each.active for each in scan()] == [False]


def test_a_copy_of_an_older_version_shadows_a_plugin(make_site):
    first, second = make_site("first"), make_site("second")
    first.add("plug", "1.0", models={"Old": "plug:Old"})
    second.add("plug", "2.0", models={"Old": "plug:Old", "New": "plug:New"})
    found = only(Kind.SHADOWED)
    assert found.hides == ("New",) and "'New' is not seen" in found.says and str(first.root) in found.fix
    assert all_kinds() == {Kind.SHADOWED}, "the module of a copy that is not in use is not looked for"


def test_two_versions_in_one_directory_are_a_failed_upgrade(site):
    site.add("plug", "1.0", models={"A": "plug:A"})
    site.add("plug", "2.0", models={"B": "plug:B"})
    found = only(Kind.DUPLICATE)
    seen = set(Catalogue().models)
    assert len(seen) == 1 and seen | set(found.hides) == {"A", "B"}
    assert "pip uninstall plug" in found.fix


def test_an_editable_install_beside_its_egg_info_is_harmless(make_site):
    source, installed = make_site("source"), make_site("installed")
    source.add("plug", "1.0", models={"Model": "plug:Model"}, egg_info=True)
    installed.add("plug", "1.0", models={"Model": "plug:Model"}, editable=source.root)
    found = only(Kind.SHADOWED)
    assert found.harmless and found.hides == () and found.fix == ""
    assert Catalogue().owner("Model").distribution == "plug"


def test_metadata_without_its_main_file_does_not_shadow(make_site):
    first, second = make_site("first"), make_site("second")
    first.add("plug", "1.0", models={"Left": "plug:Left"}, metadata=False)
    second.add("plug", "2.0", models={"Model": "plug:Model"})
    assert set(Catalogue().models) == {"Model"}
    assert only(Kind.SHADOWED).hides == ("Left",)
    assert [(each.version, each.active) for each in scan()] == [(None, False), ("2.0", True)]


def test_of_three_copies_the_one_in_use_is_blamed(make_site):
    left_over, used, hidden = make_site("left_over"), make_site("used"), make_site("hidden")
    left_over.add("plug", "1.0", metadata=False)
    in_use = used.add("plug", "2.0", models={"Model": "plug:Model"})
    hidden.add("plug", "3.0", models={"New": "plug:New"})
    assert only(Kind.SHADOWED).says.startswith(f"{in_use} comes first")


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs symbolic links")
def test_lib64_as_a_link_to_lib_counts_once(site, monkeypatch):
    path = site.add("plug", models={"Model": "plug:Model"})
    link = site.root.parent / "lib64"
    link.symlink_to(site.root)
    monkeypatch.setattr(sys, "path", [*sys.path, str(link)])
    (installed,) = scan()
    (found,) = installed.findings
    assert found.kind is Kind.TWIN and found.harmless and installed.active
    assert str(link / path.name) in found.says and str(path) in found.says
    assert Catalogue().owner("Model").distribution == "plug"


# ---- editable installs -----------------------------------------------------------------------------------------------


def test_an_editable_install_is_told_from_a_wheel(make_site):
    source, installed = make_site("my source"), make_site("installed")
    source.module("plug", "class Model: ...\n")
    installed.add("plug", models={"Model": "plug:Model"}, modules=False, editable=source.root)
    (found,) = scan()
    assert found.editable == source.root and found.findings == ()


def test_an_orphaned_editable_install_is_one_finding(site, tmp_path):
    gone = tmp_path / "gone away"
    site.add("my-plug", "0.3", models={"Model": "my_plug:Model"}, modules=False, editable=gone)
    found = only(Kind.ORPHANED)
    assert all_kinds() == {Kind.ORPHANED}, "the missing module follows from it and is not worth a second finding"
    assert found.where == "my-plug==0.3" and str(gone) in found.says and "pip uninstall my-plug" in found.fix


@pytest.mark.parametrize("text", ["{", "[]", '{"url": 3, "dir_info": {"editable": true}}', '{"dir_info": 1}', "null"])
def test_a_malformed_direct_url_is_ignored(site, text):
    path = site.add("plug", models={"Model": "plug:Model"})
    (path / "direct_url.json").write_text(text)
    (installed,) = scan()
    assert installed.editable is None and installed.findings == ()


# ---- entry points ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("Odd Name", "plug:Model", "'Odd Name'"),
        ("Esc\x1b[2J", "plug:Model", r"'Esc\x1b[2J'"),
        ("Model", "plug", "package.module:Class"),
        ("Model", "plug-x:Model", "package.module:Class"),
    ],
)
def test_malformed_entry_points(site, name, value, says):
    site.add("plug", models={name: value}, modules=False)
    site.module("plug", "class Model: ...\n")
    found = only(Kind.MALFORMED)
    assert says in found.says and "its author" in found.fix
    assert "\x1b" not in found.says


@pytest.mark.parametrize("group", ["torchplug.models.v2", "torchplug.models.v10"])
def test_a_group_of_another_api_version(site, group):
    site.add("plug", groups={group: {"Model": "plug:Model"}})
    found = only(Kind.UNKNOWN_GROUP)
    assert repr(group) in found.says and found.hides == ("Model",) and "same hook API" in found.fix


@pytest.mark.parametrize(
    "group", ["torchplug.model.v1", "torchplug.models", "torchplug", "torchplug.models.V1", "torchplug.models.vX"]
)
def test_a_misspelt_group(site, group):
    site.add("plug", groups={group: {"Model": "plug:Model"}})
    found = only(Kind.UNKNOWN_GROUP)
    assert "'torchplug.models.v1'" in found.fix and "under the right name" in found.fix


def test_a_group_that_only_begins_alike_is_not_ours(site):
    site.add("plug", groups={"torchplug_extras": {"x": "plug:X"}, "torchplugins.models": {"y": "plug:Y"}})
    assert scan() == ()


def test_unreadable_entry_points_are_reported_with_their_place(site):
    path = site.add("plug", text=b"[torchplug.models.v1]\n\xff = x:Y\n")
    found = only(Kind.UNREADABLE)
    assert str(path) in found.where and "UnicodeDecodeError" in found.says and "--force-reinstall" in found.fix


def test_a_failing_metadata_finder_is_reported(site, monkeypatch):
    class Failing:
        def find_spec(self, *_args):
            return None

        def find_distributions(self, _context=None):
            raise RuntimeError("no")

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Failing()])
    site.add("plug", models={"Model": "plug:Model"})
    found = only(Kind.UNREADABLE)
    assert "Failing" in found.where and "RuntimeError: no" in found.says


# ---- modules and classes, found without importing -------------------------------------------------------------------


def test_a_module_that_is_not_there(site):
    site.add("plug", models={"Model": "plug.gone:Model"}, modules=False)
    site.module("plug.here", "")
    found = only(Kind.MISSING_MODULE)
    assert "'plug.gone'" in found.says and "Model of plug==1.0" in found.where


def test_a_class_that_is_not_there_is_found_in_the_source(site):
    site.add("plug", models={"Model": "plug.model:Modell"}, modules=False)
    file = site.module("plug.model", "class Model: ...\n")
    found = only(Kind.MISSING_ATTRIBUTE)
    assert str(file) in found.says and "defines no 'Modell'" in found.says and "did you mean 'Model'?" in found.says
    assert "plug" not in sys.modules


def test_a_module_that_does_not_parse(site):
    site.add("plug", models={"Model": "plug:Model"}, modules=False)
    file = site.module("plug", "x = 1\nclass Model(:\n")
    found = only(Kind.MISSING_ATTRIBUTE)
    assert f"{file}:2" in found.says and "does not parse" in found.says


def test_modules_are_found_in_every_layout_without_importing_a_parent(make_site):
    one, two = make_site("one"), make_site("two")
    module = one.module("package.sub.module", "raise ImportError('imported')\n")
    (one.root / "package" / "__init__.py").write_text("raise ImportError('parent imported')\n")
    for site, name in ((one, "a"), (two, "b")):
        (site.root / "spread" / "deep").mkdir(parents=True)
        (site.root / "spread" / "deep" / f"{name}.py").touch()
    assert module_file("package.sub.module") == module
    assert module_file("package") == one.root / "package" / "__init__.py"
    assert module_file("spread.deep.a") == one.root / "spread" / "deep" / "a.py"
    assert module_file("spread.deep.b") == two.root / "spread" / "deep" / "b.py"
    assert module_file("spread.deep") is None and module_exists("spread.deep")
    assert module_file("package.nothing") is None and not module_exists("package.nothing")
    assert module_file("nothing.at.all") is None and not module_exists("nothing.at.all")
    assert module_file("package.sub.module.deeper") is None
    assert not {"package", "spread"} & set(sys.modules)


def test_a_foreign_import_finder_that_raises_hides_only_its_modules(site, monkeypatch):
    class Raising:
        def find_spec(self, name, path=None, target=None):
            if name == "strange":
                raise RuntimeError("no")
            return None

    site.module("plain", "")
    monkeypatch.setattr(sys, "meta_path", [Raising(), *sys.meta_path])
    assert not module_exists("strange")
    assert module_exists("plain")


@pytest.mark.parametrize(
    "source",
    [
        "class Name: ...",
        "async def Name(): ...",
        "Name = make()",
        "Name: type = make()",
        "other, (Name, *rest) = make()",
        "import Name",
        "import Name.sub",
        "from a import Name",
        "from a import b as Name",
        "try:\n    from a import Name\nexcept ImportError:\n    Name = None",
        "if x:\n    pass\nelif y:\n    with z:\n        class Name: ...",
        "for Name in x: ...",
        "with open(x) as Name: ...",
        "(Name := 3)",
        "print(Name := 3)",
        "match x:\n    case 1:\n        Name = 2",
    ],
)
def test_every_way_to_bind_a_name_is_seen(tmp_path, source):
    file = tmp_path / "module.py"
    file.write_text(source)
    assert "Name" in (defined_names(file) or ())


@pytest.mark.parametrize(
    "source",
    [
        "class Other:\n    Name = 1",
        "def f():\n    Name = 1",
        "x = [Name for Name in y]",
        "f = lambda: (Name := 1)",
        "Name.attribute = 1",
        "print(Name)",
        "'''Name = 1'''",
    ],
)
def test_names_of_inner_scopes_are_not_the_modules(tmp_path, source):
    file = tmp_path / "module.py"
    file.write_text(source)
    assert "Name" not in (defined_names(file) or ())
    assert defined_names(file) is not None


@pytest.mark.parametrize("source", ["from a import *", "def __getattr__(name): ...", "globals().update(x)"])
def test_source_that_makes_names_on_demand_cannot_tell(tmp_path, source):
    file = tmp_path / "module.py"
    file.write_text(source)
    assert defined_names(file) is None
    assert defined_names(Path("module.cpython-311-x86_64-linux-gnu.so")) is None


@pytest.mark.parametrize("source", [b"x = 1\x00", b"# coding: no-such-codec\n", b"\xff\xfe = 1", b"def ("])
def test_source_that_does_not_parse_is_a_syntax_error(tmp_path, source):
    file = tmp_path / "module.py"
    file.write_bytes(source)
    with pytest.raises(SyntaxError):
        defined_names(file)
