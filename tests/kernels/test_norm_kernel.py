import pytest
import torch
from exactness import assert_as_exact
from torch.nn.functional import rms_norm as torch_rms_norm

from kernels.norm import add_rms_norm_reference, rms_norm_reference
from kernels.triton.norm import add_rms_norm, rms_norm

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def test_reference_is_torchs_rms_norm() -> None:
    x, weight = torch.randn(5, 12), torch.randn(12)
    torch.testing.assert_close(
        rms_norm_reference(x, weight, EPS), torch_rms_norm(x, (12,), weight, EPS)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 64, 1100])
def test_rms_norm(size: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(5, size, device=device).to(dtype)
    weight = torch.randn(size, device=device).to(dtype)
    exact = rms_norm_reference(x.double(), weight.double(), EPS)
    assert_as_exact(rms_norm(x, weight, EPS), rms_norm_reference(x, weight, EPS), exact)


def test_rms_norm_of_heads_within_a_fused_projection(device: torch.device) -> None:
    qkv = torch.randn(5, 8 * 12, device=device)
    weight = torch.randn(12, device=device)
    spaced = torch.randn(5, 3, 20, device=device)[:, :, 4:16]
    for heads in (qkv[:, :60].view(5, 5, 12), qkv[:, 60:84].view(5, 2, 12), spaced):
        exact = rms_norm_reference(heads.double(), weight.double(), EPS)
        got = rms_norm(heads, weight, EPS)
        assert_as_exact(got, rms_norm_reference(heads, weight, EPS), exact)
        assert got.is_contiguous()


def test_rms_norm_keeps_eps(device: torch.device) -> None:
    x = torch.full((1, 8), 1e-4, device=device)
    weight = torch.ones(8, device=device)
    torch.testing.assert_close(rms_norm(x, weight, 1.0), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [7, 1100])
def test_add_rms_norm(size: int, dtype: torch.dtype, device: torch.device) -> None:
    x, residual = torch.randn(2, 5, 2 * size, device=device).to(dtype)[:, :, :size]
    weight = torch.randn(size, device=device).to(dtype)
    before = residual.clone()
    normed, total = add_rms_norm(x, residual, weight, EPS)
    reference_normed, reference_total = add_rms_norm_reference(x, residual, weight, EPS)
    assert_as_exact(total, reference_total, residual.double() + x.double())
    assert_as_exact(
        normed, reference_normed, rms_norm_reference(total.double(), weight.double(), EPS)
    )
    # The norm is of the sum that was returned, after rounding: of another it would often differ.
    assert (normed != rms_norm(total, weight, EPS)).float().mean() < 0.02
    assert torch.equal(residual, before)


def test_what_would_be_misread_is_refused(device: torch.device) -> None:
    x, weight = torch.zeros(4, 8, device=device), torch.zeros(4, device=device)
    with pytest.raises(ValueError, match="contiguous last dimension"):
        rms_norm(x[:, ::2], weight, EPS)
    with pytest.raises(ValueError, match="contiguous last dimension"):
        add_rms_norm(x[:, :4], x[:, ::2], weight, EPS)
