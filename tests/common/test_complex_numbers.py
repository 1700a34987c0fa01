"""Comparison of tensors that hold NaN, infinite and complex numbers."""

import pytest
import torch

from hodiff.common.complex_numbers import equal_with_nan

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        ([0.0, NAN, -INF], [-0.0, NAN, -INF], True),
        ([NAN], [0.0], False),
        ([INF], [torch.finfo(torch.float32).max], False),
        ([complex(NAN, 1)], [complex(NAN, 1)], True),
        ([complex(1, NAN)], [complex(1, 0)], False),
        ([1.0], [1.0, 1.0], False),
        ([1.0], [1], False),
        ([], [], True),
        ([True], [True], True),
    ],
)
def test_equal_with_nan(a, b, equal):
    assert equal_with_nan(torch.tensor(a), torch.tensor(b)) is equal
