"""Every kind of broken plugin package, installed as a real distribution: its exact message, and all of them at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import broken_packages as packages
import pytest
import torch
from safetensors.torch import save_file
from torchplug import Host
from torchplug.errors import HookNotProvided, TorchplugError, TorchplugWarning
from torchplug.testing.tiny import TinyCheckpoint, random_tensors

MROPE = "get_mrope_input_positions"
WANTED = f"def {MROPE}(self, input_tokens, mm_features)"
RETURNS = "(int64 tensor [3 or more rows, num_tokens] on the CPU, int delta)"


def named(group):
    return pytest.mark.parametrize("package", [pytest.param(each, id=each.name) for each in group])


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """installed(package, ...) puts packages on the import path, beside everything that this environment has."""
    monkeypatch.delenv("TORCHPLUG_PLUGINS", raising=False)
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])

    def install(*group):
        for package in group:
            package.write(site)
        return site

    yield install
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(site)):
            del sys.modules[name]


def subject(package):
    """What errors call the plugin."""
    kind, entries = ("plugin", package.models) if package.models else ("wrapper plugin", package.wrappers)
    ((name, value),) = entries.items()
    return f"{kind} {name!r} ({package.name}=={package.version}, {value})"


def architecture(package):
    return next(iter(package.models))


def checkpoint(package):
    config = {**packages.CONFIG, "architectures": [architecture(package)]}
    return TinyCheckpoint(config, "tiny/config.json", random_tensors(packages.WEIGHTS))


def load(package, plugins=None):
    return Host(plugins or package.name).load(checkpoint(package), device="cpu", dtype="float32")


def text_of(call):
    with pytest.raises(TorchplugError) as raised:
        call()
    return str(raised.value)


# -- the class cannot be had ---------------------------------------------------------------------------------

REMOVE = "install another version of {name}, or remove it: `pip uninstall {name}`"
IMPORTS = {
    "needs-unknown": (
        "import of needs_unknown.model ({here}): ModuleNotFoundError: No module named 'nothing_of_this_name'",
        "install the package that provides 'nothing_of_this_name'; where the metadata of needs-unknown does not "
        "require it, tell its author",
    ),
    "needs-declared": (
        "import of needs_declared.model ({here}): ModuleNotFoundError: No module named 'flash_of_nowhere'",
        "needs-declared requires it and it is not installed: `pip install 'flash-of-nowhere>=2'`",
    ),
    "raises": ("import of raises.model ({here}): RuntimeError: no licence", REMOVE),
    "exits": ("import of exits.model ({here}): tries to end the process: SystemExit('wrong Python')", REMOVE),
    "no-attribute": (
        "import of no_attribute.model: no_attribute.model has no 'NoAttribute'; did you mean 'NoAttributes'?",
        "its author has to correct the entry point 'NoAttribute'; until then " + REMOVE,
    ),
    "no-syntax": ("import of no_syntax.model ({here}): SyntaxError: invalid syntax", REMOVE),
    "incomplete": (
        "import of incomplete.model: ModuleNotFoundError: No module named 'incomplete.model'",
        "its own files are incomplete: `pip install --force-reinstall --no-deps incomplete`; if that does not help, "
        "tell its author",
    ),
}


def expected(package, message):
    says, fix = message
    here = package.line() if "{here}" in says else ""
    return f"torchplug: {subject(package)}: {says.format(here=here)}\n  fix: {fix.format(name=package.name)}"


@named(packages.IMPORTS)
def test_a_class_that_cannot_be_imported(installed, package):
    installed(package)
    text = text_of(lambda: Host(package.name).model_class(architecture(package)))
    assert text == expected(package, IMPORTS[package.name])


# -- the class is refused ------------------------------------------------------------------------------------

IMPLEMENT = f"implement {WANTED} -> {RETURNS}"
CLASSES = {
    "bad-signature": (f"{MROPE} ({{here}}): does not take 'mm_features'", f"write it as {WANTED}"),
    "renamed-default": (
        f"{MROPE} ({{here}}): takes 'mm_feature', which the hook does not have, so it would silently keep its default",
        f"rename 'mm_feature' to 'mm_features': {WANTED}",
    ),
    "extra-argument": (
        f"{MROPE} ({{here}}): takes 'grid', which the hook does not have, so it would never be given",
        f"remove 'grid', or give it a default: {WANTED}",
    ),
    "async-method": (f"{MROPE} ({{here}}): is async; hooks are called and return", f"write it as {WANTED}"),
    "stub-only": (f"{MROPE} ({{cls}}): claims SupportsMRoPE but inherits the interface's empty method", IMPLEMENT),
    "no-method": (f"{MROPE} ({{cls}}): claims SupportsMRoPE but does not implement it", IMPLEMENT),
    "flag-is-one": (
        "supports_mrope ({cls}): supports_mrope of class FlagIsOne is 1 (int); a flag is the literal True or False in "
        "the class body",
        "write supports_mrope = True in the class body, or leave it out",
    ),
    "an-instance": (
        "entry point: found an object of type Thing, expected a class that derives from torch.nn.Module",
        "point it to the model class: package.module:Class",
    ),
    "misspelt-mark": (
        "embed_inputs_ids ({here}): is marked with hookimpl, and no hook has this name",
        "did you mean embed_input_ids?",
    ),
}


def class_of(package):
    name = packages.architecture_of(package.name)
    return f"class {name}, {package.line(f'class {name}(')}"


@named([each for each in packages.CLASSES if each.name in CLASSES])
def test_a_class_that_is_refused(installed, package):
    installed(package)
    says, fix = CLASSES[package.name]
    message = (says.replace("{cls}", class_of(package) if "{cls}" in says else ""), fix)
    text = text_of(lambda: Host(package.name).model_class(architecture(package)))
    assert text == expected(package, message)


def test_several_problems_are_one_error(installed):
    (package,) = (each for each in packages.CLASSES if each.name == "no-module-class")
    installed(package)
    where = f"class NoModuleClass, {package.line('class NoModuleClass')}"
    assert text_of(lambda: Host().model_class("NoModuleClass")) == (
        f"torchplug: 2 problems in {subject(package)}\n"
        f"  1. {where}\n"
        "     does not derive from torch.nn.Module\n"
        "     fix: class NoModuleClass(torch.nn.Module): ...\n"
        f"  2. embed_input_ids ({where})\n"
        "     every model class needs it\n"
        "     fix: implement def embed_input_ids(self, input_ids, multimodal_embeddings=None, *, is_multimodal=None, "
        "handle_oov_mm_token=False) -> [num_tokens, hidden_size] tensor, model dtype, model device"
    )


def test_every_broken_class_has_its_message():
    assert {each.name for each in packages.IMPORTS} == set(IMPORTS)
    assert {each.name for each in packages.CLASSES} == {*CLASSES, "no-module-class"}
    assert {each.name for each in packages.LOADS} == set(LOADS)
    assert {each.name for each in packages.WRAPPERS} == set(WRAPPERS)
    assert {each.name for each in packages.SIDE_EFFECTS} == set(SIDE_EFFECTS)


# -- the model is refused ------------------------------------------------------------------------------------

LOADS = {
    "late-flag": (
        "supports_mrope ({cls}): supports_mrope is set on the instance; it is read on the class LateFlag, before "
        "anything is built",
        "set supports_mrope in the class body",
    ),
    "partial-experts": (
        "MixtureOfExperts ({cls}): the loaded model lacks expert_weights, num_expert_groups, num_physical_experts, "
        "num_local_physical_experts, num_routed_experts, num_shared_experts, num_redundant_experts, moe_layers",
        "set all ten attributes of MixtureOfExperts in __init__, or do not derive from it",
    ),
    "fails-to-build": (
        "__init__ ({init}): ValueError: odd heads",
        "see {file}: check config.json, or report it to the plugin's author",
    ),
    "bad-constructor": None,
}


@named([each for each in packages.LOADS if LOADS[each.name]])
def test_a_model_that_is_refused(installed, package):
    site = installed(package)
    says, fix = LOADS[package.name]
    places = {"{cls}": class_of(package), "{init}": package.line("def __init__")}
    for place, value in places.items():
        says = says.replace(place, value)
    fix = fix.replace("{file}", f"{site}/{package.line()}" if "{file}" in fix else "")
    assert text_of(lambda: load(package)) == expected(package, (says, fix))


def test_a_key_that_the_config_lacks(installed):
    (package,) = (each for each in packages.LOADS if each.name == "bad-constructor")
    installed(package)
    assert text_of(lambda: load(package)) == (
        "torchplug: checkpoint config tiny/config.json: rope_theta: the model class reads this key, the file does not "
        "have it and the class declares no default\n"
        "  fix: add 'rope_theta' to tiny/config.json, or declare it in the class's config_defaults"
    )


# -- the hook is refused -------------------------------------------------------------------------------------


def call_mrope(package):
    return load(package).hooks.get_mrope_input_positions([3, 5], [])


def test_a_method_that_returns_none(installed):
    package = packages.CALLS["returns-none"]
    installed(package)
    assert text_of(lambda: call_mrope(package)) == (
        f"torchplug: {subject(package)}: {MROPE} ({package.line()}): expected {RETURNS}; found None\n"
        f"  fix: return {RETURNS}"
    )


@pytest.mark.parametrize(("name", "remark"), [("false-flag", " (supports_mrope is False)"), ("no-flag", "")])
def test_a_method_without_its_flag_is_told_when_it_is_missed(installed, name, remark):
    package = packages.CALLS[name]
    installed(package)
    cls, place = packages.architecture_of(name), package.line()
    with pytest.raises(HookNotProvided) as raised:
        call_mrope(package)
    assert str(raised.value) == (
        f"torchplug: {subject(package)}: {MROPE}: {cls} does not claim SupportsMRoPE{remark}, so its {MROPE} ({place}) "
        "is not called\n  fix: see `torchplug show` for what this model has"
    )
    (warning,) = Host(name).model_class(cls).report.warnings
    assert (warning.where, warning.says, warning.fix) == (
        f"{MROPE} ({place})",
        f"nobody calls it: {cls} does not claim SupportsMRoPE{remark}",
        "derive from SupportsMRoPE or write supports_mrope = True in the class body",
    )


def test_a_keyword_only_argument_of_a_model_arrives(installed):
    installed(packages.KEYWORD_ONLY)
    positions, delta = load(packages.KEYWORD_ONLY).hooks.get_mrope_input_positions([3, 5], ["a", "b", "c"])
    assert positions.tolist() == [[0, 1]] * 3 and delta == 3


# -- wrapper plugins -----------------------------------------------------------------------------------------

MARK = "mark it @hookimpl(wrapper=True): `result = yield`, then `return result`"
WRAPPERS = {
    "wrap-plain": (
        "embed_input_ids ({here}): is a plain implementation; only the model that owns a hook implements it",
        MARK,
    ),
    "wrap-tryfirst": (
        "embed_input_ids ({here}): sets tryfirst; the order of wrappers is the order of attaching",
        "remove tryfirst",
    ),
    "wrap-class": (
        "class Watch, wrap_class_wrap.py:4: is a class; a wrapper plugin is a module or an instance",
        "name an instance of it: Watch()",
    ),
    "wrap-keyword-only": (
        "embed_input_ids ({here}): takes 'input_ids' by keyword only; a wrapper gets its arguments by position",
        "take 'input_ids' before the `*`",
    ),
    "wrap-renamed": (
        "embed_input_ids ({here}): takes 'input_id', which the hook does not have",
        "rename 'input_id' to 'input_ids'",
    ),
    "wrap-import-error": (
        "import of wrap_import_error_wrap ({here}): ModuleNotFoundError: No module named 'nothing_of_this_name'",
        "install the package that provides 'nothing_of_this_name'; where the metadata of wrap-import-error does not "
        "require it, tell its author",
    ),
    "wrap-exits": ("import of wrap_exits_wrap ({here}): tries to end the process: SystemExit(3)", REMOVE),
    "wrap-old": ("embed_input_ids ({here}): is an old-style hookwrapper", MARK),
}


@named(packages.WRAPPERS)
def test_a_wrapper_plugin_that_is_left_out(installed, package):
    installed(package, packages.HEALTHY)
    with pytest.warns(TorchplugWarning) as caught:
        model = load(packages.HEALTHY, f"{package.name},healthy")
    message = expected(package, WRAPPERS[package.name]).removeprefix("torchplug: ")
    assert [str(each.message) for each in caught] == [f"{message}\n  The plugin is left out; everything else works."]
    assert model.hooks.embed_input_ids(torch.tensor([2])).shape == (1, 8)


def test_a_wrapper_that_forgets_to_return_is_blamed_and_not_the_model(installed):
    installed(packages.FORGETS, packages.HEALTHY)
    model = load(packages.HEALTHY, f"{packages.FORGETS.name},healthy")
    assert text_of(lambda: model.hooks.embed_input_ids(torch.tensor([2]))) == (
        f"torchplug: {subject(packages.FORGETS)}: embed_input_ids ({packages.FORGETS.line()}): gave back None, "
        "expected [num_tokens, hidden_size] tensor, model dtype, model device\n  fix: end with `return result`"
    )


# -- metadata ------------------------------------------------------------------------------------------------


def no_owner(architecture):
    return text_of(lambda: Host().model_class(architecture))


def test_another_version_of_the_group(installed):
    installed(*packages.METADATA)
    assert no_owner("NextGroup") == (
        "torchplug: architecture 'NextGroup': next-group==1.0: it offers 'NextGroup' in group 'torchplug.models.v2', "
        "which this torchplug does not read\n  fix: install a torchplug and a version of the plugin for the same hook "
        "API: this torchplug reads 'torchplug.models.v1' and 'torchplug.plugins.v1'"
    )


def test_a_module_that_is_not_there(installed):
    installed(*packages.METADATA)
    assert no_owner("NoModule") == (
        "torchplug: plugin 'NoModule' (no-module==1.0, no_module.model:NoModule): import of no_module.model: "
        "ModuleNotFoundError: No module named 'no_module'\n  fix: its own files are incomplete: `pip install "
        "--force-reinstall --no-deps no-module`; if that does not help, tell its author"
    )


def test_two_owners(installed):
    site = installed(*packages.METADATA)
    assert no_owner("Shared") == (
        "torchplug: architecture 'Shared': 2 enabled distributions offer it, and none was chosen:\n"
        f"    first-owner==1.0  first_owner.model:FirstOwner  ({site}/first_owner/model.py)\n"
        f"    second-owner==1.0  second_owner.model:SecondOwner  ({site}/second_owner/model.py)\n"
        "  fix: choose one with --owner Shared=second-owner (in Python: owners={'Shared': 'second-owner'}),\n"
        "       or ask for it as 'second-owner:Shared',\n"
        '       or switch the other off with --plugins "*,-first-owner"'
    )
    assert Host(owners={"Shared": "first-owner"}).model_class("Shared").cls.__name__ == "FirstOwner"


def test_an_owner_of_a_first_party_architecture(installed):
    site = installed(*packages.METADATA)
    ours = Host("torchplug").architectures["LlamaForCausalLM"]
    assert no_owner("LlamaForCausalLM") == (
        "torchplug: architecture 'LlamaForCausalLM': 2 enabled distributions offer it, and none was chosen:\n"
        f"    my-llama==1.0  my_llama.model:MyLlama  ({site}/my_llama/model.py)\n"
        f"    {ours.origin}  {ours.value}  ({ours.file})\n"
        "  fix: choose one with --owner LlamaForCausalLM=torchplug "
        "(in Python: owners={'LlamaForCausalLM': 'torchplug'}),\n"
        "       or ask for it as 'torchplug:LlamaForCausalLM',\n"
        '       or switch the other off with --plugins "*,-my-llama"'
    )
    assert Host().model_class("my-llama:LlamaForCausalLM").cls.__name__ == "MyLlama"


def test_stale_egg_info_ahead_of_the_real_metadata(installed, tmp_path, monkeypatch):
    metadata = packages.HEALTHY.write(tmp_path / "installed")
    stale = tmp_path / "source" / "healthy.egg-info"
    stale.mkdir(parents=True)
    (stale / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: healthy\nVersion: 0.1\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(stale.parent), str(metadata.parent)])
    assert no_owner("Healthy") == (
        f"torchplug: architecture 'Healthy': healthy==1.0: {stale} comes first on the import path and is used instead "
        f"of {metadata}, so 'Healthy' is not seen\n"
        f"  fix: delete {stale} (a left-over of an old build), or install from that directory again"
    )


def test_an_orphaned_editable_install(installed, tmp_path):
    site = installed()
    (each,) = (each for each in packages.METADATA if each.name == "no-module")
    gone = tmp_path / "gone"
    url = {"url": gone.as_uri(), "dir_info": {"editable": True}}
    (each.write(site) / "direct_url.json").write_text(json.dumps(url))
    done = torchplug("doctor", path=site)
    assert done.returncode == 1
    assert (
        f"torchplug: the installed plugins: no-module==1.0: it is an editable install of {gone}, which is not there "
        "any more\n  fix: `pip uninstall no-module`, or `pip install -e` the directory where the source is now"
    ) in done.stdout


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs symbolic links")
def test_a_duplicate_through_a_lib64_link_is_one_offer_and_a_note(installed, tmp_path, monkeypatch):
    site = installed(packages.HEALTHY)
    link = tmp_path / "lib64"
    link.symlink_to(site)
    monkeypatch.setattr(sys, "path", [*sys.path, str(link)])
    assert Host().architectures["Healthy"].distribution == "healthy"
    done = torchplug("doctor", path=os.pathsep.join([str(site), str(link)]))
    assert done.returncode == 0, done.stdout
    assert (
        f"note: healthy==1.0: {link}/healthy-1.0.dist-info is {site}/healthy-1.0.dist-info by another path (a link); "
        "it counts once"
    ) in done.stdout


ODD = {
    "Odd Names": "OddNames",
    "Ünïcode": "OddNames",
    "Esc\x1b[31m": "OddNames",
    "Extras": "OddNames",
    "dotted.name": "OddNames",
    "OddValue": "the value 'odd names:OddNames' is not package.module:Class",
    "Dots": "the value 'odd_names..x:OddNames' is not package.module:Class",
    "NoAttribute": "the value 'odd_names' is not package.module:Class",
}


@pytest.mark.parametrize("name", ODD)
def test_odd_characters_in_names_and_values(installed, name):
    """A name is what config.json says, so any name serves; a value that Python cannot import is refused."""
    installed(packages.METADATA[-1])
    assert set(ODD) == set(packages.METADATA[-1].models)
    if ODD[name] == "OddNames":
        assert Host("odd-names").model_class(name).cls.__name__ == "OddNames"
        return
    assert text_of(lambda: Host("odd-names").model_class(name)) == (
        f"torchplug: architecture {name!r}: entry point of odd-names==1.0: {ODD[name]}\n"
        f"  fix: its author has to write `{name} = package.module:Class`; until then use another version of it"
    )


# -- what an import does besides -----------------------------------------------------------------------------

AUTHOR = "its author should do this when a model is built, not when the module is imported"
SIDE_EFFECTS = {
    "prints": (
        "prints.model: prints 'hello from prints'",
        "its author should remove it or use logging: it mixes with the output of commands",
    ),
    "starts-thread": ("starts_thread.model: starts a thread: watch ({site}/{here})", AUTHOR),
    "touches-device": (
        "touches_device.model: initialises the device 'cuda': every process that imports it takes device memory, and "
        "none can fork",
        AUTHOR,
    ),
    "sets-environment": (
        "sets_environment.model: changes the environment: OMP_SCHEDULE",
        "its author should read the environment and leave it as it is: others read it too",
    ),
    "wrap-torch": (
        "wrap_torch_wrap: imports torch",
        "its author should import torch inside the functions that need it",
    ),
}


def environment_with(path):
    return {
        **{key: value for key, value in os.environ.items() if key != "TORCHPLUG_PLUGINS"},
        "PYTHONPATH": os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
    }


def torchplug(*arguments, path, timeout=300):
    command = [sys.executable, "-m", "torchplug", *map(str, arguments)]
    return subprocess.run(command, env=environment_with(path), capture_output=True, text=True, timeout=timeout)


def test_what_imports_do_besides_and_what_only_another_process_survives(tmp_path):
    site = tmp_path / "site"
    group = [*packages.SIDE_EFFECTS, packages.DIES, packages.HEALTHY]
    for package in group:
        package.write(site)
    names = ",".join(package.name for package in group)
    done = torchplug("doctor", "--deep", "--plugins", names, "--json", path=site)
    told = json.loads(done.stdout)
    found = {each.get("architecture") or each["wrapper"]: each for each in told["imports"]}
    warned = {}
    for package in packages.SIDE_EFFECTS:
        name = next(iter({**package.models, **package.wrappers}))
        ((warning),) = found[name]["warnings"]
        warned[package.name] = (warning["where"].removeprefix("import of ") + ": " + warning["says"], warning["fix"])
        assert found[name]["problems"] == []
    here = {"site": site, "here": packages.SIDE_EFFECTS[1].line()}
    assert warned == {name: (says.format(**here), fix) for name, (says, fix) in SIDE_EFFECTS.items()}
    assert found["Healthy"]["result"] == "ok" and found["Healthy"]["warnings"] == []
    assert found["Healthy"]["imported_torch"] and found["Healthy"]["torch_seconds"] <= found["Healthy"]["seconds"]
    (problem,) = found["Dies"]["problems"]
    assert problem == {
        "where": "import of dies.model",
        "says": "ends the process: exit code 7 (assertion failed)",
        "fix": "install another version of dies, or remove it: `pip uninstall dies`",
    }
    assert done.returncode == 1 and [each["kind"] for each in told["problems"]] == ["import"]


# -- all at once ---------------------------------------------------------------------------------------------

EVERYTHING = [
    *packages.IMPORTS,
    *packages.CLASSES,
    *packages.LOADS,
    *packages.CALLS.values(),
    packages.KEYWORD_ONLY,
    *packages.WRAPPERS,
    *packages.SIDE_EFFECTS,
    packages.HANGS,
    packages.DIES,
    packages.HEALTHY,
    *packages.METADATA,
]
"""All but the wrapper that forgets to return: whoever attaches it meets it at every call, as the test above shows."""


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    """A directory on the import path with everything broken, 300 more distributions, and stale and orphaned copies."""
    site = tmp_path_factory.mktemp("crowded")
    for package in EVERYTHING:
        package.write(site)
    for number in range(300):
        packages.Package(
            f"many-{number}", {f"many_{number}": "class Model: ...\n"}, models={f"Many{number}": f"many_{number}:Model"}
        ).write(site)
    stale = tmp_path_factory.mktemp("stale") / "many_0.egg-info"
    stale.mkdir()
    (stale / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: many-0\nVersion: 0.1\n")
    orphan = packages.Package("orphan", models={"Orphan": "orphan:Orphan"}).write(site)
    (orphan / "direct_url.json").write_text('{"url": "file:///nowhere/orphan", "dir_info": {"editable": true}}')
    return os.pathsep.join([str(stale.parent), str(site)])


def test_help_and_list_and_show_work_with_everything_installed(crowded):
    assert torchplug("--help", path=crowded).returncode == 0
    began = time.perf_counter()
    done = torchplug("list", "--json", path=crowded)
    assert time.perf_counter() - began < 30
    rows = json.loads(done.stdout)["architectures"]
    assert done.returncode == 0
    offered = {name for package in EVERYTHING for name in package.models} | {f"Many{n}" for n in range(1, 300)}
    assert offered <= {row["architecture"] for row in rows}
    status = {(row["architecture"], row["distribution"]): row["status"] for row in rows}
    assert status["Healthy", "healthy"] == status["Many299", "many-299"] == "ok"
    assert status["LlamaForCausalLM", "torchplug"] == status["LlamaForCausalLM", "my-llama"] == "conflict"
    assert "\x1b" not in torchplug("list", path=crowded).stdout
    shown = torchplug("show", "Healthy", path=crowded)
    assert shown.returncode == 0 and "owner         healthy==1.0 (the only enabled offer)" in shown.stdout
    shown = torchplug("show", "Healthy", "--import", path=crowded)
    assert shown.returncode == 0 and "class         healthy.model.Healthy" in shown.stdout
    assert shown.stdout.count("embed_input_ids (healthy/model.py:") == 1 and "Traceback" not in shown.stderr


def test_doctor_and_list_name_everything_that_metadata_tell(crowded, tmp_path):
    """With entry points beside that cannot be read: nobody can import torch then, which reads them all."""
    torn = packages.Package("torn", models={"Torn": "torn:Torn"}).write(tmp_path) / "entry_points.txt"
    torn.write_bytes(b"[x]\n\xff\n")
    crowded = os.pathsep.join([crowded, str(tmp_path)])
    listed = torchplug("list", path=crowded)
    assert listed.returncode == 0 and f"the plugins of {torn.parent} are not seen" in listed.stderr
    done = torchplug("doctor", "--json", path=crowded)
    kinds = {each["kind"] for each in json.loads(done.stdout)["problems"]}
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert kinds >= {"conflict", "orphaned", "stale", "unknown-group", "missing-module", "malformed", "unreadable"}


def test_doctor_deep_tells_every_broken_class_and_outlives_every_import(crowded):
    some = [*packages.CLASSES[:2], *packages.CLASSES[-3:], packages.KEYWORD_ONLY, packages.HEALTHY]
    chosen = [*packages.IMPORTS, *some, *packages.WRAPPERS, packages.HANGS, packages.DIES]
    names = [package.name for package in chosen]
    arguments = ["doctor", "--deep", "--timeout", "20", "--json", "--plugins", ",".join(names)]
    done = torchplug(*arguments, path=crowded, timeout=600)
    told = json.loads(done.stdout)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    results = {(each["distribution"], each["result"].partition(",")[0]) for each in told["imports"]}
    expected = {(package.name, "not importable") for package in packages.IMPORTS if package.name != "incomplete"}
    expected |= {(package.name, "refused") for package in some[:5]}
    expected |= {("hangs", "too slow"), ("dies", "not importable"), ("healthy", "ok"), ("keyword-only", "ok")}
    assert expected <= results
    (slow,) = (each for each in told["problems"] if each["kind"] == "timeout")
    assert slow["says"] == "does not end within 20 seconds"
    wrapped = {each["distribution"]: each["result"] for each in told["imports"] if "wrapper" in each}
    unimportable = ("wrap-import-error", "wrap-exits")
    assert wrapped == {
        package.name: "not importable" if package.name in unimportable else "refused" for package in packages.WRAPPERS
    }


def test_every_healthy_model_loads_and_generates_with_everything_installed(crowded, tiny_checkpoint, tmp_path):
    healthy = tmp_path / "healthy"
    healthy.mkdir()
    save_file(random_tensors(packages.WEIGHTS), healthy / "model.safetensors")
    config = {**packages.CONFIG, "architectures": ["Healthy"], "torch_dtype": "float32"}
    (healthy / "config.json").write_text(json.dumps(config))
    program = f"""if True:
        import warnings
        warnings.simplefilter("ignore")
        from torchplug import Host
        import torch
        from torchplug.testing import Specimen
        host = Host(owners={{"LlamaForCausalLM": "torchplug"}})
        for target in ({str(healthy)!r}, {str(tiny_checkpoint)!r}):
            model = host.load(target, device="cpu")
            print(type(model.module).__name__, model.hooks.embed_input_ids(torch.tensor([1])).shape[0])
        for name, offers in host.catalogue.models.items():
            if any(offer.distribution == "torchplug" for offer in offers):
                Specimen("torchplug:" + name).load(torch.device("cpu"))
                print("loaded", name)
    """
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment_with(crowded), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")
    assert "Healthy 1" in lines and "LlamaForCausalLM 1" in lines
    assert {f"loaded {name}" for name in Host("torchplug").catalogue.models} <= {*lines}
    owner = ["--owner", "LlamaForCausalLM=torchplug"]
    answer = torchplug("generate", "--model", tiny_checkpoint, "--max-tokens", 4, "--json", *owner, "hi", path=crowded)
    assert answer.returncode == 0 and len(json.loads(answer.stdout)[0]["token_ids"]) == 4
    assert answer.stderr.count("The plugin is left out; everything else works.") == len(packages.WRAPPERS)
    assert "Traceback" not in answer.stderr


def test_no_warning_is_repeated_by_a_second_load(installed):
    installed(packages.WRAPPERS[0], packages.HEALTHY)
    host = Host(f"{packages.WRAPPERS[0].name},healthy")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            host.load(checkpoint(packages.HEALTHY), device="cpu", dtype="float32")
    assert len([each for each in caught if each.category is TorchplugWarning]) == 1


def test_a_package_is_written_as_pip_leaves_it(tmp_path):
    import importlib.metadata

    metadata = packages.HEALTHY.write(tmp_path)
    found = importlib.metadata.Distribution.at(metadata)
    assert (
        found.name == "healthy" and found.files and all(Path(found.locate_file(each)).exists() for each in found.files)
    )
