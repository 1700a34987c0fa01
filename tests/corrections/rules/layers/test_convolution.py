"""Transposed convolutions with output padding: torch's values, and third derivatives, which torch does not support."""

import pytest
import torch
import torch.nn.functional as F
from corrections.against_torch import assert_every_route, same_error, same_value
from drawing import normals, seeded

import hodiff

randn = normals(seeded())

CASES = {
    "1d": (lambda x, w, b: F.conv_transpose1d(x, w, b, 2, 1, 1), (randn(1, 2, 3), randn(2, 1, 2), randn(1))),
    "1d unbatched": (lambda x, w: F.conv_transpose1d(x, w, None, [3], 0, [2]), (randn(1, 2), randn(1, 1, 2))),
    "2d": (
        lambda x, w: F.conv_transpose2d(x, w, stride=(2, 1), output_padding=(1, 0), padding=(0, 1)),
        (randn(1, 1, 2, 2), randn(1, 1, 2, 3)),
    ),
    "2d of groups": (
        lambda x, w: F.conv_transpose2d(x, w, groups=2, dilation=2, output_padding=1),
        (randn(1, 2, 1, 2), randn(2, 1, 2, 1)),
    ),
    "3d": (
        lambda x, w: F.conv_transpose3d(x, w, stride=2, padding=(0, 1, 0), output_padding=(1, 1, 0)),
        (randn(1, 1, 1, 2, 1), randn(1, 1, 1, 2, 1)),
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_derivatives_match_differences_by_every_route(name):
    f, inputs = CASES[name]
    assert_every_route(f, inputs)


@pytest.mark.parametrize("name", CASES)
def test_values_match_torch(name):
    f, inputs = CASES[name]
    same_value(lambda: f(*inputs))


def test_torch_alone_fails():
    """The tests above would prove nothing if torch alone were right."""
    f, (x, w, _) = CASES["1d"]
    leaves = [each.clone().requires_grad_() for each in (x, w, randn(1))]
    y = f(*leaves).pow(3).sum()
    for _ in range(2):
        y = sum(each.pow(2).sum() for each in torch.autograd.grad(y, leaves, create_graph=True))
    with pytest.raises(RuntimeError, match="output_padding is not supported"):
        torch.autograd.grad(y, leaves)


def test_errors_match_torch():
    x, w = randn(1, 1, 3), randn(1, 1, 2)
    same_error(lambda: F.conv_transpose1d(x, w, output_padding=1))


@pytest.mark.parametrize("dims", [2, 3])
def test_unpooling_keeps_the_memory_format(dims):
    layout = {2: torch.channels_last, 3: torch.channels_last_3d}[dims]
    x = torch.arange(2.0 * 3 * 4**dims, dtype=torch.float64).reshape(2, 3, *(4,) * dims)
    pool, unpool = {2: (F.max_pool2d, F.max_unpool2d), 3: (F.max_pool3d, F.max_unpool3d)}[dims]
    for memory_format in (layout, torch.contiguous_format):
        pooled, indices = pool(x.contiguous(memory_format=memory_format), 2, return_indices=True)
        pooled = pooled.contiguous(memory_format=memory_format).requires_grad_()
        expected = unpool(pooled, indices, 2)
        with hodiff.corrected():
            found = unpool(pooled, indices, 2)
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()
