r"""Lesson 39: a C++ operator, through `torch.utils.cpp_extension` and `torch.library`.

$$ y = J_n(x), \qquad J_n' = \tfrac{1}{2} (J_{n-1} - J_{n+1}), \qquad
   J_n'' = \tfrac{1}{4} (J_{n-2} - 2 J_n + J_{n+2}) $$

This is Bessel's function of any integer order, from the C++ standard library; `bessel.cpp` has the loop. Its derivative
consists of the same function, so one kernel is enough for every order, as in lesson 20.

`torch.utils.cpp_extension.load` compiles the file, once, and the file registers the operator `lessons::bessel`. All
other parts of a torch operator are registered in Python: `register_fake` gives shapes for `torch.compile` and
`torch.export`, `register_vmap` the batching rule, and `register_autograd` the backward. There is no registration for
forward mode: without a warning, the tangent of such an operator is *zero*. Therefore users call a Function around the
operator, which has a `jvp`. `main` prints the tangents of both, and the result of `torch.library.opcheck`, which does
not test tangents.

A C++ compiler and ninja are required (`pip install "hodiff[examples]"` installs ninja).

    python examples/functions/39_cpp_operator.py

Exercise: `torch.library` takes batching rules, too: write `batching_rule(info, in_dims, x, n)`, to be registered by
`torch.library.register_vmap("lessons::bessel", batching_rule)`, so that `torch.vmap(operator, (1, None))` is right.
Call the operator only once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lesson_tools import outcome
from torch import Tensor
from torch.autograd import Function
from torch.utils import cpp_extension

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (torch.tensor([0.5, -1.2, 3.0], dtype=torch.float64), 1)
SOURCE = Path(__file__).with_name("bessel.cpp")
# Folder of the compiled library, which is rebuilt if the source changes.
BUILT = SOURCE.parents[2] / "build" / "lessons"


def load_operator() -> Any:
    """Compile if needed, load the library, register the operator's other parts, and return the operator."""
    if not hasattr(torch.ops.lessons, "bessel"):
        BUILT.mkdir(parents=True, exist_ok=True)
        # pip installs ninja here, and the folder is not always on the path.
        os.environ["PATH"] = os.pathsep.join((os.environ["PATH"], str(Path(sys.executable).parent)))
        cpp_extension.load("lessons_bessel", [str(SOURCE)], build_directory=str(BUILT), is_python_module=False)
        torch.library.register_fake("lessons::bessel", lambda x, n: torch.empty_like(x))
        torch.library.register_autograd("lessons::bessel", operator_backward, setup_context=operator_context)
    return torch.ops.lessons.bessel


def operator_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    """Save the tensor, and keep the order."""
    del output
    x, ctx.n = inputs
    ctx.save_for_backward(x)


def operator_backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
    """Call the operator itself, which has a backward again."""
    (x,) = ctx.saved_tensors
    operator = torch.ops.lessons.bessel
    return (operator(x, ctx.n - 1) - operator(x, ctx.n + 1)) / 2 * cotangent, None


class Bessel(Function):
    """$J_n(x)$. Saves the input."""

    @staticmethod
    def forward(x: Tensor, n: int) -> Tensor:
        """Run the kernel."""
        return load_operator()(x, n)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        """Save the tensor, and keep the order."""
        x, ctx.n = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        """Call the Function, not the kernel."""
        (x,) = ctx.saved_tensors
        return slope(x, ctx.n) * cotangent, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor, n_tangent: None) -> Tensor:
        """Call the Function, not the kernel."""
        del n_tangent
        (x,) = ctx.saved_tensors
        return slope(x, ctx.n) * tangent

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], x: Tensor, n: int) -> tuple[Tensor, int]:
        """Keep the batch dimension: every number is independent."""
        del info
        return Bessel.apply(x, n), in_dims[0]


def slope(x: Tensor, n: int) -> Tensor:
    """$J_n'$."""
    return (Bessel.apply(x, n - 1) - Bessel.apply(x, n + 1)) / 2


def draw(figure: Any) -> None:
    """J₁ and its derivative by the C++ kernel; the dots are SciPy's differences."""
    hodiff.plot.derivatives(lambda x: Bessel.apply(x, 1), -8, 8, order=1, ax=figure.add_subplot())


def main() -> hodiff.Report:
    """Print the tangents of operator and Function, and check Bessel by every route to third order."""
    x, one = torch.tensor(0.5, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    operator = load_operator()
    print(f"J_1'(0.5) is {slope(x, 1):.4f}")
    print(f"tangent of the operator: {outcome(lambda: torch.func.jvp(lambda x: operator(x, 1), (x,), (one,))[1])}")
    print(f"tangent of the Function: {outcome(lambda: torch.func.jvp(lambda x: Bessel.apply(x, 1), (x,), (one,))[1])}")
    print(f"opcheck of the operator: {set(torch.library.opcheck(operator.default, (x.requires_grad_(), 1)).values())}")
    report = hodiff.check(Bessel, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
