"""The catalogue: discovery, selection, owners, and what a user reads when an architecture is not there."""

from __future__ import annotations

import sys

import importlib_metadata
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchplug.errors import PluginError
from torchplug.host import Host
from torchplug.host.catalogue import Catalogue
from torchplug.host.selection import Selection, normalized


def refused(catalogue, architecture):
    with pytest.raises(PluginError) as caught:
        catalogue.owner(architecture)
    return str(caught.value)


# ---- discovery -------------------------------------------------------------------------------------------------------


def test_rows_come_from_metadata_and_no_plugin_is_imported(site):
    site.add("my-plug", "2.1", models={"MyModel": "my_plug.sub.model:MyModel"}, wrappers={"trace": "my_plug.trace"})
    catalogue = Catalogue()
    row = catalogue.owner("MyModel")
    assert (row.architecture, row.value, row.distribution, row.version) == (
        "MyModel",
        "my_plug.sub.model:MyModel",
        "my-plug",
        "2.1",
    )
    assert row.file == site.root / "my_plug" / "sub" / "model.py"
    (wrapper,) = catalogue.wrappers
    assert (wrapper.name, wrapper.file) == ("trace", site.root / "my_plug" / "trace.py")
    assert not [name for name in sys.modules if name.partition(".")[0] == "my_plug"]
    with pytest.raises(ImportError, match="a plugin was imported"):
        row.entry_point.load()


def test_one_scan_and_no_distribution_metadata_without_a_selection(site, monkeypatch):
    for number in range(5):
        site.add(f"plug-{number}", models={f"Model{number}": f"plug_{number}:Model"})
    calls, read = [], []
    real_scan, real_read = importlib_metadata.entry_points, importlib_metadata.PathDistribution.read_text
    monkeypatch.setattr(importlib_metadata, "entry_points", lambda **kw: calls.append(kw) or real_scan(**kw))
    monkeypatch.setattr(
        importlib_metadata.PathDistribution, "read_text", lambda self, name: read.append(name) or real_read(self, name)
    )
    Catalogue().owner("Model3")
    assert calls == [{}]
    assert set(read) == {"entry_points.txt"}


def test_a_selection_reads_names_of_plugin_distributions_only(site, monkeypatch):
    site.add("plug", models={"Model": "plug:Model"})
    site.add("other", groups={"console_scripts": {"other": "other:main"}})
    read = []
    real = importlib_metadata.PathDistribution.read_text
    monkeypatch.setattr(
        importlib_metadata.PathDistribution,
        "read_text",
        lambda self, name: read.append((str(self), name)) or real(self, name),
    )
    Catalogue(selection="plug").owner("Model")
    assert {path for path, name in read if name == "METADATA"} == {str(site.root / "plug-1.0.dist-info")}


def test_300_plugin_distributions_at_once(site):
    for number in range(300):
        site.add(f"plug-{number:03}", models={f"Model{number}": f"plug_{number:03}.model:Model"}, modules=False)
    catalogue = Catalogue(selection="*,-plug-007")
    assert len(catalogue.models) == 299
    assert catalogue.owner("Model299").distribution == "plug-299"
    assert "blocks that distribution" in refused(catalogue, "Model7")


def test_a_distribution_without_metadata_is_named_after_its_directory(site):
    site.add("my-plug", "3.0", models={"MyModel": "my_plug:MyModel"}, metadata=False)
    row = Catalogue(selection="my-plug").owner("MyModel")
    assert (row.distribution, row.version) == ("my_plug", None)


@pytest.mark.parametrize(
    "text", [b"[torchplug.models.v1]\nBroken = \xff\xfe:X\n", b"[torchplug.models.v1]\nno equals sign\n"]
)
def test_unreadable_entry_points_cost_only_their_own_distribution(site, text):
    site.add("aaa-broken", text=text)
    site.add("good", models={"Good": "good:Good"})
    catalogue = Catalogue()
    assert catalogue.owner("Good").distribution == "good"
    (warning,) = catalogue.warnings
    assert "aaa_broken-1.0.dist-info" in warning and "cannot be read" in warning
    message = refused(catalogue, "Broken")
    assert "no installed plugin offers it" in message and "aaa-broken==1.0" in message


def test_a_metadata_finder_that_fails_costs_only_its_own_distributions(site, monkeypatch):
    class Failing:
        def find_spec(self, *_args):
            return None

        def find_distributions(self, _context=None):
            raise RuntimeError("finder is broken")

    site.add("good", models={"Good": "good:Good"})
    monkeypatch.setattr(sys, "meta_path", [Failing(), *sys.meta_path])
    catalogue = Catalogue()
    assert catalogue.owner("Good").distribution == "good"
    assert "finder Failing" in catalogue.warnings[0] and "finder is broken" in catalogue.warnings[0]


def test_one_by_one_reading_keeps_the_first_copy_of_a_distribution(make_site):
    first, second = make_site("first"), make_site("second")
    first.add("plug", "2.0", models={"Model": "plug:Model"})
    second.add("plug", "1.0", models={"Model": "plug:Model", "Old": "plug:Old"})
    second.add("broken", text=b"[x]\nnonsense\n")
    catalogue = Catalogue()
    assert catalogue.owner("Model").version == "2.0"
    assert "Old" not in catalogue.models


@pytest.mark.parametrize("value", ["no_attribute", "a..b:C", "my-module:C", "m:C D", ":C", "m:", "1m:C", ""])
def test_a_malformed_value_is_a_row_with_a_problem(site, value):
    site.add("bad", models={"Bad": value}, modules=False)
    site.add("good", models={"Good": "good:Good"})
    catalogue = Catalogue()
    assert catalogue.owner("Good").problem is None
    (row,) = catalogue.models["Bad"]
    assert "package.module:Class" in (row.problem or "") and row.file is None
    message = refused(catalogue, "Bad")
    assert "bad==1.0" in message and "Bad = package.module:Class" in message


@pytest.mark.parametrize("value", ["m:C", "a.b.c:D.E", " m : C ", "m:C [extra]", "mödul:Klasse"])
def test_every_well_formed_value_is_accepted(site, value):
    site.add("good", models={"Good": value}, modules=False)
    assert Catalogue().owner("Good").malformed_value is None


@pytest.mark.parametrize("name", ["Odd Name", "Bad\x1b[31m", "a:b", "x,y", "9Model", "a/b", "*"])
def test_a_name_with_odd_characters_is_a_problem_and_not_fatal(site, name):
    site.add("odd", models={name: "odd:Odd"})
    row = Catalogue().owner(name)
    assert row.problem is not None and repr(name) in row.problem


@pytest.mark.parametrize("name", ["Model", "Model_2", "my.Model", "My-Model", "Modèle"])
def test_ordinary_names_are_no_problem(site, name):
    site.add("plain", models={name: "plain:Plain"})
    assert Catalogue().owner(name).problem is None


def test_a_wrapper_may_be_a_module_and_a_model_may_not(site):
    site.add("plug", models={"Model": "plug"}, wrappers={"wrap": "plug", "instance": "plug:it"})
    catalogue = Catalogue()
    assert [row.problem for row in catalogue.wrappers] == [None, None]
    assert catalogue.models["Model"][0].problem is not None


# ---- owners ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_owners(site):
    site.add("alpha", "1.5", models={"Model": "alpha.model:Model"})
    site.add("beta_llm", "0.2", models={"Model": "beta.model:Model"})
    return site


def test_two_owners_are_an_error_that_lists_both_and_every_way_to_choose(two_owners):
    message = refused(Catalogue(), "Model")
    for part in (
        "2 enabled distributions offer it",
        f"alpha==1.5  alpha.model:Model  ({two_owners.root / 'alpha' / 'model.py'})",
        f"beta_llm==0.2  beta.model:Model  ({two_owners.root / 'beta' / 'model.py'})",
        "--owner Model=beta_llm",
        "owners={'Model': 'beta_llm'}",
        "'beta_llm:Model'",
        '--plugins "*,-alpha"',
    ):
        assert part in message


def test_each_way_to_choose_works(two_owners):
    assert Catalogue(owners={"Model": "Beta-LLM"}).owner("Model").distribution == "beta_llm"
    assert Catalogue().owner("beta-llm:Model").distribution == "beta_llm"
    assert Catalogue(selection="*,-alpha").owner("Model").distribution == "beta_llm"
    # `dist:Arch` is the nearest choice and wins over the general one.
    assert Catalogue(owners={"Model": "alpha"}).owner("beta-llm:Model").distribution == "beta_llm"


def test_a_conflict_leaves_other_architectures_alone(two_owners):
    two_owners.add("gamma", models={"Other": "gamma:Other"})
    catalogue = Catalogue()
    assert catalogue.owner("Other").distribution == "gamma"
    assert len(catalogue.models["Model"]) == 2


def test_the_first_party_distribution_has_no_privilege(site):
    site.add(
        "torchplug", "0.1.0", models={"LlamaForCausalLM": "torchplug_models.llama:LlamaForCausalLM"}, modules=False
    )
    site.add("other-llama", models={"LlamaForCausalLM": "other_llama:Llama"})
    assert "2 enabled distributions" in refused(Catalogue(), "LlamaForCausalLM")
    assert Catalogue(selection="*,-torchplug").owner("LlamaForCausalLM").distribution == "other-llama"
    assert "blocks that distribution" in refused(Catalogue(selection="other"), "torchplug:LlamaForCausalLM")


def test_the_same_line_twice_is_one_offer_and_two_values_are_the_authors_fault(site):
    site.add("same", text="[torchplug.models.v1]\nSame = same:A\nSame = same:A\n")
    site.add("twice", text="[torchplug.models.v1]\nTwice = twice:A\nTwice = twice:B\n")
    catalogue = Catalogue()
    assert catalogue.owner("Same").value == "same:A"
    message = refused(catalogue, "Twice")
    assert "more than once" in message and "twice:A" in message and "twice:B" in message
    assert "--owner" not in message


def test_a_chosen_owner_that_does_not_offer_it_is_an_error(two_owners):
    message = refused(Catalogue(owners={"Model": "alhpa"}), "Model")
    assert "'alhpa' was chosen and does not offer it" in message
    assert "it is offered by 'alpha' and 'beta_llm'" in message
    assert "did you mean 'alpha'?" in message
    assert "'gamma' was chosen" in refused(Catalogue(), "gamma:Model")


def test_owners_that_match_nothing_warn(two_owners):
    catalogue = Catalogue(owners={"Modle": "alpha", "Model": "gamma"})
    first, second = catalogue.warnings
    assert "no installed plugin offers 'Modle'; did you mean 'Model'?" in first
    assert "'gamma' does not offer 'Model'" in second


# ---- what is said of an architecture that is not there ---------------------------------------------------------------


def test_missing_architecture_suggests_a_near_name_and_the_next_step(site):
    site.add("plug", models={"MistralForCausalLM": "plug:M"})
    message = refused(Catalogue(), "MistralForCasualLM")
    assert "no installed plugin offers it; did you mean 'MistralForCausalLM'?" in message
    assert "torchplug list" in message and "pip install" in message
    assert "did you mean 'MistralForCausalLM'?" in refused(Catalogue(), "mistral")
    assert "did you mean" not in refused(Catalogue(), "Zyx")


def test_missing_architecture_with_nothing_installed(site):
    assert "no installed plugin offers it" in refused(Catalogue(), "Anything")


@pytest.mark.parametrize(
    ("selection", "wider"),
    [("other", "other,plug"), ("*,-plug", "*"), ("-plug", "*"), ("none", "plug"), ("", "plug"), ("a,-plug", "a,plug")],
)
def test_blocked_by_the_selection_says_so_and_how_to_enable_it(site, selection, wider):
    site.add("plug", "1.2", models={"Model": "plug:Model"})
    message = refused(Catalogue(selection=selection), "Model")
    assert f"plug==1.2 offers it, and the selection {selection!r}" in message
    assert f'--plugins "{wider}"' in message
    assert Catalogue(selection=wider).owner("Model").distribution == "plug"


def test_blocked_by_the_environment_names_the_variable(site, monkeypatch):
    site.add("plug", models={"Model": "plug:Model"})
    monkeypatch.setenv("TORCHPLUG_PLUGINS", "-plug")
    assert "'-plug' (TORCHPLUG_PLUGINS)" in refused(Catalogue(), "Model")
    assert Catalogue(selection="*").owner("Model").distribution == "plug"


def test_a_group_of_another_api_version_is_explained(site):
    site.add("future", "9.0", groups={"torchplug.models.v2": {"Model": "future:Model"}})
    message = refused(Catalogue(), "Model")
    assert "future==9.0" in message and "'torchplug.models.v2'" in message and "'torchplug.models.v1'" in message


def test_stale_egg_info_ahead_of_the_real_one_is_explained(make_site):
    source, installed = make_site("source"), make_site("installed")
    stale = source.add("my-plug", "0.1", egg_info=True)
    installed.add("my-plug", "1.0", models={"Model": "my_plug:Model"})
    assert "Model" not in Catalogue().models, "without this the test proves nothing"
    message = refused(Catalogue(), "Model")
    assert str(stale) in message and "comes first on the import path" in message and f"delete {stale}" in message


# ---- the selection ---------------------------------------------------------------------------------------------------


@pytest.fixture
def three(site):
    for name in ("torchplug", "plug-a", "Plug_B"):
        site.add(name, models={f"Of{normalized(name)}": f"{normalized(name).replace('-', '_')}:M"})
    return site


@pytest.mark.parametrize(
    ("selection", "enabled"),
    [
        (None, {"torchplug", "plug-a", "plug-b"}),
        ("*", {"torchplug", "plug-a", "plug-b"}),
        ("all", {"torchplug", "plug-a", "plug-b"}),
        ("ALL", {"torchplug", "plug-a", "plug-b"}),
        ("", set()),
        ("  ", set()),
        (",", set()),
        ("none", set()),
        ("plug-a", {"plug-a"}),
        ("plug_a , PLUG.B,", {"plug-a", "plug-b"}),
        ("-plug-a", {"torchplug", "plug-b"}),
        ("*,-plug-a", {"torchplug", "plug-b"}),
        ("-plug-a,*", {"torchplug", "plug-b"}),
        ("plug-a,-plug-a", set()),
        ("none,plug-a", {"plug-a"}),
        ("-*", set()),
        ("*,-torchplug,-Plug.B", {"plug-a"}),
    ],
)
@pytest.mark.parametrize("through", ["argument", "environment"])
def test_selection_grammar(three, monkeypatch, selection, enabled, through):
    if through == "environment" and selection is not None:
        monkeypatch.setenv("TORCHPLUG_PLUGINS", selection)
        catalogue = Catalogue()
    else:
        catalogue = Catalogue(selection=selection)
    assert {normalized(row.distribution) for rows in catalogue.models.values() for row in rows} == enabled
    assert {normalized(row.distribution) for row in catalogue.blocked} == {"torchplug", "plug-a", "plug-b"} - enabled


def test_an_argument_wins_over_the_environment(three, monkeypatch):
    monkeypatch.setenv("TORCHPLUG_PLUGINS", "none")
    assert len(Catalogue(selection="*").models) == 3
    assert len(Catalogue(selection="").models) == 0


def test_unknown_names_warn_with_a_suggestion_and_never_fail(three):
    (warning,) = Catalogue(selection="*,-plug-aa").warnings
    assert "names 'plug-aa': no distribution of that name is installed; did you mean 'plug-a'?" in warning
    (warning,) = Catalogue(selection="OfTorchplug").warnings
    assert "a selection names distributions, this one is 'torchplug'" in warning
    assert Catalogue(selection="*,-plug.b").warnings == []


def test_a_distribution_without_plugins_in_the_selection_is_told_from_a_missing_one(three):
    three.add("ordinary")
    (warning,) = Catalogue(selection="ordinary").warnings
    assert "is installed and offers no plugin" in warning


def test_wrappers_come_in_the_order_of_the_selection_then_by_distribution_and_name(site):
    site.add("zeta", wrappers={"z2": "zeta", "z1": "zeta"})
    site.add("Beta", wrappers={"b": "beta"})
    site.add("alpha", wrappers={"a": "alpha"})

    def order(selection):
        return [row.name for row in Catalogue(selection=selection).wrappers]

    assert order(None) == ["a", "b", "z1", "z2"]
    assert order("zeta,alpha,beta") == ["z1", "z2", "a", "b"]
    assert order("beta,*") == ["b", "a", "z1", "z2"]
    assert order("*,alpha") == ["b", "z1", "z2", "a"]
    assert order("zeta,alpha") == ["z1", "z2", "a"]


_names = st.sampled_from(["foo", "Foo-Bar", "foo_bar", "b.az", "qux", "all-in", "none-of"])
_entries = st.one_of(_names, _names.map("-{}".format), st.sampled_from(["*", "all", "none", "", " ", "-*", "-all"]))
_selections = st.lists(_entries, max_size=7).map(",".join)


@given(_selections, _names)
def test_a_removal_wins_and_names_alone_are_the_whole_list(text, name):
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    removed = {normalized(entry[1:]) for entry in entries if entry.startswith("-")}
    kept = {normalized(entry) for entry in entries if not entry.startswith("-")}
    everything = bool(kept & {"*", "all"}) or (not kept and bool(removed))
    everything = everything and not removed & {"*", "all"}
    kept = set() if removed & {"*", "all"} else kept
    expected = normalized(name) not in removed and (everything or normalized(name) in kept)
    assert Selection(text).enables(name) is expected


@given(_selections, _names)
def test_spelling_and_spaces_never_matter(text, name):
    respelt = " , ".join(entry.replace("-bar", "__BAR").upper() for entry in text.split(","))
    assert Selection(respelt).enables(name) is Selection(text).enables(name.upper().replace("_", "."))


@given(_selections, _names, _names)
def test_including_and_excluding_change_one_distribution_only(text, name, other):
    before = Selection(text)
    included, excluded = Selection(before.including(name)), Selection(before.excluding(name))
    assert included.enables(name) and not excluded.enables(name)
    if normalized(other) != normalized(name):
        assert included.enables(other) is before.enables(other)


def test_host_uses_the_catalogue(three):
    host = Host(plugins="*,-plug-a", owners={"OfTorchplug": "torchplug"})
    assert host.catalogue.owner("Oftorchplug").distribution == "torchplug"


@pytest.mark.parametrize("plugins", [["a", "b"], 5, {"a"}])
def test_a_selection_that_is_no_text_is_an_error_with_an_example(plugins):
    with pytest.raises(PluginError, match="plugins: expected one text with commas, got") as raised:
        Host(plugins)
    assert 'plugins="a,b"' in str(raised.value)
