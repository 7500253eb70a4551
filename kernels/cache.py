"""Writing keys and values into the paged KV cache (Kwon et al. 2023, arXiv 2309.06180)."""

from torch import Tensor


def write_kv_reference(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> None:
    """Put k and v [T, Hk, D] at `slots` of the caches [num_blocks, block_size, Hk, D].

    slots [T] int64 is `block * block_size + offset`; rows whose slot is -1 are padding and
    are left out.
    """
    used = slots >= 0
    if not used.all():
        k, v, slots = k[used], v[used], slots[used]
    for rows, cache in ((k, k_cache), (v, v_cache)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, rows)
