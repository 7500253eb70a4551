import pytest
import torch
from exactness import assert_as_exact
from torch import Tensor

from kernels.rotary import rotary_reference
from kernels.triton.rotary import rotary


def angles(positions: Tensor, head_dim: int) -> Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, device=positions.device) / head_dim)
    return positions[:, None].float() * frequencies


def test_reference_turns_pairs_like_complex_numbers() -> None:
    q, k, angle = torch.randn(4, 3, 6), torch.randn(4, 1, 6), angles(torch.arange(4), 6)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    expected = [torch.complex(x[..., :3], x[..., 3:]) * turn for x in (q, k)]
    rotary_reference(q, k, angle.cos(), angle.sin())
    for got, turned in zip((q, k), expected, strict=True):
        torch.testing.assert_close(got, torch.cat((turned.real, turned.imag), dim=-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("q_heads", "k_heads", "head_dim"), [(7, 1, 10), (4, 4, 16), (9, 3, 2)])
def test_rotary_within_a_fused_projection(
    q_heads: int, k_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    heads = q_heads + 2 * k_heads
    qkv = torch.randn(5, heads * head_dim, device=device).to(dtype)
    angle = angles(torch.tensor([0, 3, 4, 5, 1000], device=device), head_dim)
    cos, sin = angle.cos(), angle.sin()

    def rotated(function: object, source: Tensor) -> Tensor:
        fused = source.clone()
        q, k, _ = fused.view(5, heads, head_dim).split([q_heads, k_heads, k_heads], dim=1)
        assert callable(function)
        assert function(q, k, cos, sin) is None
        return fused

    got = rotated(rotary, qkv)
    exact = rotated(rotary_reference, qkv.double())
    assert_as_exact(got, rotated(rotary_reference, qkv), exact)
    untouched = slice((q_heads + k_heads) * head_dim, None)
    assert torch.equal(got[:, untouched], qkv[:, untouched])


def test_heads_may_be_spaced(device: torch.device) -> None:
    rows = torch.randn(2, 3, 4, 11, device=device)
    expected = rows.clone()
    angle = angles(torch.arange(3, device=device), 8)
    rotary(*rows[..., 2:10], angle.cos(), angle.sin())
    rotary_reference(*expected[..., 2:10], angle.cos(), angle.sin())
    torch.testing.assert_close(rows, expected)


def test_rotary_refuses_what_it_would_corrupt(device: torch.device) -> None:
    q, k = torch.zeros(2, 3, 8, device=device), torch.zeros(2, 1, 8, device=device)
    cos = torch.zeros(2, 4, device=device)
    with pytest.raises(ValueError, match="contiguous heads"):
        rotary(q.transpose(1, 2).contiguous().transpose(1, 2), k, cos, cos)
    with pytest.raises(ValueError, match="contiguous cos"):
        rotary(q, k, torch.zeros(2, 8, device=device)[:, ::2], cos)
