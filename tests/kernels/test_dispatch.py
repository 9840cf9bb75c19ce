"""Which twin runs, and what happens where the compiler does not know the chip."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType

import pytest
import torch

from deltatree.kernels import dispatch
from deltatree.kernels.dispatch import backend_for, dispatched


class PTXASError(RuntimeError):
    """Named as Triton's."""


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@pytest.fixture
def operation(monkeypatch):
    """`double` with a twin that is taken for every tensor, fails with `twin.error`, and counts its calls."""
    twin = ModuleType("a_fast_twin")
    twin.calls, twin.error = 0, None

    def fast(x):
        twin.calls += 1
        if twin.error:
            raise twin.error
        return x + x

    twin.double = fast
    monkeypatch.setitem(sys.modules, "a_fast_twin", twin)
    chips = set()
    monkeypatch.setattr(dispatch, "_uncompilable", chips)
    monkeypatch.setattr(
        dispatch,
        "backend_for",
        lambda tensor, backend=None: backend or ("reference" if tensor.device in chips else "triton"),
    )
    return dispatched(double, "a_fast_twin"), twin


def test_B58_a_chip_that_ptxas_does_not_know_gets_plain_pytorch_and_a_way_out(operation):
    """Compute capability 12.1 and a ptxas without sm_121a: one warning that names the override, and the right numbers."""
    run, twin = operation
    twin.error = PTXASError("ptxas fatal: Value 'sm_121a' is not defined for option 'gpu-name'")
    x = torch.arange(4.0)
    with pytest.warns(RuntimeWarning, match="TRITON_PTXAS_PATH .*TRITON_PTXAS_BLACKWELL_PATH.*capability 10") as caught:
        assert torch.equal(run(x), 2 * x)
    assert "plain PyTorch runs" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(run(x), 2 * x)  # asked once, not for every call
    assert twin.calls == 1
    with pytest.raises(PTXASError):
        run(x, backend="triton")  # who asks for it by name gets the truth


def test_any_other_failure_of_a_kernel_is_not_hidden(operation):
    run, twin = operation
    twin.error = RuntimeError("an illegal memory access")
    with pytest.raises(RuntimeError, match="illegal memory"):
        run(torch.ones(2))


def test_the_device_decides_and_a_name_overrides():
    assert backend_for(torch.ones(1)) == "reference" and backend_for(torch.ones(1), "triton") == "triton"
    with pytest.raises(ValueError, match="reference, triton"):
        backend_for(torch.ones(1), "cutlass")
