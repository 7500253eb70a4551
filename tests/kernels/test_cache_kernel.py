from collections.abc import Callable

import pytest
import torch

from kernels.cache import write_kv_reference
from kernels.triton.cache import write_kv

Write = Callable[..., None]


@pytest.mark.parametrize("write", [write_kv, write_kv_reference])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k_first", [True, False])
def test_rows_land_in_their_slots_and_nothing_else_changes(
    write: Write, dtype: torch.dtype, k_first: bool, device: torch.device
) -> None:
    blocks, block_size, heads, head_dim = 4, 3, 3, 5
    qkv = torch.randn(5, 4 * heads * head_dim, device=device).to(dtype)
    k = qkv[:, 30:45].view(5, heads, head_dim)
    v = torch.randn(5, heads, head_dim + 2, device=device).to(dtype)[..., :head_dim]
    k, v = (k, v) if k_first else (v, k)
    k_cache, v_cache = torch.randn(2, blocks, block_size, heads, head_dim, device=device).to(dtype)
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    slots = [7, -1, 11, 0, -1]
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected_k[slot // block_size, slot % block_size] = k[row]
            expected_v[slot // block_size, slot % block_size] = v[row]
    write(k, v, k_cache, v_cache, torch.tensor(slots, device=device))
    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)


def test_what_would_be_misread_is_refused(device: torch.device) -> None:
    k, slots = torch.zeros(1, 2, 4, device=device), torch.zeros(4, 2, device=device).long()
    cache, gaps = torch.zeros(3, 2, 2, 4, device=device), torch.zeros(3, 2, 2, 8, device=device)
    with pytest.raises(ValueError, match="contiguous heads"):
        write_kv(gaps[0, :, :, ::2], k, cache, cache, slots[0])
    for caches, where in ((gaps[..., :4], slots[0]), (cache, slots[:, 0])):
        with pytest.raises(ValueError, match="contiguous caches and slots"):
            write_kv(k, k, caches, caches, where)
