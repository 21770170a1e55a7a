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


@pytest.mark.parametrize("name", ["cuda:99", "mps:99", "xpu:99", "meta"])
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
