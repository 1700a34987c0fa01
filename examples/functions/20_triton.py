r"""Lesson 20: a Triton kernel, at every order.

$$ y = \sin x, \qquad y' = \sin(x + \tfrac{π}{2}), \qquad y'' = \sin(x + \tfrac{2π}{2}), \qquad \dots $$

Torch cannot differentiate a kernel. If backward called a kernel for the cosine, the second derivative would lose that
term without a warning. Therefore backward calls only Functions, here the same Function with a phase shift of a quarter
turn: one kernel is enough for every order. A kernel also does not accept the batched tensors of vmap, so the batching
rule is written by hand.

Triton runs on a GPU, and on a CPU with its interpreter:

    TRITON_INTERPRET=1 python examples/functions/20_triton.py

Elsewhere a torch operator replaces the kernel, and the output says so.

Exercise: write `Decay.apply(x)`, $e^{-x}$, by your own kernel, right at every order; where Triton cannot run, by a
torch operator.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
USES_TRITON = triton is not None and (DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
INPUTS = (torch.tensor([0.5, -1.2], dtype=torch.float64, device=DEVICE), 0)
BLOCK = 128

if USES_TRITON:
    # Triton sets the types of the arguments. It would misread the annotations that mypy requires.
    @triton.jit
    def sine_kernel(x_pointer, y_pointer, count, turns: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton has its own types
        """Compute one block of sin(x + turns π/2) per program."""
        at = tl.program_id(0) * block + tl.arange(0, block)
        inside = at < count
        x = tl.load(x_pointer + at, mask=inside)
        y = tl.sin(x) if turns % 2 == 0 else tl.cos(x)
        tl.store(y_pointer + at, y if turns < 2 else -y, mask=inside)


def turned_sine(x: Tensor, turns: int) -> Tensor:
    r"""Compute $\sin(x + turns π/2)$ for 0 to 3 turns."""
    if not USES_TRITON:
        return (x.sin(), x.cos(), -x.sin(), -x.cos())[turns]
    x = x.contiguous()
    y = torch.empty_like(x)
    sine_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), turns, BLOCK)
    return y


class Sine(Function):
    r"""$\sin(x + turns π/2)$. Saves the input."""

    @staticmethod
    def forward(x: Tensor, turns: int) -> Tensor:
        """Launch the kernel."""
        return turned_sine(x, turns % 4)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        """Save the tensor, and keep the int."""
        x, ctx.turns = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        """Call the Function, not the kernel."""
        (x,) = ctx.saved_tensors
        return Sine.apply(x, ctx.turns + 1) * cotangent, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor, turns_tangent: None) -> Tensor:
        """Call the Function, not the kernel."""
        del turns_tangent
        (x,) = ctx.saved_tensors
        return Sine.apply(x, ctx.turns + 1) * tangent

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], x: Tensor, turns: int) -> tuple[Tensor, int]:
        """Keep the batch dimension."""
        del info
        return Sine.apply(x, turns), in_dims[0]


def draw(figure: Any) -> None:
    """The sine by the kernel and its derivatives, by the same kernel; the dots are SciPy's differences."""
    hodiff.plot.derivatives(lambda x: Sine.apply(x.to(DEVICE), 0).to(x.device), -3, 3, order=2, ax=figure.add_subplot())


def main() -> hodiff.Report:
    """Check Sine by every route to third order."""
    if not USES_TRITON:
        reason = "not installed" if triton is None else "without a GPU (TRITON_INTERPRET=1 runs it on the CPU)"
        print(f"Triton is {reason}: a torch operator replaces the kernel.")
    report = hodiff.check(Sine, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
