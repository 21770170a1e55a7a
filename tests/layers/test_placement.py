"""Slots of experts: their arithmetic, what does not fit, and which slot serves a token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchplug.config import EPLBConfig, ParallelConfig
from torchplug.errors import ContractError, ParallelConfigError
from torchplug.layers import ExpertPlacement
from torchplug.layers.placement import EplbViews


@settings(max_examples=60, deadline=None)
@given(logical=st.integers(1, 40), redundant=st.integers(0, 40), ranks=st.integers(1, 8))
def test_slots_are_shared_evenly_and_hold_every_expert_or_the_fix_fits(logical, redundant, ranks):
    try:
        placements = [ExpertPlacement(logical, redundant, ranks, rank) for rank in range(ranks)]
    except ParallelConfigError as error:
        assert (logical + redundant) % ranks
        says, fix = error.problems[0].says, error.problems[0].fix
        assert f"{logical} logical and {redundant} redundant experts make {logical + redundant}" in says
        offered = [int(word) for word in fix.split(",")[0].split() if word.isdecimal()]
        assert offered and all((logical + number) % ranks == 0 for number in offered)
        return
    first = placements[0]
    assert first.num_physical == logical + redundant == first.num_local * ranks
    assert first.initial_experts == tuple(i if i < logical else i % logical for i in range(logical + redundant))
    for expert in range(logical):
        slots = [place.first_local + slot for place in placements for slot in place.local_slots(expert)]
        assert slots == [slot for slot, held in enumerate(first.initial_experts) if held == expert]


def test_256_experts_on_3_ranks_are_told_the_redundancy_that_fits():
    with pytest.raises(ParallelConfigError, match="set num_redundant_experts to 2, which makes 86 for each rank"):
        ExpertPlacement(256, 0, 3)
    with pytest.raises(ParallelConfigError, match="set num_redundant_experts to 2 or 5"):
        ExpertPlacement(256, 4, 3)


@pytest.mark.parametrize("redundant", [-1, 1024])
def test_redundancy_that_the_map_cannot_hold_is_refused(redundant):
    with pytest.raises(ParallelConfigError, match="expected 0 to 1023 redundant experts"):
        ExpertPlacement(8, redundant)
    assert ExpertPlacement(8, 1023).num_physical == 1031


def test_the_placement_follows_the_parallel_settings():
    config = ParallelConfig(tensor_parallel_size=4, rank=2, eplb_config=EPLBConfig(2))
    assert ExpertPlacement.of(6, config) == ExpertPlacement(6, 2)
    config.enable_expert_parallel = True
    assert ExpertPlacement.of(6, config) == ExpertPlacement(6, 2, 4, 2)


def test_ranks_that_join_or_leave_change_the_number_of_slots_but_not_those_of_a_rank():
    placement = ExpertPlacement(8, 4, 3, 1)
    assert placement.resized(16) == ExpertPlacement(8, 8, 4, 1)
    assert placement.resized(8) == ExpertPlacement(8, 0, 2, 1)
    with pytest.raises(ParallelConfigError, match="14 physical experts do not fill ranks of 4 slots") as caught:
        placement.resized(14)
    assert "take 12 or 16" in str(caught.value)
    with pytest.raises(ParallelConfigError):
        placement.resized(4)


def views(load, slots, replicas):
    return EplbViews(
        torch.zeros(load, dtype=torch.int32), torch.tensor(slots), torch.tensor(replicas, dtype=torch.int64)
    )


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_slot_of_a_pick_is_the_published_function_of_its_token_and_the_map(data):
    replicas = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    slots, taken = [], 0
    for count in replicas:
        slots.append([*range(taken, taken + count), *[-1] * (5 - count)])
        taken += count
    tokens, top_k = data.draw(st.integers(0, 30)), data.draw(st.integers(1, 3))
    dtype = data.draw(st.sampled_from([torch.int64, torch.int32]))
    experts = torch.randint(0, len(replicas), (tokens, top_k), dtype=dtype)
    eplb = views(taken, slots, replicas)
    found = eplb.choose(experts)
    assert found.dtype is dtype
    for flat, (expert, slot) in enumerate(zip(experts.flatten().tolist(), found.flatten().tolist(), strict=True)):
        token = flat // top_k
        assert slot == slots[expert][((token * 2654435769) & 0xFFFFFFFF) % replicas[expert]]
    eplb.record(found)
    assert eplb.load.tolist() == found.flatten().long().bincount(minlength=taken).tolist()


def test_the_hash_does_not_overflow_for_late_tokens():
    eplb = views(7, [list(range(7))], [7])
    found = eplb.choose(torch.zeros(100_000, 1, dtype=torch.int64)).flatten().tolist()
    assert found[99_999] == ((99_999 * 2654435769) & 0xFFFFFFFF) % 7
    assert set(found) == set(range(7))


def test_an_expert_that_does_not_exist_has_slot_minus_1_and_is_not_counted():
    eplb = views(3, [[0], [1], [2]], [1, 1, 1])
    slots = eplb.choose(torch.tensor([[0, 3], [-1, 2]]))
    assert slots.tolist() == [[0, -1], [-1, 2]]
    eplb.record(slots)
    assert eplb.load.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    "name, tensor",
    [
        ("expert_load_view", torch.zeros(2, 5, dtype=torch.int64)),
        ("expert_load_view", torch.zeros(2, 4, dtype=torch.int32)),
        ("expert_load_view", torch.zeros(1, 5, dtype=torch.int32)),
        ("logical_to_physical_map", torch.zeros(2, 4, dtype=torch.int64)),
        ("logical_to_physical_map", torch.zeros(2, 3, 2, dtype=torch.int64)),
        ("logical_to_physical_map", torch.zeros(2, 4, 0, dtype=torch.int64)),
        ("logical_replica_count", torch.zeros(2, 5, dtype=torch.int64)),
        ("logical_replica_count", torch.zeros(2, 4, dtype=torch.int32)),
    ],
)
def test_tensors_of_another_shape_or_dtype_are_named(name, tensor):
    given = {
        "expert_load_view": torch.zeros(2, 9, dtype=torch.int32),  # elastic: wider than there are slots
        "logical_to_physical_map": torch.zeros(2, 4, 2, dtype=torch.int64),
        "logical_replica_count": torch.zeros(2, 4, dtype=torch.int64),
    }
    placement = ExpertPlacement(4, 1)
    assert EplbViews.of(placement, 1, **given, where="here").load.shape == (9,)
    with pytest.raises(ContractError) as caught:
        EplbViews.of(placement, 1, **(given | {name: tensor}), where="model.layers.1.mlp.experts")
    assert [problem.where for problem in caught.value.problems] == [name]
    assert "model.layers.1.mlp.experts" in str(caught.value)
