"""A device or dtype is what was asked for, or a clear error."""

from __future__ import annotations

import pytest
import torch
from torchplug.errors import DeviceError
from torchplug.host.devices import resolve_device, resolve_dtype

CPU = torch.device("cpu")


def test_auto_is_the_accelerator_or_the_cpu():
    expected = torch.accelerator.current_accelerator(check_available=True)
    assert resolve_device("auto").type == (expected.type if expected else "cpu")
    assert resolve_device("cpu") == CPU == resolve_device(torch.device("cpu:0"))


def test_a_device_is_resolved_with_its_index():
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        assert resolve_device(kind).index is not None


@pytest.mark.parametrize("name", ["cuda:99", "mps:99", "xpu:99", "cpu:7", "meta"])
def test_a_missing_device_is_an_error_that_offers_what_is_there(name):
    with pytest.raises(
        DeviceError, match=rf"device '{name}': this machine has \d+ {name.split(':')[0]} device"
    ) as raised:
        resolve_device(name)
    assert "fix: use " in str(raised.value)


def test_a_name_that_is_no_device_is_an_error():
    with pytest.raises(DeviceError, match="device 'gpu': is not a device"):
        resolve_device("gpu")


def test_dtypes():
    assert resolve_dtype("auto", "float16", CPU) is torch.float16
    assert resolve_dtype("auto", None, CPU) in (torch.bfloat16, torch.float32)
    assert resolve_dtype("half", "float32", CPU) is torch.float16
    assert resolve_dtype(torch.float32, "float16", CPU) is torch.float32
    with pytest.raises(DeviceError, match="dtype 'int8': is not served"):
        resolve_dtype("int8", None, CPU)


@pytest.mark.parametrize("device", [None, ["cpu"], 1.5])
def test_a_device_that_is_no_name_is_an_error(device):
    with pytest.raises(DeviceError, match="is not a device"):
        resolve_device(device)


def test_a_dtype_that_is_no_name_is_an_error():
    with pytest.raises(DeviceError, match="is not served"):
        resolve_dtype(["float32"], None, CPU)


@pytest.mark.parametrize("stored", ["float64", "int8", "bf16"])
def test_a_checkpoints_dtype_that_is_not_served_is_an_error_until_one_is_chosen(stored):
    with pytest.raises(DeviceError, match=f"dtype '{stored}': the checkpoint's config.json names it"):
        resolve_dtype("auto", stored, CPU)
    assert resolve_dtype("float32", stored, CPU) is torch.float32
