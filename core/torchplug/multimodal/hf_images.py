"""transformers' image processors, always in their Pillow form, so that pixels do not depend on what else is installed.

Their settings are the checkpoint's (`preprocessor_config.json`, or inside `processor_config.json`), and the class's own
where there is no such file; sizes that the tower's weights are made for are the config's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torchplug.errors import CheckpointError, PluginError, Problem
from torchplug.multimodal.processor import ProcessorContext


def hf_image_processor(
    name: str, context: ProcessorContext, *, defaults: Mapping[str, Any] | None = None, **structure: Any
) -> Any:
    """An image processor of transformers.

    Args:
        name: Its class, e.g. "CLIPImageProcessorPil".
        context: Where its settings lie.
        defaults: Settings where there is no file, in place of the class's own.
        structure: Settings that follow from the model's config, e.g. patch_size; a file must agree with them.

    Raises:
        PluginError: transformers or Pillow is not installed.
        CheckpointError: the settings' file is damaged or contradicts config.json.
    """
    try:
        import transformers

        cls = getattr(transformers, name)
    except ImportError as error:
        fix = "pip install 'torchplug[hf]'"
        raise PluginError("image processor", Problem(name, f"cannot be imported: {error}", fix)) from error
    if hf_settings(context, "preprocessor_config.json", "image_processor") is None:
        return cls(**(dict(defaults or {}) | structure))
    assert context.directory is not None
    try:
        processor = cls.from_pretrained(context.directory, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        fix = "download the file again"
        raise CheckpointError(str(context.directory), Problem("preprocessor_config.json", str(error), fix)) from error
    problems = [
        Problem(f"preprocessor_config.json, {key}", f"is {found!r}, config.json says {value!r}", "take the right file")
        for key, value in structure.items()
        if (found := _plain(getattr(processor, key, value))) != value
    ]
    if problems:
        raise CheckpointError(str(context.directory), problems)
    return processor


def _plain(value: Any) -> Any:
    """A size as the dict that it was written as."""
    if isinstance(value, (int, float, str, list, tuple)) or value is None:
        return value
    return {key: size for key, size in dict(value).items() if size is not None}


def hf_settings(context: ProcessorContext, file: str, part: str) -> dict[str, Any] | None:
    """A checkpoint's settings for one kind of input; None where it has none.

    Args:
        context: Names the checkpoint's directory.
        file: Where they are, e.g. "video_preprocessor_config.json".
        part: What they are called inside processor_config.json, where newer checkpoints keep all of them.

    Raises CheckpointError where the file is no JSON object.
    """
    if context.directory is None:
        return None
    for name, key in ((file, None), ("processor_config.json", part)):
        try:
            text = (context.directory / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
        try:
            values = json.loads(text)
            values = values if key is None else values.get(key, {})
            if values or key is None:
                return dict(values)
        except (ValueError, AttributeError, TypeError) as error:
            problem = Problem(name, f"is no JSON object: {error}", "download the file again")
            raise CheckpointError(str(context.directory), problem) from error
    return None
