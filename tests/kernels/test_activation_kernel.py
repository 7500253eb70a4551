import pytest
import torch
from exactness import assert_as_exact

from kernels.activation import swiglu_reference
from kernels.triton.activation import swiglu


def test_reference_gates_by_its_first_half() -> None:
    gate_up = torch.tensor([[0.0, 2.0, 5.0, 3.0]])
    expected = torch.tensor([[0.0, 2.0 / (1.0 + torch.e**-2.0) * 3.0]])
    torch.testing.assert_close(swiglu_reference(gate_up), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 9, 1030])
def test_swiglu(size: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = (4 * torch.randn(3, 2 * size + 5, device=device)).to(dtype)[:, : 2 * size]
    exact = swiglu_reference(gate_up.double())
    assert_as_exact(swiglu(gate_up), swiglu_reference(gate_up), exact)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # what is tested
def test_swiglu_of_large_values_is_finite(device: torch.device) -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 1.0, 1.0]], device=device)
    assert swiglu(gate_up).tolist() == [[0.0, 200.0]]


def test_what_would_be_misread_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="contiguous rows"):
        swiglu(torch.zeros(4, 8, device=device).T)
