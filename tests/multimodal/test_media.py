"""Decoding images and videos: every form that is taken gives the same pixels; whatever is wrong is named."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchplug.errors import RequestError
from torchplug.multimodal import Video, load_image, load_video
from torchplug.multimodal.media import load_array

PIXELS = np.random.default_rng(0).integers(0, 256, (7, 5, 3), dtype=np.uint8)


def encoded(array, kind="PNG", **options):
    buffer = BytesIO()
    Image.fromarray(array).save(buffer, kind, **options)
    return buffer.getvalue()


def refusal(load, source, where="image 1"):
    with pytest.raises(RequestError) as caught:
        load(source, where)
    (problem,) = caught.value.problems
    assert problem.where.startswith(where) and problem.fix
    return problem


def test_every_form_of_an_image_gives_the_same_pixels(tmp_path):
    file = tmp_path / "a picture.png"
    file.write_bytes(encoded(PIXELS))
    url = "data:image/png;base64," + base64.b64encode(encoded(PIXELS)).decode()
    forms = [PIXELS, Image.fromarray(PIXELS), file, str(file), url, np.asfortranarray(PIXELS)]
    forms.append(np.concatenate([PIXELS, np.full((7, 5, 1), 9, np.uint8)], axis=2))  # alpha is dropped
    for form in forms:
        assert np.array_equal(load_image(form), PIXELS)
        assert load_image(form).flags.c_contiguous


def test_grey_becomes_rgb():
    grey = PIXELS[..., 0]
    for form in (grey, grey[..., None], Image.fromarray(grey)):
        assert np.array_equal(load_image(form), np.repeat(grey[..., None], 3, axis=2))


def test_a_picture_is_turned_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter clockwise
    turned = Image.open(BytesIO(encoded(PIXELS, exif=exif)))
    assert np.array_equal(load_image(turned), np.rot90(PIXELS, -1))


def test_a_percent_encoded_data_url_is_read():
    from urllib.parse import quote_from_bytes

    assert np.array_equal(load_image("data:image/png," + quote_from_bytes(encoded(PIXELS))), PIXELS)


@pytest.mark.parametrize("keep", [10, 40, 60])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_truncated_file_is_refused_by_name(tmp_path, keep, kind):
    whole = encoded(np.random.default_rng(1).integers(0, 256, (40, 40, 3), dtype=np.uint8), kind)
    file = tmp_path / "cut.img"
    file.write_bytes(whole[: len(whole) * keep // 100])
    problem = refusal(load_image, file)
    assert "cut.img" in problem.where
    assert any(text in problem.says for text in ("damaged", "no image that Pillow can read", "cannot be read"))
    lazily_opened = Image.open(BytesIO(whole[: len(whole) * 60 // 100]))
    assert "damaged" in refusal(load_image, lazily_opened).says


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("no/such/file.png", "there is no such file"),
        (Path("no/such/file.png"), "there is no such file"),
        ("https://example.org/cat.png", "is a URL, and nothing is fetched"),
        ("data:image/png;base64", "without a comma"),
        ("data:image/png;base64,@@@", "base64 is damaged"),
        ("data:text/plain,hello", "is no image that Pillow can read"),
        (np.zeros((0, 5, 3), np.uint8), "it has no pixels"),
        (np.zeros((5, 0), np.uint8), "it has no pixels"),
        (Image.new("RGB", (0, 4)), "it has no pixels"),
        (PIXELS.astype(np.float32) / 255, "is an array of float32, expected uint8"),
        (PIXELS.transpose(2, 0, 1), "shape [3, 7, 5], expected [height, width, 1, 3 or 4]"),
        (np.zeros((2, 2, 2, 2), np.uint8), "shape [2, 2, 2, 2]"),
        (5, "is a int"),
        (b"bytes", "is a bytes"),
        (None, "is a NoneType"),
    ],
)
def test_what_is_no_image_is_refused_with_the_reason(source, says):
    assert says in refusal(load_image, source).says


def test_a_directory_and_a_file_of_another_kind_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    assert "no image that Pillow can read" in refusal(load_image, tmp_path / "notes.txt").says
    assert "cannot be read" in refusal(load_image, tmp_path).says


def test_a_picture_that_would_fill_the_memory_is_refused(monkeypatch, tmp_path):
    file = tmp_path / "bomb.png"
    file.write_bytes(encoded(np.zeros((40, 40, 3), np.uint8)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 700)
    assert "too large" in refusal(load_image, file).says


def test_a_long_data_url_is_cut_in_the_message():
    where = refusal(load_image, "data:image/png;base64," + "A" * 10_000).where
    assert where.startswith("image 1 (data:image/png;base64,AA") and len(where) < 100


FILM = np.random.default_rng(2).integers(0, 256, (4, 6, 8, 3), dtype=np.uint8)


def test_every_form_of_a_film_gives_the_same_frames():
    forms = [FILM, list(FILM), [Image.fromarray(frame) for frame in FILM], tuple(FILM), Video(FILM)]
    for form in forms:
        video = load_video(form)
        assert np.array_equal(video.frames, FILM) and video.fps is None
    assert load_video((FILM, {"fps": 3})).fps == 3.0
    assert load_video((list(FILM), {})).fps is None


@pytest.mark.parametrize("kind", ["WEBP", "PNG"])
def test_an_animated_file_is_its_frames_and_their_speed(tmp_path, kind):
    file = tmp_path / f"film.{kind.lower()}"
    first, *others = [Image.fromarray(frame) for frame in FILM]
    lossless = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    first.save(file, kind, save_all=True, append_images=others, duration=250, **lossless)
    video = load_video(file)
    assert np.array_equal(video.frames, FILM)
    assert video.fps == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (np.zeros((0, 5, 5, 3), np.uint8), "has no frames"),
        ([], "has no frames"),
        (np.zeros((5, 5, 3), np.uint8), "is an array of shape [5, 5, 3]"),
        ([PIXELS, PIXELS[:-1]], "has frames of 2 sizes"),
        ((FILM, {"fps": 0}), "has fps 0"),
        ((FILM, {"fps": True}), "has fps True"),
        ((FILM, {"fps": 1, "duration": 3}), "has metadata duration"),
        (7, "is a int"),
        ("film.mp4", "there is no such file"),
    ],
)
def test_what_is_no_film_is_refused_with_the_reason(source, says):
    assert says in refusal(load_video, source, "video 1").says


def test_a_bad_frame_is_named():
    assert refusal(load_video, [PIXELS, PIXELS.astype(float)], "video 2").where == "video 2, frame 1"


def test_arrays():
    assert load_array([0.5, 1.0], "audio 1").tolist() == [0.5, 1.0]
    for source in ([], "text", {"a": 1}, np.array(["x"]), None):
        refusal(load_array, source, "audio 1")
