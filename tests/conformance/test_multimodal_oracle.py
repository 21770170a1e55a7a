"""LLaVA, Qwen2-VL, Qwen2.5-VL and Qwen3-VL equal transformers on random checkpoints: positions, logits, greedy tokens
of text alone, one image, several of different sizes, images at either end; videos at the published positions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import assert_same_logits, assert_same_tokens
from multimodal_cases import (
    CASES,
    Case,
    continued,
    image,
    oracle_continuation,
    oracle_logits,
    oracle_model,
    our_continuation,
    our_embeds,
    our_logits,
    our_positions,
    prompt_of,
    prompts_of,
    text,
    video,
    video_prompt_of,
    write_case,
)
from torch import nn
from torchplug.layers import GridSpan, mrope_positions

pytestmark = pytest.mark.oracle

LAYOUTS = ("text", "one image", "three images", "images at both ends")
VIDEO_CASES = [name for name in CASES if not name.startswith("llava")]


@dataclass(frozen=True)
class Pair:
    case: Case
    oracle: Any
    ours: Any


def load_pair(host: Any, name: str, directory: Path) -> Pair:
    case = CASES[name]
    write_case(case, directory)
    ours = host.load(str(directory), device="cpu", dtype="float32")
    return Pair(case, oracle_model(case, directory), ours)


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, host: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return load_pair(host, request.param, tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_transformers(pair: Pair, layout: str) -> None:
    prompt = prompts_of(pair.case)[layout]
    assert_same_logits(our_logits(pair.ours, prompt), oracle_logits(pair.case, pair.oracle, prompt))


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "images at both ends"])
def test_greedy_tokens_equal_transformers(pair: Pair, layout: str) -> None:
    prompt = prompts_of(pair.case)[layout]
    assert continued(prompt)
    continuation = oracle_continuation(pair.case, pair.oracle, prompt)
    continuation.require_telling()
    assert_same_tokens(our_continuation(pair.ours, prompt), continuation)


def test_positions_equal_transformers(pair: Pair) -> None:
    if pair.case.family.startswith("Llava"):
        pytest.skip("LLaVA has plain positions")
    for layout, prompt in prompts_of(pair.case).items():
        ours, delta = our_positions(pair.ours, prompt)
        if layout == "text":
            assert torch.equal(ours, torch.arange(len(prompt.token_ids)).expand(3, -1)) and delta == 0
            continue
        theirs, deltas = pair.oracle.model.get_rope_index(
            torch.tensor([prompt.token_ids]),
            mm_token_type_ids=prompt.token_types[None],
            image_grid_thw=prompt.tower_kwargs("image")["image_grid_thw"],
        )
        assert torch.equal(ours, theirs[:, 0]) and delta == int(deltas)


@pytest.mark.parametrize("name", VIDEO_CASES)
def test_logits_of_videos_equal_transformers_at_the_published_positions(host: Any, tmp_path: Path, name: str) -> None:
    pair = load_pair(host, name, tmp_path)
    prompt = video_prompt_of(pair.case)
    positions, _ = our_positions(pair.ours, prompt)
    assert_same_logits(our_logits(pair.ours, prompt), oracle_logits(pair.case, pair.oracle, prompt, positions))


# Positions of videos: transformers 5.19 goes on after a video as if it had no time, where the paper, and transformers
# before 5.3, go on past every position inside; so the oracle here is the paper's rule, written out token by token.


def published_positions(length: int, spans: list[GridSpan]) -> list[tuple[int, int, int]]:
    """Position triples, one token at a time."""
    places: list[tuple[int, int, int]] = []
    starts = {span.offset: span for span in spans}
    following = 0
    while len(places) < length:
        span = starts.get(len(places))
        if span is None:
            places.append((following,) * 3)
        else:
            frames, rows, columns = span.grid
            for frame in range(frames):
                for row in range(rows):
                    for column in range(columns):
                        time = int(torch.tensor(float(frame)) * torch.tensor(span.time_step))
                        places.append((following + time, following + row, following + column))
        following = max(max(place) for place in places) + 1
    return places


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_positions_of_videos_are_the_published_ones(host: Any, tmp_path: Path, name: str) -> None:
    pair = load_pair(host, name, tmp_path)
    prompt = video_prompt_of(pair.case)
    spans = []
    for feature in prompt.features:
        grid = (feature.data or {})["image_grid_thw" if feature.modality == "image" else "video_grid_thw"].tolist()
        frames, rows, columns = grid[0], grid[1] // 2, grid[2] // 2
        if name == "qwen3_vl" and feature.modality == "video":
            places = prompt.places(feature)[:: rows * columns].tolist()
            spans += [GridSpan(place, (1, rows, columns)) for place in places]
        else:
            # 2 tokens per second, a frame of the grid lasts 1.5 and 1.0 seconds.
            step = 2 * float((feature.data or {}).get("second_per_grid_ts", 0.5)) if name == "qwen2_5_vl" else 1.0
            spans.append(GridSpan(feature.mm_position.offset, (frames, rows, columns), step))
    expected = published_positions(len(prompt.token_ids), spans)
    ours, delta = our_positions(pair.ours, prompt)
    assert ours.T.tolist() == [list(place) for place in expected]
    assert delta == max(max(place) for place in expected) + 1 - len(expected)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_where_transformers_is_right_about_videos_positions_equal_its_own(host: Any, tmp_path: Path, name: str) -> None:
    pair = load_pair(host, name, tmp_path)
    parts = [*text(4), video(2, 4, 6), *text(3, seed=1), image(2, 4), *text(2, seed=2)]
    prompt = prompt_of(pair.case, parts)
    ours, delta = our_positions(pair.ours, prompt)
    theirs, deltas = pair.oracle.model.get_rope_index(
        torch.tensor([prompt.token_ids]),
        mm_token_type_ids=prompt.token_types[None],
        image_grid_thw=prompt.tower_kwargs("image")["image_grid_thw"],
        video_grid_thw=prompt.tower_kwargs("video")["video_grid_thw"],
    )
    assert torch.equal(ours, theirs[:, 0]) and delta == int(deltas)


def test_the_rule_itself_equals_the_written_out_one() -> None:
    spans = [GridSpan(3, (4, 1, 2), 1.7), GridSpan(11, (1, 3, 2)), GridSpan(17, (2, 1, 1), 0.4)]
    positions, delta = mrope_positions(22, reversed(spans))
    expected = published_positions(22, spans)
    assert positions.T.tolist() == [list(place) for place in expected]
    assert delta == max(max(place) for place in expected) + 1 - 22


# Batches of a tower


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava"])
def test_an_item_is_embedded_the_same_alone_and_among_others(host: Any, tmp_path: Path, name: str) -> None:
    pair = load_pair(host, name, tmp_path)
    prompt = prompts_of(pair.case)["three images"]
    together = pair.ours.hooks.embed_multimodal(**prompt.tower_kwargs("image"))
    for feature, among in zip(prompt.features, together, strict=True):
        (alone,) = pair.ours.hooks.embed_multimodal(**type(prompt)(prompt.token_ids, (feature,)).tower_kwargs("image"))
        torch.testing.assert_close(among, alone, rtol=1e-5, atol=1e-5)
        assert among.shape[0] == feature.mm_position.num_embeds


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_images_and_videos_in_one_call_come_in_the_order_of_the_keywords(host: Any, tmp_path: Path, name: str) -> None:
    pair = load_pair(host, name, tmp_path)
    prompt = video_prompt_of(pair.case)
    images, videos = prompt.tower_kwargs("image"), prompt.tower_kwargs("video")
    embed = pair.ours.hooks.embed_multimodal
    apart = [*embed(**videos), *embed(**images)]
    for together, alone in zip(embed(**videos, **images), apart, strict=True):
        torch.testing.assert_close(together, alone)


def test_the_number_of_tower_and_connector_tokens_is_what_the_hooks_say(host: Any, tmp_path: Path) -> None:
    for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "llava-siglip", "llava-full_tower_with_class_token"):
        pair = load_pair(host, name, tmp_path / name)
        prompt = prompts_of(pair.case)["one image"]
        module = pair.ours.module
        tower = module.visual.blocks[0] if hasattr(module, "visual") else module.vision_tower.encoder.layers[0]
        connector = module.visual.merger if hasattr(module, "visual") else module.multi_modal_projector
        seen = tokens_through(pair.ours, prompt, tower=tower, connector=connector)
        tokens = prompt.features[0].mm_position.num_embeds
        assert pair.ours.hooks.get_num_mm_encoder_tokens(tokens) == seen["tower"]
        assert pair.ours.hooks.get_num_mm_connector_tokens(seen["tower"]) == seen["connector"]


def tokens_through(model: Any, prompt: Any, *, tower: nn.Module, connector: nn.Module) -> dict[str, int]:
    """Tokens that go into `tower` and come out of `connector` while a prompt's items are embedded."""
    seen: dict[str, int] = {}

    def enters(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen["tower"] = inputs[0].shape[0]

    def leaves(_: nn.Module, __: Any, result: torch.Tensor) -> None:
        seen["connector"] = result.flatten(0, -2).shape[0]

    handles = [tower.register_forward_pre_hook(enters), connector.register_forward_hook(leaves)]
    our_embeds(model, prompt)
    for handle in handles:
        handle.remove()
    return seen
