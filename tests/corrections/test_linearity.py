"""Derivatives by corrections and Functions are linear in cotangents and tangents of every size, to rounding.

Sizes are powers of two, which cause no rounding, so differences show how a rule depends on the size.
"""

import pytest
import torch
from corrections.calls import CALLS, CONSTANTS, name_of
from functions.catalogue import CASES
from torch import Tensor
from torch.utils import _pytree as pytree

import hodiff
from hodiff.corrections.mechanism.registry import correction_of

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")

HUGE, SMALL = 2.0**66, 2.0**-66
D = torch.float64
SINGLE = {torch.float64: torch.float32, torch.complex128: torch.complex64}
# This Function bounds the norm of its gradient on purpose.
NOT_LINEAR = {"clipped_gradient_linear"}


def differentiable(x):
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def first_call_of_each_rule():
    """Return the first call of each rule, with the positions of its differentiated arguments."""
    chosen = {}
    for f, args, kwargs in CALLS:
        # The first requires a float64 result. The second raises for losses that depend on phases, as random losses do.
        if f in (torch.Tensor.float_power_, torch.linalg.eig):
            continue
        moving = [i for i, x in enumerate(args) if differentiable(x) and not any(x is each for each in CONSTANTS)]
        correction = correction_of(f, args)
        # Newer versions of torch need fewer corrections.
        if moving and correction is not None:
            key = (correction.rule, *(type(x) if isinstance(x, Tensor) else str(x) for x in args))
            chosen.setdefault(key, (name_of(f), f, args, kwargs, moving))
    return list(chosen.values())


def each_function():
    for case in CASES:
        if case.name not in NOT_LINEAR:
            inputs = case.draw()
            yield case.name, case.function, inputs, {}, case.differentiated(inputs)


class Problem:
    """Derivatives of a call by each route, for cotangents and tangents of given sizes, divided by the sizes."""

    def __init__(self, f, args, kwargs, moving, single):
        dtypes = SINGLE if single else {}

        def cast(x):
            if isinstance(x, torch.dtype):
                return dtypes.get(x, x)
            return x.to(dtypes.get(x.dtype, x.dtype)) if isinstance(x, Tensor) else x

        args, kwargs = pytree.tree_map(cast, (list(args), kwargs))
        self.leaves = tuple(args[i] for i in moving)
        self.eps = torch.finfo(torch.float32 if single else D).eps

        def g(*leaves):
            given = list(args)
            for i, leaf in zip(moving, leaves, strict=True):
                given[i] = leaf.clone()  # the call may write into it
            return tuple(y for y in pytree.tree_leaves(f(*given, **kwargs)) if differentiable(y))

        self.g = g
        outputs = g(*self.leaves)
        generator = torch.Generator().manual_seed(0)

        def drawn(tensors):
            return tuple(
                torch.randn(x.shape, generator=generator, dtype=torch.promote_types(x.dtype, D)).to(x.dtype)
                for x in tensors
            )

        self.cotangents, self.tangents, self.others = drawn(outputs), drawn(self.leaves), drawn(self.leaves)

    def pull(self, leaves, size):
        return torch.func.vjp(self.g, *leaves)[1](tuple(c * size for c in self.cotangents))

    def push(self, leaves, size):
        return torch.func.jvp(self.g, leaves, tuple(t * size for t in self.tangents))[1]

    def by(self, route, size, other):
        """First or second derivative by the route, divided by the sizes."""
        if route == "reverse":
            found = self.pull(self.leaves, size)
        elif route == "forward":
            found = self.push(self.leaves, size)
        elif route == "reverse-over-reverse":
            found = torch.func.vjp(lambda *x: self.pull(x, size), *self.leaves)[1](
                tuple(u * other for u in self.others)
            )
        elif route == "forward-over-reverse":
            found = torch.func.jvp(lambda *x: self.pull(x, size), self.leaves, tuple(u * other for u in self.others))[1]
        elif route == "reverse-over-forward":
            cotangents = tuple(c * other for c in self.cotangents)
            found = torch.func.vjp(lambda *x: self.push(x, size), *self.leaves)[1](cotangents)
        else:
            found = torch.func.jvp(lambda *x: self.push(x, size), self.leaves, tuple(u * other for u in self.others))[1]
        return [each / size / other for each in found]


ROUTES = ("reverse", "forward", *hodiff.ROUTES)
SIZES = ((HUGE, 1.0), (SMALL, 1.0), (1.0, HUGE), (1.0, SMALL))


def assert_linear(f, args, kwargs, moving, single):
    with hodiff.corrected():
        problem = Problem(f, args, kwargs, moving, single)
        tiny = torch.finfo(torch.float32 if single else D).tiny
        for route in ROUTES:
            plain = problem.by(route, 1.0, 1.0)
            for size, other in SIZES if "-" in route else SIZES[:2]:
                scaled = problem.by(route, size, other)
                for a, b in zip(plain, scaled, strict=True):
                    # Numbers that underflow at these sizes are lost.
                    atol = 8 * problem.eps * float(a.abs().nan_to_num().max()) + tiny / min(size, other, 1.0)
                    torch.testing.assert_close(
                        b, a, rtol=0, atol=atol, equal_nan=True, msg=lambda text: f"{route} {size} {other}: {text}"
                    )


def parametrize_by(problems):
    return pytest.mark.parametrize(
        ("f", "args", "kwargs", "moving"), [pytest.param(*rest, id=name) for name, *rest in problems]
    )


@pytest.mark.one_in(24)
@pytest.mark.parametrize("single", [False, True], ids=["float64", "float32"])
@parametrize_by(first_call_of_each_rule())
def test_corrections_are_linear_in_cotangents_and_tangents(f, args, kwargs, moving, single):
    assert_linear(f, args, kwargs, moving, single)


@pytest.mark.one_in(24)
@pytest.mark.parametrize("single", [False, True], ids=["float64", "float32"])
@parametrize_by(each_function())
def test_functions_are_linear_in_cotangents_and_tangents(f, args, kwargs, moving, single):
    assert_linear(f, args, kwargs, moving, single)
