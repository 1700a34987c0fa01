"""Under `torch.autocast` a rule computes in the dtypes of torch's own function."""

import pytest
import torch
from corrections.calls import CALLS, name_of
from torch.utils import _pytree as pytree

import hodiff
from hodiff.rules.autocast import IN_FLOAT32, LOWERED

B = torch.bfloat16
CAST = [call for call in CALLS if name_of(call[0]).rpartition(".")[2] in IN_FLOAT32["cpu"] | LOWERED]
NOT_CAST = [call for call in CALLS if call not in CAST]

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")


def in_dtype(tree, dtype):
    def converted(tensor):
        return tensor.detach().to(dtype).requires_grad_() if tensor.dtype == torch.float64 else tensor.clone()

    return pytree.tree_map_only(torch.Tensor, converted, tree)


def outcome(function, arguments, dtype):
    args, kwargs = in_dtype(arguments, dtype)
    torch.manual_seed(0)
    with torch.autocast("cpu", B):
        result = function(*args, **kwargs)
    return [each for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]


def assert_torchs_dtypes(function, arguments, dtype):
    try:
        expected = outcome(function, arguments, dtype)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return False  # torch has no kernel
    got = outcome(hodiff.corrected(function), arguments, dtype)
    assert [each.dtype for each in got] == [each.dtype for each in expected]
    for one, other in zip(got, expected, strict=True):
        if one.dtype == torch.float32 and name_of(function).rpartition(".")[2] in IN_FLOAT32["cpu"]:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    return True


def test_functions_that_autocast_casts_have_dtypes_of_torch():
    """A loss in 16 bits would have two or three correct digits, while torch's has seven."""
    taken = [assert_torchs_dtypes(f, rest, dtype) for f, *rest in CAST for dtype in (B, torch.float32)]
    assert sum(taken) > 40


@pytest.mark.slow
def test_functions_that_autocast_leaves_have_dtypes_of_torch():
    taken = [assert_torchs_dtypes(f, rest, dtype) for f, *rest in NOT_CAST for dtype in (B, torch.float32)]
    assert sum(taken) > 300


def test_loss_derivatives_under_autocast_are_float32():
    x = torch.tensor([1.25, -2.5, 0.75], dtype=B)
    t = torch.tensor([0.1, 0.2, 0.3])

    def loss(x):
        with torch.autocast("cpu", B):
            return torch.nn.functional.poisson_nll_loss(x, t, reduction="sum")

    x32 = x.float()
    for route in hodiff.ROUTES:
        got = hodiff.hvp(loss, x, torch.ones_like(x), route=route)
        assert got.dtype == B
        torch.testing.assert_close(got.float(), x32.exp(), rtol=2**-8, atol=0)
    assert loss(x).dtype == hodiff.corrected(loss)(x.requires_grad_()).dtype == torch.float32


def test_bfloat16_distances_raise_where_torch_raises():
    x = torch.ones(3, 2, dtype=B, requires_grad=True)
    with hodiff.corrected(), pytest.raises(RuntimeError, match="BFloat16"):
        torch.cdist(x, x)
    with hodiff.corrected(), torch.autocast("cpu", B):
        assert torch.cdist(x, x).dtype == torch.float32
