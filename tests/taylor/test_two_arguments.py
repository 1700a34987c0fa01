"""Functions of several arguments, some of them constant, against interpolated values."""

import functools

import numpy as np
import pytest
import torch
from mpmath_series import D
from taylor.routes import assert_as_values, curves
from torch.nn import functional

GENERATOR = torch.Generator().manual_seed(3)


def positive(*shape):
    """Draw numbers from 0.5 to 1.5, so that curves and small changes stay positive."""
    return torch.rand(shape, generator=GENERATOR, dtype=D) + 0.5


def apart(*shape):
    """Draw numbers that stay larger than those of `positive`."""
    return torch.rand(shape, generator=GENERATOR, dtype=D) + 3.0


SQUARE = torch.eye(3, dtype=D) * 4
# The function and its arguments, of different ranks and with axes of length 1, so that they broadcast.
ELEMENTWISE = {
    "add": torch.add,
    "add with alpha": lambda a, b: torch.add(a, b, alpha=2),
    "sub": torch.sub,
    "rsub": torch.rsub,
    "mul": torch.mul,
    "div": torch.div,
    "pow": torch.pow,
    "float_power": torch.float_power,
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "logaddexp": torch.logaddexp,
    "logaddexp2": torch.logaddexp2,
    "xlogy": torch.xlogy,
    "xlog1py": torch.special.xlog1py,
    "zeta by the second": lambda a, b: torch.special.zeta(2.5 + 0 * a.detach(), b),
    "zeta of a whole number": lambda a, b: torch.special.zeta(3, b) + a,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "max of two": torch.max,
    "min of two": torch.min,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "copysign": torch.copysign,
    "ldexp": torch.ldexp,
    "where": lambda a, b: torch.where(torch.ones((), dtype=torch.bool), a, b),
    "clamp by the other": lambda a, b: torch.clamp(a, max=b),
    "lerp by a number": lambda a, b: torch.lerp(a, b.expand(torch.broadcast_shapes(a.shape, b.shape)), 0.3),
    "dist": lambda a, b: torch.linalg.vector_norm(a - b),
}
CASES = {f"{name}": (f, (positive(3, 1), apart(2))) for name, f in ELEMENTWISE.items()}
CASES |= {f"{name} of a higher rank": (f, (positive(3), apart(2, 2, 1))) for name, f in ELEMENTWISE.items()}
CASES |= {
    "lerp": (torch.lerp, (positive(3, 1), apart(3, 2), positive(2))),
    "addcmul": (torch.addcmul, (positive(2), positive(3, 1), apart(1))),
    "addcdiv": (functools.partial(torch.addcdiv, value=0.5), (positive(2), positive(3, 1), apart(1))),
    "matmul": (torch.matmul, (positive(2, 3), positive(3, 2))),
    "matmul of a vector": (torch.matmul, (positive(3), positive(2, 3, 2))),
    "matmul with a vector": (torch.matmul, (positive(2, 2, 3), positive(3))),
    "matmul of batches": (torch.matmul, (positive(2, 1, 2, 3), positive(3, 3, 2))),
    "mm": (torch.mm, (positive(2, 3), positive(3, 2))),
    "bmm": (torch.bmm, (positive(2, 2, 3), positive(2, 3, 2))),
    "mv": (torch.mv, (positive(2, 3), positive(3))),
    "dot": (torch.dot, (positive(3), positive(3))),
    "inner": (torch.inner, (positive(2, 3), positive(2, 3))),
    "outer": (torch.outer, (positive(2), positive(3))),
    "kron": (torch.kron, (positive(2, 1), positive(2))),
    "cross": (torch.linalg.cross, (positive(2, 3), positive(1, 3))),
    "vecdot": (torch.linalg.vecdot, (positive(2, 3), positive(3))),
    "tensordot": (lambda a, b: torch.tensordot(a, b, 1), (positive(2, 3), positive(3, 2))),
    "einsum": (functools.partial(torch.einsum, "ij,j,kj->ik"), (positive(2, 3), positive(3), positive(2, 3))),
    "addmm": (functools.partial(torch.addmm, beta=0.5), (positive(2), positive(2, 3), positive(3, 2))),
    "baddbmm": (torch.baddbmm, (positive(2), positive(2, 2, 3), positive(2, 3, 2))),
    "linear": (functional.linear, (positive(2, 3), positive(2, 3), positive(2))),
    "bilinear": (functional.bilinear, (positive(2, 3), positive(2, 2), positive(2, 3, 2), positive(2))),
    "conv1d": (functional.conv1d, (positive(2, 2, 5), positive(3, 2, 3), positive(3))),
    "conv_transpose2d": (functional.conv_transpose2d, (positive(1, 2, 3, 3), positive(2, 2, 2, 2), positive(2))),
    "solve": (torch.linalg.solve, (SQUARE + positive(2, 3, 3), positive(2, 3, 2))),
    "solve from the right": (
        functools.partial(torch.linalg.solve, left=False),
        (SQUARE + positive(3, 3), positive(2, 3)),
    ),
    "solve_triangular": (
        functools.partial(torch.linalg.solve_triangular, upper=True),
        (SQUARE + positive(3, 3), positive(3, 2)),
    ),
    "mse_loss": (functional.mse_loss, (positive(2, 3), apart(2, 3))),
    "kl_div": (functools.partial(functional.kl_div, reduction="batchmean"), (positive(2, 3), positive(2, 3))),
    "binary_cross_entropy_with_logits": (
        functional.binary_cross_entropy_with_logits,
        (positive(2, 3), positive(2, 3), positive(3)),
    ),
    "layer_norm": (
        lambda x, w, b: functional.layer_norm(x, (3,), w, b),
        (positive(2, 3) + torch.arange(3), positive(3), positive(3)),
    ),
    "attention": (
        functional.scaled_dot_product_attention,
        (positive(1, 2, 2, 3), positive(1, 2, 3, 3), positive(1, 2, 3, 2)),
    ),
    "cosine_similarity": (functional.cosine_similarity, (positive(2, 3), positive(2, 3))),
    "prelu": (functional.prelu, (positive(2, 3, 2) - 1, positive(3))),
    "index_add": (
        lambda x, y: torch.index_add(x, 0, torch.tensor([1, 1, 0]), y, alpha=2),
        (positive(2, 3), positive(3, 3)),
    ),
    "bincount": (lambda x, y: torch.bincount(torch.tensor([2, 0, 2]), x * y), (positive(3), positive(3))),
    "scatter": (lambda x, y: torch.scatter(x, 1, torch.tensor([[1], [2]]), y), (positive(2, 3), positive(2, 1))),
    "cat": (lambda a, b: torch.cat((a, b), 1), (positive(2, 1), positive(2, 3))),
}


def subsets(count):
    """Return the sets of moving arguments: all, and each alone."""
    return [tuple(range(count)), *((i,) for i in range(count))]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.one_in(24)
@pytest.mark.parametrize(
    ("name", "moving"),
    [(name, moving) for name, (_, args) in CASES.items() for moving in subsets(len(args))],
    ids=lambda part: "".join(map(str, part)) if isinstance(part, tuple) else part,
)
def test_any_subset_of_arguments_may_move(name, moving):
    f, args = CASES[name]

    def function(*given):
        filled = list(args)
        for place, x in zip(moving, given, strict=True):
            filled[place] = x
        return f(*filled)

    # The number of directions equals the length of an axis.
    assert_as_values(curves(function, [args[i] for i in moving], 3, 3), 3, (2, 3))


NUMBERS = {
    "x + 2": lambda x: x + 2,
    "2 + x": lambda x: 2 + x,
    "2 - x": lambda x: 2 - x,
    "2 * x": lambda x: 2 * x,
    "x / 2": lambda x: x / 2,
    "2 / x": lambda x: 2 / x,
    "x ** 2.5": lambda x: x**2.5,
    "x ** -2": lambda x: x**-2,
    "2.5 ** x": lambda x: 2.5**x,
    "x % 10": lambda x: x % 10.0,
    "5 % x": lambda x: 5.0 % (x + 7),
    "x // 2": lambda x: x // 10 + x,
    "xlogy of a number": lambda x: torch.xlogy(2.0, x),
    "xlogy by a number": lambda x: torch.xlogy(x, 2.0),
    "xlogy of 0": lambda x: torch.xlogy(0.0, x),
    "clamped": lambda x: torch.clamp(x, torch.tensor([-9.0, 9.0]), torch.tensor([[20.0], [20.0], [1.0]])) * x,
    "tensor of rank 0": lambda x: torch.tensor(2.0, dtype=D) ** x * torch.tensor(3.0, dtype=D),
    "an integer tensor": lambda x: torch.arange(1, 3) * x,
    "a power of integers": lambda x: torch.arange(1, 3) ** x,
    "a power to integers": lambda x: x ** torch.arange(3)[:, None, None],
    "single precision": lambda x: torch.ones(2, dtype=torch.float32) / x,
    "a power of half precision": lambda x: HALVES**x,
    "xlogy of half precision": lambda x: torch.xlogy(x, HALVES),
    "hypot of half precision": lambda x: torch.hypot(x, HALVES),
    "xlog1py by a number": lambda x: torch.special.xlog1py(x, 2.5),
    "atan2 by a mask": lambda x: torch.atan2(x, MASK),
    "masked_fill by True": lambda x: (x * x).masked_fill(MASK, value=True),
    "masked_fill by NumPy's number": lambda x: (x * x).masked_fill(MASK, np.float32(1.5)),
    "where True": lambda x: torch.where(MASK, x * x, True),
    "where NumPy's number": lambda x: torch.where(MASK, np.int64(2), x * x),
    "scatter of NumPy's number": lambda x: (x * x).scatter(0, torch.tensor([[1, 0]]), np.float32(1.5)),
    "pad by True": lambda x: functional.pad(x * x, (1, 0), value=True)[:, 1:] * x,
    "NumPy's numbers as index and dimension": lambda x: (x * x)[np.int64(1)].sum(np.int64(0)) * x,
    "NumPy's number to a power": lambda x: np.float32(1.5) ** x,
    **{
        f"{loss.__name__} with weights, {reduction}": lambda x, loss=loss, reduction=reduction: loss(
            x, torch.zeros_like(x), reduction=reduction, weight=WEIGHTS
        )
        for loss in (functional.mse_loss, functional.l1_loss, functional.huber_loss)
        for reduction in ("mean", "sum", "none")
    },
    "labels of a distribution": lambda x: x * torch.distributions.Categorical(x).log_prob(LABEL)[:, None],
}
HALVES = torch.tensor([0.3, 1.7], dtype=torch.float16)
MASK = torch.tensor([[True, False], [False, True], [False, False]])
LABEL = torch.tensor(1)
WEIGHTS = positive(3, 2)


@pytest.mark.parametrize("name", NUMBERS)
def test_python_numbers_and_other_dtypes_match(name):
    assert_as_values(curves(NUMBERS[name], (apart(3, 2),), 3, 2), 3, (2, 3))
