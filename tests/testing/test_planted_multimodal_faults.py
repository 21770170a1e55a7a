"""The kit's checks of multimodal models are proven by planted faults, each caught by its own check and no other."""

from __future__ import annotations

import pytest
import torch
from kinds_of_checks import OF_EXPERTS, OF_ITEMS, OF_STATES, outcomes_without
from torchplug.testing import Outcome, check_model

SPLIT = "        return rows.split(lengths)\n"
DELTA = "        return positions, delta\n"
EMBED = "    def forward(self, input_ids, positions"

FAULTS = {
    "one_row_for_an_item": (
        "multimodal_counts",
        (SPLIT, "        return [part.mean(0, keepdim=True) for part in rows.split(lengths)]\n"),
        "image item 0: expected 6 rows, one per place in the prompt, found float32[1, 32] on cpu",
    ),
    "one_row_too_many": (
        "multimodal_counts",
        (SPLIT, "        return [torch.cat((part, part[:1])) for part in rows.split(lengths)]\n"),
        "image item 0: expected 6 rows, one per place in the prompt, found float32[7, 32] on cpu",
    ),
    "all_items_in_one_tensor": ("multimodal_counts", (SPLIT, "        return [rows]\n"), "expected as many tensors"),
    "one_column": (
        "multimodal_counts",
        (SPLIT, "        return [part[:, :1] for part in rows.split(lengths)]\n"),
        "expected floating [tokens, 32]",
    ),
    "one_column_spread_by_the_author_s_own_merge": (
        "multimodal_counts",
        (SPLIT, "        return [part[:, :1] for part in rows.split(lengths)]\n"),
        "merged, found float32",
    ),
    "written_in_the_wrong_places": ("multimodal_counts", None, "at their places, unchanged; found others"),
    "numbers_that_are_none": (
        "multimodal_counts",
        (SPLIT, "        return (rows / rows.new_zeros(())).split(lengths)\n"),
        "expected finite numbers",
    ),
    "rows_in_reverse": (
        "multimodal_order",
        (SPLIT, "        return rows.flip(0).split(lengths)\n"),
        "expected the rows of item 0 at place 0, found those of no item alone",
    ),
    "items_see_each_other": (
        "multimodal_order",
        (SPLIT, "        return (rows - rows.mean(0)).split(lengths)\n"),
        "let no item see another",
    ),
    "a_video_without_time": (
        "mrope_positions",
        (
            DELTA,
            "        following = 0\n"
            "        columns = []\n"
            "        grids = {f.mm_position.offset: f.data['grid'].tolist() for f in mm_features}\n"
            "        while len(columns) < len(input_tokens):\n"
            "            frames, rows, wide = grids.get(len(columns), (1, 1, 1))\n"
            "            columns += [(following + t, following + r, following + c)\n"
            "                        for t in range(frames) for r in range(rows) for c in range(wide)]\n"
            "            following += max(rows, wide)\n"
            "        positions = torch.tensor(columns).T.contiguous()\n"
            "        return positions, int(positions.max()) + 1 - len(input_tokens)\n",
        ),
        "after video item 0: expected positions above all inside, which reach",
    ),
    "a_delta_one_too_large": (
        "mrope_positions",
        (DELTA, "        return positions, delta + bool(mm_features)\n"),
        "expected delta",
    ),
    "text_that_begins_at_1": (
        "mrope_positions",
        (DELTA, "        return positions + 1, delta + 1\n"),
        "in every row and delta 0",
    ),
    "a_column_too_few": (
        "mrope_positions",
        (DELTA, "        return (positions[:, 1:] if mm_features else positions), delta\n"),
        "expected as many columns",
    ),
    "features_taken_as_sorted": (
        "mrope_positions",
        (
            "spans = [",
            "spans = [\n            GridSpan(f.mm_position.offset, tuple(g.data['grid'].tolist()))\n"
            "            for f, g in zip(sorted(mm_features, key=lambda f: f.mm_position.offset), mm_features)\n"
            "            if f.data['grid'].prod() == g.data['grid'].prod()\n        ] or [",
        ),
        "in reverse order: expected the same positions",
    ),
}
FURTHER = {
    "one_column_spread_by_the_author_s_own_merge": [
        (
            EMBED,
            "    def embed_input_ids(self, input_ids, multimodal_embeddings=None, *, is_multimodal=None,\n"
            "                        handle_oov_mm_token=False):\n"
            "        embeds = self.language_model.embed_input_ids(input_ids)\n"
            "        if multimodal_embeddings is not None:\n"
            "            embeds[is_multimodal] = torch.cat(list(multimodal_embeddings))\n"
            "        return embeds\n\n" + EMBED,
        )
    ],
    "written_in_the_wrong_places": [
        (
            EMBED,
            "    def embed_input_ids(self, input_ids, multimodal_embeddings=None, *, is_multimodal=None,\n"
            "                        handle_oov_mm_token=False):\n"
            "        mask = None if is_multimodal is None else is_multimodal.roll(1)\n"
            "        return super().embed_input_ids(input_ids, multimodal_embeddings, is_multimodal=mask)\n\n" + EMBED,
        )
    ],
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(make_package, *faults):
    return make_package(*faults, healthy="healthy_vl.py")


OF_OTHER_KINDS = OF_STATES | OF_EXPERTS
"""Checks that do not apply to a class without recurrent layers and experts."""


def test_a_healthy_class_passes_every_check(make_package):
    results = check_model(make(make_package).name)
    assert {result.check.name: result.outcome for result in results} == outcomes_without(OF_OTHER_KINDS)


def assert_only(results, name, text):
    """Exactly the check `name` failed, with `text` in its message, and with the fix."""
    failed = {result.check.name: str(result.error()) for result in results if result.outcome is Outcome.FAILED}
    assert set(failed) == {name}, failed
    assert text in failed[name] and "fix: " in failed[name]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_by_its_own_check_and_no_other(make_package, fault):
    check, change, text = FAULTS[fault]
    package = make(make_package, *([change] if change else []), *FURTHER.get(fault, ()))
    assert_only(check_model(package.name), check, text)


def test_every_check_of_multimodal_models_has_a_fault():
    assert {check for check, _, _ in FAULTS.values()} == OF_ITEMS


REGISTER = "@MULTIMODAL_REGISTRY.register_processor(Squares)\n"


def test_without_a_processor_of_its_own_a_class_is_checked_as_far_as_text_goes(make_package):
    package = make(make_package, (REGISTER, ""))
    found = {result.check.name: result for result in check_model(package.name)}
    for name in ("multimodal_counts", "multimodal_order"):
        assert found[name].outcome is Outcome.SKIPPED and "no processor is registered" in found[name].reason
    assert found["mrope_positions"].outcome is Outcome.OK
    assert "no processor is registered" in found["mrope_positions"].notes[0]


def test_a_class_that_takes_its_items_raw_has_no_embeddings_to_check(make_package):
    flag = "    supports_multimodal_raw_input_only = True\n\n"
    package = make(
        make_package,
        ("    @classmethod\n    def get_placeholder_str", flag + "    @classmethod\n    def get_placeholder_str"),
    )
    found = {result.check.name: result for result in check_model(package.name)}
    assert found["multimodal_counts"].outcome is Outcome.SKIPPED and "raw" in found["multimodal_counts"].reason
