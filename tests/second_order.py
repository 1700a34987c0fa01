"""Torch's `gradgradcheck` and SciPy's Hessian of values, for all public names that have derivatives.

Each folder lists its names in a table of rows (`tests/*/test_second_order.py`); a missing name fails its test.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from drawing import draw
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils import _pytree as pytree

from hodiff.checks import scipy_hessian

# SciPy evaluates a grid for each pair of directions; two directions involve every element of a Hessian.
DIRECTIONS = 2
AGREES_TO = 1e-6
# gradgradcheck builds the whole Jacobian, inputs by outputs; above this size it checks a projection.
DENSE = 30


@dataclass(frozen=True)
class Row:
    """A public name as a function of tensors, at a point where its second derivative is not zero.

    Attributes:
        name: The public name.
        function: A function of the tensors; may return a pytree.
        inputs: Tensors in float64.
        variant: Text that distinguishes rows of one name.
        duals: Whether it runs inside `torch.autograd.forward_ad`, where torch refuses `torch.func.jvp`.
        transforms: Whether it runs inside `torch.func` transforms.
        slow: Whether it takes seconds.
        step: SciPy's first step, which must not leave the function's domain.
        atol: Absolute tolerance of `gradgradcheck`'s own differences.
    """

    name: str
    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    variant: str = ""
    duals: bool = True
    transforms: bool = True
    slow: bool = False
    step: float = 0.1
    atol: float = 1e-5

    @property
    def id(self) -> str:
        return f"{self.name}-{self.variant}" if self.variant else self.name

    def outputs(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(each for each in pytree.tree_leaves(self.function(*inputs)) if isinstance(each, Tensor))


def parametrize_by_rows(rows: Iterable[Row]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "row", [pytest.param(row, id=row.id, marks=[pytest.mark.slow] if row.slow else []) for row in rows]
    )


def assert_second_order(row: Row) -> None:
    assert_gradgradcheck(row)
    assert_scipy_hessian(row)


def assert_gradgradcheck(row: Row) -> None:
    """Check first and second derivatives, also forward over reverse, against torch's differences."""
    leaves = tuple(each.clone().requires_grad_() for each in row.inputs)
    fast = sum(map(Tensor.numel, leaves)) * sum(map(Tensor.numel, row.outputs(*leaves))) > DENSE
    assert gradcheck(row.outputs, leaves, check_forward_ad=row.duals, fast_mode=fast)
    assert gradgradcheck(row.outputs, leaves, check_fwd_over_rev=row.duals, fast_mode=fast, atol=row.atol)


def assert_scipy_hessian(row: Row) -> None:
    """Compare second derivatives by nested transforms and by nested graphs with SciPy's differences of values."""
    along = along_directions(row)
    origin = torch.zeros(DIRECTIONS, dtype=torch.float64)
    estimate = scipy_hessian(along, origin, initial_step=row.step, order=4, maxiter=2)
    scale = estimate.matrix.abs().max()
    assert scale > 1e-3, "a Hessian that is zero tells nothing"
    ways = {"graphs": torch.autograd.functional.hessian(along, origin)}
    if row.transforms:
        ways["transforms"] = torch.func.hessian(along)(origin)
    for way, ours in ways.items():
        gap = (ours - estimate.matrix).abs()
        allowed = 10 * estimate.error + AGREES_TO * scale
        assert bool((gap <= allowed).all()), f"{way}: {ours} differs from SciPy's {estimate.matrix} +- {estimate.error}"


def along_directions(row: Row) -> Callable[[Tensor], Tensor]:
    """Return a nonlinear scalar function of the outputs, as a function of steps along a few directions."""
    sizes = [each.numel() for each in row.inputs]
    directions = torch.linalg.qr(draw(max(sum(sizes), DIRECTIONS), DIRECTIONS, seed=7))[0][: sum(sizes)]

    def along(steps: Tensor) -> Tensor:
        parts = (directions @ steps).split(sizes)
        moved = (x + part.reshape(x.shape) for x, part in zip(row.inputs, parts, strict=True))
        total = steps.new_zeros(())
        for y in row.outputs(*moved):
            weights = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape)
            total = total + (weights * y).sum()
        return total + total**2 / 10

    return along


def public(module: ModuleType) -> set[str]:
    """Names of a module's public API, without modules, exceptions and what it imports only for types."""
    names = {name for name in dir(module) if not name.startswith("_")}
    return {name for name in names if not _is_excluded(getattr(module, name))}


def _is_excluded(value: Any) -> bool:
    if inspect.ismodule(value):
        return True
    return inspect.isclass(value) and issubclass(value, (BaseException, Warning))


def assert_listed(names: Collection[str], rows: Iterable[Row], without: Mapping[str, str]) -> None:
    """Check that each name has either a row or a reason for none, and that no list has outdated names."""
    checked = {row.name for row in rows}
    assert set(names) - checked - set(without) == set(), "add a row, or a reason why there is none"
    assert (checked | set(without)) - set(names) == set(), "no longer public"
    assert not checked & set(without)
