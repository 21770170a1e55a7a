"""Decoding what a caller gives as an image or a video: Pillow images, files, data URLs, arrays.

Nothing is fetched from a network. Every refusal names the item and says what would be accepted.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from types import ModuleType
from typing import Any, NoReturn, TypeAlias
from urllib.parse import unquote_to_bytes

import numpy as np
from numpy.typing import NDArray

from torchplug.errors import Problem, RequestError

Image: TypeAlias = NDArray[np.uint8]
"""uint8 [height, width, 3], RGB."""


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """Frames uint8 [frames, height, width, 3], RGB, and how many of them were taken per second; None: not known."""

    frames: NDArray[np.uint8]
    fps: float | None = None


Media: TypeAlias = "NDArray[Any] | Video"

_IMAGE_FIX = "pass a PIL.Image.Image, the path of an image file, a data URL, or a uint8 array [height, width, 3] of RGB"
_VIDEO_FIX = (
    'pass frames as a uint8 array [frames, height, width, 3] or a list of images, (frames, {"fps": 2.0}), or the path '
    "of an animated GIF, PNG or WebP file"
)


def load_image(source: Any, where: str = "image") -> Image:
    """An image as RGB, turned upright as its EXIF data says; transparency is dropped, as transformers does.

    Args:
        source: PIL.Image.Image, path, data URL, or uint8 array [height, width] or [height, width, 1, 3 or 4].
        where: The item, for messages.

    Raises RequestError: no such file, damaged, empty, or of another kind.
    """
    if isinstance(source, np.ndarray):
        return _image_of_array(source, where)
    pil = _pillow(where)
    if isinstance(source, pil.Image.Image):
        return _rgb(source, where)
    if isinstance(source, (str, os.PathLike)):
        where = _named(where, source)
        with _opened(source, where, _IMAGE_FIX) as image:
            return _rgb(image, where)
    _refuse(where, f"is a {type(source).__name__}", _IMAGE_FIX)


def load_video(source: Any, where: str = "video") -> Video:
    """A video as its frames, all of one size.

    Args:
        source: Video, uint8 array [frames, height, width, 3], a list of images, (frames, {"fps": frames per second}),
            or path or data URL of an animated image that Pillow reads.
        where: The item, for messages.

    Raises RequestError: no such file, damaged, empty, frames of different size, or of another kind.
    """
    if isinstance(source, Video):
        return source
    fps = None
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], Mapping):
        source, metadata = source
        fps = _fps_of(metadata, where)
    if isinstance(source, (str, os.PathLike)):
        return _video_file(source, _named(where, source))
    if isinstance(source, np.ndarray) and source.ndim != 4:
        _refuse(where, f"is an array of shape {list(source.shape)}", _VIDEO_FIX)
    if not isinstance(source, (np.ndarray, Sequence)):
        _refuse(where, f"is a {type(source).__name__}", _VIDEO_FIX)
    frames = [load_image(frame, f"{where}, frame {index}") for index, frame in enumerate(source)]
    if not frames:
        _refuse(where, "has no frames", _VIDEO_FIX)
    shapes = {frame.shape for frame in frames}
    if len(shapes) > 1:
        _refuse(where, f"has frames of {len(shapes)} sizes", "bring the frames to one size")
    return Video(np.stack(frames), fps)


def load_array(source: Any, where: str) -> NDArray[Any]:
    """A numeric array with at least one element, for modalities that have no other form here.

    Raises RequestError: of another kind.
    """
    array = np.asarray(source) if isinstance(source, (np.ndarray, Sequence)) else None
    if array is None or array.dtype.kind not in "iuf" or array.size == 0:
        found = type(source).__name__ if array is None else f"an array of {array.dtype} {list(array.shape)}"
        _refuse(where, f"is {found}", "pass a numeric array that is not empty")
    return array


def _image_of_array(array: NDArray[Any], where: str) -> Image:
    shape = list(array.shape)
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4):
        _refuse(where, f"is an array of shape {shape}, expected [height, width, 1, 3 or 4]", _IMAGE_FIX)
    if array.dtype != np.uint8:
        _refuse(where, f"is an array of {array.dtype}, expected uint8", "scale it to 0..255 and convert it to uint8")
    if array.size == 0:
        _refuse(where, f"is an array of shape {shape}: it has no pixels", _IMAGE_FIX)
    return np.ascontiguousarray(np.repeat(array, 3, axis=2) if array.shape[2] == 1 else array[..., :3])


def _rgb(image: Any, where: str) -> Image:
    pil = _pillow(where)
    try:
        image.load()
        upright = pil.ImageOps.exif_transpose(image)
        array: Image = np.asarray(upright.convert("RGB"))
    except pil.Image.DecompressionBombError as error:
        _refuse(where, f"is too large: {error}", "scale the image down")
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        _refuse(where, f"is damaged: {error}", "check that the file is whole")
    if array.size == 0:
        _refuse(where, f"is {upright.width} x {upright.height}: it has no pixels", _IMAGE_FIX)
    return array


def _video_file(source: str | os.PathLike[str], where: str) -> Video:
    with _opened(source, where, _VIDEO_FIX) as image:
        frames, milliseconds = [], []
        for index in range(getattr(image, "n_frames", 1)):
            try:
                image.seek(index)
            except (OSError, EOFError, SyntaxError, ValueError) as error:
                _refuse(f"{where}, frame {index}", f"is damaged: {error}", "check that the file is whole")
            frames.append(_rgb(image, f"{where}, frame {index}"))
            milliseconds.append(float(image.info.get("duration") or 0))
    seconds = sum(milliseconds) / 1000
    return Video(np.stack(frames), len(frames) / seconds if seconds else None)


def _fps_of(metadata: Mapping[str, Any], where: str) -> float | None:
    unknown = [str(key) for key in metadata if key != "fps"]
    if unknown:
        _refuse(where, f"has metadata {', '.join(unknown)}, which nobody reads", 'give {"fps": frames per second}')
    fps = metadata.get("fps")
    if fps is not None and (isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0 < fps < 1e6):
        _refuse(where, f"has fps {fps!r}", "give the frames per second as a number above 0")
    return None if fps is None else float(fps)


def _opened(source: str | os.PathLike[str], where: str, fix: str) -> Any:
    """The file or data URL as Pillow's image; use it in a `with`."""
    pil = _pillow(where)
    name = os.fspath(source)
    if name.startswith(("http://", "https://")):
        _refuse(where, "is a URL, and nothing is fetched", "download it and pass its path")
    try:
        return pil.Image.open(BytesIO(_data_of(name, where)) if name.startswith("data:") else name)
    except FileNotFoundError:
        _refuse(where, "there is no such file", fix)
    except pil.UnidentifiedImageError:
        _refuse(where, "is no image that Pillow can read", fix)
    except pil.Image.DecompressionBombError as error:
        _refuse(where, f"is too large: {error}", "scale the image down")
    except (OSError, ValueError, SyntaxError) as error:
        text = getattr(error, "strerror", None) or str(error)
        _refuse(where, f"cannot be read: {text}", fix)


def _named(where: str, source: str | os.PathLike[str]) -> str:
    """The item with the end of its path, where the file's name is, or the beginning of its data URL."""
    name = os.fspath(source)
    if len(name) > 60:
        name = f"{name[:57]}..." if name.startswith("data:") else f"...{name[-57:]}"
    return f"{where} ({name})"


def _data_of(url: str, where: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma:
        _refuse(where, "is a data URL without a comma, so without data", "write data:image/png;base64,...")
    if not head.endswith(";base64"):
        return unquote_to_bytes(body)
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        _refuse(where, f"is a data URL whose base64 is damaged: {error}", "encode the whole file as base64")


def _pillow(where: str) -> ModuleType:
    try:
        import PIL
        import PIL.Image
        import PIL.ImageOps
    except ImportError:
        fix = "pip install 'torchplug[hf]', or pass a uint8 array [height, width, 3]"
        _refuse(where, "needs Pillow to be decoded, which is not installed", fix)
    return PIL


def _refuse(where: str, says: str, fix: str) -> NoReturn:
    raise RequestError("multi_modal_data", Problem(where, says, fix))
