"""How far a kernel may be from the truth: about as far as the plain computation is."""

from torch import Tensor, finfo


def assert_as_exact(got: Tensor, reference: Tensor, exact: Tensor) -> None:
    """`got` errs at most three times as much as `reference`, or by one unit of its dtype.

    `exact` is the float64 result. The unit allows for a reference that happens to be exact,
    and for the interpreter, which truncates to bfloat16 where a GPU rounds.
    """
    assert got.dtype == reference.dtype
    assert got.shape == exact.shape
    error, own = (
        (result.cpu().double() - exact.cpu()).abs().max().item() for result in (got, reference)
    )
    unit = finfo(got.dtype).eps * exact.abs().max().item()
    assert error <= 3 * own + unit, f"errs by {error}, the reference by {own}"
