"""The oracles of Mamba, Falcon Mamba and Mamba-2 fail on faults in files, arithmetic and the keeping of state."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
import torch.nn.functional as F
from checkpoints import (
    OracleMismatch,
    assert_same_logits,
    edit_weights,
    module_logits,
    read_config,
    write_config,
)
from recurrent_cases import CASES, without_kernels
from state_steps import Part, States
from torch import Tensor
from torchplug.layers import mamba, mamba2, state_step

pytestmark = pytest.mark.oracle

FAULTLESS = {
    "mamba": CASES["mamba-72_channels_of_10"],
    "falcon": CASES["falcon-72_channels_of_10"],
    "mamba2": CASES["mamba2-6_heads_in_3_groups"],
}
Fault = Callable[[Path], None]


@pytest.fixture(scope="module")
def faultless(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: checkpoints.write_checkpoint(
            tmp_path_factory.mktemp(family), case.config, seed=case.seed, **case.options
        )
        for family, case in FAULTLESS.items()
    }


@pytest.fixture(scope="module")
def references(faultless: dict[str, Path]) -> dict[str, Tensor]:
    return {
        family: checkpoints.oracle_logits(checkpoints.oracle_model(directory), FAULTLESS[family].logits_prompt)
        for family, directory in faultless.items()
    }


def our_module(host: Any, directory: Path) -> Any:
    """Computed by torch, where a fault is easily planted."""
    module = host.load(str(directory), device="cpu", dtype="float32").module
    without_kernels(module)
    return module


def assert_whole(module: Any, family: str, reference: Tensor) -> None:
    assert_same_logits(module_logits(module, FAULTLESS[family].logits_prompt), reference)


def assert_cut(module: Any, family: str, reference: Tensor) -> None:
    """The prompt in two steps and then token by token, in slots that somebody had."""
    prompt = FAULTLESS[family].logits_prompt
    states = States(module, num_slots=3)
    states.step([Part(slot, prompt[::-1], 0, 30) for slot in range(3)])
    rows = [states.step([Part(1, prompt, start, stop)])[0] for start, stop in ((0, 7), (7, 20))]
    rows += [states.step([Part(1, prompt, at, at + 1)])[0] for at in range(20, len(prompt))]
    first = states.step([Part(2, prompt, 0, 1)])
    states.close()
    assert_same_logits(torch.cat(rows), reference)
    assert_same_logits(torch.cat(first), reference[:1])


@pytest.mark.parametrize("family", FAULTLESS)
def test_without_a_fault_the_oracle_agrees(
    host: Any, faultless: dict[str, Path], references: dict[str, Tensor], family: str
) -> None:
    module = our_module(host, faultless[family])
    assert_whole(module, family, references[family])
    assert_cut(module, family, references[family])


# Faults that an edit of the files expresses


def config_says(**changes: Any) -> Fault:
    return lambda directory: write_config(directory, read_config(directory) | changes)


def tensor(name: str, change: Callable[[Tensor], Tensor]) -> Fault:
    def edit(weights: dict[str, Tensor]) -> None:
        weights[name] = change(weights[name])

    return lambda directory: edit_weights(directory, edit)


def mixer_tensor(name: str, change: Callable[[Tensor], Tensor]) -> Fault:
    return tensor(f"backbone.layers.1.mixer.{name}", change)


def halves_exchanged(rows: Tensor) -> Tensor:
    return torch.cat(rows.chunk(2)[::-1])


_SHARED: dict[str, Fault] = {
    "eps 1e-4 too large": config_says(layer_norm_epsilon=1.1e-4),
    "bias of the filter dropped": mixer_tensor("conv1d.bias", torch.zeros_like),
    "filter reversed": mixer_tensor("conv1d.weight", lambda taps: taps.flip(-1)),
    "filter 2 % high": mixer_tensor("conv1d.weight", lambda taps: taps * 1.02),
    "decay 2 % high": mixer_tensor("A_log", lambda decay: decay + 0.02),
    "skip 2 % high": mixer_tensor("D", lambda skip: skip * 1.02),
    "another activation": config_says(hidden_act="gelu"),
}
FILE_FAULTS: dict[str, dict[str, Fault]] = {
    "mamba": _SHARED
    | {
        "bias of the step dropped": mixer_tensor("dt_proj.bias", torch.zeros_like),
        "gate and input exchanged": mixer_tensor("in_proj.weight", halves_exchanged),
        "states in another order": mixer_tensor("A_log", lambda decay: decay.flip(-1)),
    },
    "falcon": _SHARED | {"eps of the inner norms 1e-4 too large": config_says(mixer_rms_eps=1e-2)},
    "mamba2": _SHARED
    | {
        "bias of the step dropped": mixer_tensor("dt_bias", torch.zeros_like),
        "norm weight ignored": mixer_tensor("norm.weight", torch.ones_like),
        "a limit of the step": config_says(time_step_limit=[0.0, 1.0]),
    },
}


@pytest.mark.parametrize(
    ("family", "fault"), [(family, fault) for family in FILE_FAULTS for fault in FILE_FAULTS[family]]
)
def test_the_oracle_fails_on_a_fault_in_the_files(
    host: Any, tmp_path: Path, faultless: dict[str, Path], references: dict[str, Tensor], family: str, fault: str
) -> None:
    directory = Path(shutil.copytree(faultless[family], tmp_path / "copy"))
    FILE_FAULTS[family][fault](directory)
    with pytest.raises(OracleMismatch):
        assert_whole(our_module(host, directory), family, references[family])


# Faults of the arithmetic


def relu_steps(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    for part in (mamba, mamba2):
        monkeypatch.setattr(part.F, "softplus", F.relu)


def b_and_c_exchanged(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    for part, name in ((mamba, "selective_scan"), (mamba2, "ssd_scan")):
        scan = getattr(part, name)
        monkeypatch.setattr(part, name, lambda x, dt, decay, b, c, *rest, scan=scan: scan(x, dt, decay, c, b, *rest))


def heads_dealt_to_groups_in_turn(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    scan = mamba2.ssd_scan

    def dealt(x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, *rest: Any) -> Any:
        order = torch.arange(6).view(2, 3).t().flatten()  # 0 3 1 4 2 5: where each head would go
        y, state = scan(x[:, order], dt[:, order], decay[order], b, c, *rest)
        return y[:, order.argsort()], state

    monkeypatch.setattr(mamba2, "ssd_scan", dealt)


def norm_in_groups(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    for layer in module.backbone.layers:
        layer.mixer.norm.groups = 3


def gate_after_the_norm(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    for layer in module.backbone.layers:
        norm = layer.mixer.norm

        def forward(x: Tensor, gate: Tensor, norm: Any = norm) -> Tensor:
            return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps) * F.silu(gate)

        monkeypatch.setattr(norm, "forward", forward)


def no_inner_norms(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    module.backbone.layers[1].mixer.norm_eps = None


def step_not_normed(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    norm = F.rms_norm
    monkeypatch.setattr(
        mamba.F, "rms_norm", lambda x, shape, weight, eps: x if shape[-1] == 5 else norm(x, shape, weight, eps)
    )


ARITHMETIC = {
    "mamba": (relu_steps, b_and_c_exchanged),
    "falcon": (b_and_c_exchanged, no_inner_norms, step_not_normed),
    "mamba2": (relu_steps, b_and_c_exchanged, heads_dealt_to_groups_in_turn, norm_in_groups, gate_after_the_norm),
}


@pytest.mark.parametrize(
    ("family", "fault"), [(family, fault) for family in ARITHMETIC for fault in ARITHMETIC[family]]
)
def test_the_oracle_fails_on_a_fault_of_the_arithmetic(
    host: Any,
    monkeypatch: pytest.MonkeyPatch,
    faultless: dict[str, Path],
    references: dict[str, Tensor],
    family: str,
    fault: Callable[[pytest.MonkeyPatch, Any], None],
) -> None:
    module = our_module(host, faultless[family])
    fault(monkeypatch, module)
    with pytest.raises(OracleMismatch):
        assert_whole(module, family, references[family])


# Faults of what is kept from step to step: nothing of them shows in a whole prompt


def every_step_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    read = state_step.Slots.read
    monkeypatch.setattr(state_step.Slots, "read", lambda slots, *rest: read(slots, *rest).zero_())


def state_space_state_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    write = state_step.Slots.write
    monkeypatch.setattr(
        state_step.Slots, "write", lambda slots, state, after: None if after.dim() > 3 else write(slots, state, after)
    )


def filter_inputs_one_token_old(monkeypatch: pytest.MonkeyPatch) -> None:
    write = state_step.Slots.write

    def old(slots: Any, state: Tensor | None, after: Tensor) -> None:
        write(slots, state, after.roll(1, 1) if after.dim() == 3 and after.shape[1] == 3 else after)

    monkeypatch.setattr(state_step.Slots, "write", old)


def first_tokens_continue_the_last_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = state_step._slots

    def never_fresh(requests: Any, device: torch.device) -> Any:
        import dataclasses

        return plan([dataclasses.replace(request, fresh=False) for request in requests], device)

    monkeypatch.setattr(state_step, "_slots", never_fresh)


def first_tokens_of_single_steps_continue_the_last_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = state_step._slots

    def fresh_if_long(requests: Any, device: torch.device) -> Any:
        import dataclasses

        return plan([dataclasses.replace(r, fresh=r.fresh and r.length > 1) for r in requests], device)

    monkeypatch.setattr(state_step, "_slots", fresh_if_long)


KEEPING = {
    "mamba": (filter_inputs_one_token_old,),
    "falcon": (),
    "mamba2": (filter_inputs_one_token_old, state_space_state_not_written),
}
EVERYWHERE = (
    every_step_from_zero,
    first_tokens_continue_the_last_tenant,
    first_tokens_of_single_steps_continue_the_last_tenant,
)


@pytest.mark.parametrize(
    ("family", "fault"), [(family, fault) for family in KEEPING for fault in (*EVERYWHERE, *KEEPING[family])]
)
def test_the_oracle_fails_on_a_fault_of_what_is_kept(
    host: Any,
    monkeypatch: pytest.MonkeyPatch,
    faultless: dict[str, Path],
    references: dict[str, Tensor],
    family: str,
    fault: Callable[[pytest.MonkeyPatch], None],
) -> None:
    module = our_module(host, faultless[family])
    fault(monkeypatch)
    assert_whole(module, family, references[family])
    with pytest.raises(OracleMismatch):
        assert_cut(module, family, references[family])
