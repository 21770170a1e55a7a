"""Layers compute with kernels of our own or with torch alone: `kernels_or_torch` runs a module's tests both ways."""

import pytest
from torchplug.layers.cpu import kernels


@pytest.fixture(scope="module", params=["kernels", "torch"])
def kernels_or_torch(request):
    if request.param == "kernels":
        if kernels._function("torchplug_linear") is None:
            pytest.skip("no kernels can be compiled here")
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_function", lambda name: None)
        yield
