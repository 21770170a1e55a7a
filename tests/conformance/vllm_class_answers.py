"""What vLLM and torchplug say of every model class of vLLM: a script for an environment that has vLLM, JSON to stdout.

`test_vllm_classes.py` runs it and judges the answers. No model is built: classes are imported, and a bare instance is
one whose `__init__` never ran.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from collections import defaultdict
from contextlib import suppress

import torch
from torch import nn
from torchplug import interfaces as ours
from torchplug.errors import ContractError
from torchplug.host.contracts import inspect_class, inspect_instance


def complete_torchvision():
    """Make a torchvision importable whose operators are built for another device: its Python code is what is needed."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pass
    except RuntimeError:  # its library did not load, and it registers fakes for two of the operators in there
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float iou) -> Tensor")
        with suppress(ImportError, RuntimeError):
            importlib.import_module("torchvision")


complete_torchvision()  # before vLLM, which imports it

from vllm.model_executor.models import interfaces as theirs  # noqa: E402
from vllm.model_executor.models import interfaces_base as their_base  # noqa: E402
from vllm.model_executor.models.registry import ModelRegistry, _ModelInfo  # noqa: E402

SAME_NAME = (
    "has_inner_state",
    "has_noops",
    "is_attention_free",
    "is_hybrid",
    "is_mixture_of_experts",
    "requires_raw_input_tokens",
    "supports_any_eagle",
    "supports_eagle",
    "supports_eagle3",
    "supports_lora",
    "supports_mamba_prefix_caching",
    "supports_mrope",
    "supports_multimodal",
    "supports_multimodal_encoder_tp_data",
    "supports_multimodal_raw_input_only",
)
"""Guards that both sides have under one name. vLLM 0.32 has none for cross-encoders: a score type says it."""


def main():
    torch.set_num_threads(1)
    started = time.perf_counter()
    classes, failures = import_classes()
    imported = time.perf_counter()
    rows = [{"architectures": names} | answers_of(cls) for cls, names in classes.items()]
    seconds = {"import": imported - started, "compare": time.perf_counter() - imported}
    json.dump({"classes": rows, "failures": failures, "seconds": seconds}, sys.stdout)


def import_classes():
    """({class: its architectures}, {architecture: [type of the error, its text]})."""
    classes, failures = defaultdict(list), {}
    for architecture, registered in sorted(ModelRegistry.models.items()):
        try:
            cls = getattr(importlib.import_module(registered.module_name), registered.class_name)
        except Exception as error:
            failures[architecture] = [type(error).__name__, str(error)]
        else:
            classes[cls].append(architecture)
    return classes, failures


def answers_of(cls):
    """Both sides' answers for a class and for instances of it. Each pair is [ours, vLLM's]."""
    compared = {"class": pairs(cls), "instance": pairs(bare(cls))}
    compared["registry"] = {name: [compared["class"][name][0], kept] for name, kept in model_info(cls).items()}
    compared["class"]["is_vllm_model"] = [
        None,
        answer(their_base.is_vllm_model, cls),
    ]  # ours comes out of inspect_class
    verdict, report = inspected(cls)
    if report is not None:
        verdict |= inspected_instance(bare(cls), report)
    for layers in (0, 3) if theirs.MixtureOfExperts in cls.__mro__ else ():
        instance = with_experts(cls, layers)
        if instance is None:
            continue
        compared[f"instance with {layers} MoE layers"] = pairs(instance)
        if report is not None:
            verdict[f"{layers} MoE layers"] = inspected_instance(instance, report)
    return {
        "class": f"{cls.__module__}:{cls.__qualname__}",
        "compared": compared,
        "generates_text": answer(their_base.is_text_generation_model, cls),
        "verdict": verdict,
    }


def pairs(model):
    """{guard: [our answer, vLLM's]} for a class or an instance."""
    both = {name: [answer(getattr(side, name), model) for side in (ours, theirs)] for name in SAME_NAME}
    score = answer(their_base.get_score_type, model)
    both["supports_cross_encoding"] = [answer(ours.supports_cross_encoding, model), score == "cross-encoder"]
    return both


def answer(guard, model):
    """The guard's answer; an exception's text, if it raises, which the test takes for a crash."""
    try:
        return guard(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def model_info(cls):
    """What vLLM's registry keeps of a class, for the guards that it keeps."""
    info = _ModelInfo.from_model_cls(cls)
    kept = {name: getattr(info, name) for name in SAME_NAME if hasattr(info, name)}
    return kept | {"supports_cross_encoding": info.score_type == "cross-encoder"}


def bare(cls):
    """An instance without parameters or submodules, which looks names up as any module does."""
    instance = object.__new__(cls)
    if isinstance(instance, nn.Module):
        nn.Module.__init__(instance)
    return instance


def with_experts(cls, num_moe_layers):
    """A bare instance that has what MixtureOfExperts asks for; None where the class computes some of it."""
    values = dict.fromkeys(ours.MOE_ATTRIBUTES, 4)
    values |= {"num_moe_layers": num_moe_layers, "expert_weights": [], "moe_layers": []}
    if any(isinstance(getattr(cls, name, None), property) for name in values):
        return None
    instance = bare(cls)
    for name, value in values.items():
        setattr(instance, name, value)
    return instance


def inspected(cls):
    """(inspect_class's verdict as data, its report or None)."""
    try:
        report = inspect_class(cls, subject=f"class {cls.__name__}")
    except ContractError as error:
        return {"problems": error.as_dict()["problems"]}, None
    except Exception:
        return {"crash": traceback.format_exc()}, None
    warnings = [[warning.where, warning.says] for warning in report.warnings]
    return {"hooks": sorted(report.implementations), "warnings": warnings}, report


def inspected_instance(instance, report):
    try:
        return {"interfaces": sorted(inspect_instance(instance, report))}
    except ContractError as error:
        return {"problems": error.as_dict()["problems"]}
    except Exception:
        return {"crash": traceback.format_exc()}


if __name__ == "__main__":
    main()
