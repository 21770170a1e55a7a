"""What vLLM and torchplug say of every model class of vLLM: a script for an environment that has vLLM, JSON to stdout.

`test_vllm_classes.py` runs it and judges the answers. Nothing is built: classes are imported, and a bare instance is a
class without its `__init__`.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from collections import defaultdict

import torch
from torch import nn
from torchplug import interfaces as ours
from torchplug.errors import ContractError
from torchplug.host.contracts import inspect_class, inspect_instance
from vllm.model_executor.models import interfaces as theirs
from vllm.model_executor.models import interfaces_base as their_base
from vllm.model_executor.models.registry import ModelRegistry, _ModelInfo

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
"""Guards that both sides have under one name."""

EXPERTS = dict.fromkeys((name for name in ours.MOE_ATTRIBUTES if name.startswith("num_")), 4)


def import_classes():
    """({class: its architectures}, {architecture: why it cannot be imported})"""
    classes, failures = defaultdict(list), {}
    for architecture, registered in sorted(ModelRegistry.models.items()):
        try:
            cls = getattr(importlib.import_module(registered.module_name), registered.class_name)
        except Exception as error:
            failures[architecture] = f"{type(error).__name__}: {error}"
        else:
            classes[cls].append(architecture)
    return classes, failures


def pairs(model):
    """{guard: [our answer, vLLM's answer]} for a class or an instance. An exception is an answer too."""
    answers = {name: [answer(getattr(side, name), model) for side in (ours, theirs)] for name in SAME_NAME}
    answers["supports_cross_encoding"] = [
        answer(ours.supports_cross_encoding, model),
        answer(lambda model: their_base.get_score_type(model) == "cross-encoder", model),
    ]
    return answers


def answer(guard, model):
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
    """An instance whose `__init__` never ran, so that its submodules are missing; it looks names up as any module."""
    instance = object.__new__(cls)
    if isinstance(instance, nn.Module):
        nn.Module.__init__(instance)
    return instance


def with_experts(cls, num_moe_layers):
    """A bare instance that sets what MixtureOfExperts asks for, or None where the class computes some of it."""
    instance = bare(cls)
    values = EXPERTS | {"num_moe_layers": num_moe_layers, "expert_weights": [], "moe_layers": []}
    if any(isinstance(getattr(cls, name, None), property) for name in values):
        return None
    for name, value in values.items():
        setattr(instance, name, value)
    return instance


def verdict(cls):
    """How inspect_class judged a class, and inspect_instance a bare instance of it."""
    try:
        report = inspect_class(cls, subject=f"class {cls.__name__}")
    except ContractError as error:
        return {"problems": error.as_dict()["problems"], "text": str(error)}
    except Exception:
        return {"crash": traceback.format_exc()}
    result = {
        "hooks": sorted(report.implementations),
        "lacking": {name: list(row.lacking) for name, row in report.implementations.items() if row.lacking},
        "warnings": [[warning.where, warning.says, warning.fix] for warning in report.warnings],
    }
    try:
        result["instance"] = sorted(inspect_instance(bare(cls), report))
    except ContractError as error:
        result["instance_problems"] = error.as_dict()["problems"]
    except Exception:
        result["crash"] = traceback.format_exc()
    return result


def main():
    torch.set_num_threads(1)
    started = time.perf_counter()
    classes, failures = import_classes()
    imported = time.perf_counter()
    rows = []
    for cls, architectures in classes.items():
        row = {
            "class": f"{cls.__module__}:{cls.__qualname__}",
            "architectures": architectures,
            "guards": pairs(cls),
            "registry": model_info(cls),
            "instance": pairs(bare(cls)),
            "contract": verdict(cls),
        }
        if theirs.MixtureOfExperts in cls.__mro__:
            for layers in (0, 3):
                instance = with_experts(cls, layers)
                if instance is not None:
                    row[f"experts_{layers}"] = pairs(instance)
        rows.append(row)
    seconds = {"import": imported - started, "compare": time.perf_counter() - imported}
    json.dump({"classes": rows, "failures": failures, "seconds": seconds}, sys.stdout)


if __name__ == "__main__":
    main()
