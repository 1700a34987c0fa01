"""Judge an answer to an exercise of the lessons: its values, its derivatives to third order, and batches.

python examples/functions/judge.py 3 my_answer.py
python examples/functions/judge.py 3

Without a file, the solution that comes with the lessons is judged. What an answer has to define is in `expected.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from lesson_tools import FOLDER, LESSONS, SOLUTIONS, load
from torch import Tensor

Line = Callable[[Tensor], Tensor]
MODES = {"r": "reverse", "f": "forward"}
TOLERANCE = 1e-11


@dataclass(frozen=True)
class Same:
    """An answer that has to be the same function as a reference, in all its derivatives.

    Attributes:
        name: What the answer is called: a Function, or a function.
        reference: The same by operators of torch whose derivatives are right.
        inputs: Where both are compared; float64 tensors are differentiated, anything else is a constant.
        order: The highest derivative.
        batched: Whether `torch.vmap` is compared with a loop.
        also: A further complaint, if there is one, about the module of the answer.
    """

    name: str
    reference: Callable[..., Any]
    inputs: tuple[Any, ...]
    order: int = 3
    batched: bool = True
    also: Callable[[Any], str | None] = lambda module: None

    def __call__(self, module: Any) -> str | None:
        """What is wrong with the answer, or None."""
        answer = called(module, self.name)
        if answer is None:
            return f"{self.name} is missing"
        return (
            self.about_values(answer)
            or next((found for routes in self.compositions() if (found := self.about(answer, routes))), None)
            or (self.about_batches(answer) if self.batched else None)
            or self.also(module)
        )

    def compositions(self) -> list[str]:
        """Each order's routes, the innermost first."""
        return ["".join(routes) for k in range(1, self.order + 1) for routes in product(MODES, repeat=k)]

    def about_values(self, answer: Callable[..., Any]) -> str | None:
        """Compare what both return."""
        pairs = zip(tensors(answer(*copies(self.inputs))), tensors(self.reference(*self.inputs)), strict=True)
        if all(got.dtype == right.dtype and close(got, right) for got, right in pairs):
            return None
        return f"{self.name} returns {answer(*copies(self.inputs))}, expected {self.reference(*self.inputs)}"

    def about(self, answer: Callable[..., Any], routes: str) -> str | None:
        """Compare one composition of passes through the answer with reverse passes through the reference."""
        title = "-over-".join(MODES[each] for each in reversed(routes))
        try:
            got = derivative(along_a_line(answer, self.inputs), routes)
        except (RuntimeError, TypeError, NotImplementedError, ValueError) as error:
            return f"{title} raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        right = derivative(along_a_line(self.reference, self.inputs), "r" * len(routes))
        if close(got, right):
            return None
        return f"the derivative of order {len(routes)} by {title} is {got:.6g}, expected {right:.6g}"

    def about_batches(self, answer: Callable[..., Any]) -> str | None:
        """Compare `torch.vmap` over all tensors, batched in front and at the end, with a loop."""
        numbers = [is_tensor(each) for each in self.inputs]

        def sample(k: int) -> list[Any]:
            return [each * (1 + k / 10) if n else each for each, n in zip(self.inputs, numbers, strict=True)]

        samples = [sample(k) for k in range(3)]
        looped = [tensors(answer(*copies(each))) for each in samples]
        for dim in (0, -1):
            columns = zip(zip(*samples, strict=True), numbers, strict=True)
            batch = [torch.stack(list(each), dim) if n else each[0] for each, n in columns]
            try:
                got = tensors(torch.vmap(answer, tuple(dim if n else None for n in numbers))(*batch))
            except (RuntimeError, TypeError, ValueError) as error:
                return f"torch.vmap raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            for place, values in enumerate(got):
                if not close(values, torch.stack([each[place] for each in looped])):
                    return f"torch.vmap with the batch at {dim} differs from a loop"
        return None


def called(module: Any, name: str) -> Any:
    """What has to be called: a Function's `apply`, or the function itself; None if there is no such name."""
    found = getattr(module, name, None)
    return getattr(found, "apply", found)


def is_tensor(value: Any) -> bool:
    """Whether a value is differentiated and batched."""
    return isinstance(value, Tensor) and value.is_floating_point()


def tensors(outputs: Any) -> list[Tensor]:
    """One or several outputs as a list."""
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def copies(inputs: Any) -> list[Any]:
    """Inputs that may be written to."""
    return [each.clone() if isinstance(each, Tensor) else each for each in inputs]


def close(got: Tensor, right: Tensor) -> bool:
    """Of one shape, equal to rounding, and NaN nowhere."""
    if got.shape != right.shape:
        return False
    scale = max(1.0, right.abs().max().item()) if right.numel() else 1.0
    return bool(((got - right).abs() <= TOLERANCE * scale).all())


def along_a_line(f: Callable[..., Any], inputs: tuple[Any, ...]) -> Line:
    """A number of a number: inputs move along random directions, outputs are weighed and curved."""
    generator = torch.Generator().manual_seed(0)

    def random(like: Tensor) -> Tensor:
        return torch.rand(like.shape, dtype=torch.float64, generator=generator) + 0.5

    directions = [random(each) if is_tensor(each) else None for each in inputs]
    weights = [random(each) if is_tensor(each) else None for each in tensors(f(*copies(inputs)))]

    def line(t: Tensor) -> Tensor:
        moved = [x if v is None else x + t * v for x, v in zip(inputs, directions, strict=True)]
        total = torch.zeros((), dtype=torch.float64)
        for y, u in zip(tensors(f(*moved)), weights, strict=True):
            if u is not None:
                total = total + (u * y + y * y / 2).sum()  # curved, so that cotangents move with t, too
        return total

    return line


def derivative(line: Line, routes: str) -> Tensor:
    """The derivative at 0 by a composition of passes, the innermost first."""
    for mode in routes:
        line = torch.func.grad(line) if mode == "r" else forward_slope(line)
    return line(torch.zeros((), dtype=torch.float64))


def forward_slope(line: Line) -> Line:
    """The slope by a tangent of 1."""
    return lambda t: torch.func.jvp(line, (t,), (torch.ones_like(t),))[1]


def complaint(stem: str, module: ModuleType) -> str | None:
    """What is wrong with an answer to the exercise of a lesson, or None."""
    expected: Any = load(FOLDER / "expected.py")
    answer: str | None = expected.EXPECTED[stem](module)
    return answer


def main() -> int:
    """Read the number and the file, judge."""
    parser = argparse.ArgumentParser(description="Judge an answer to an exercise of the lessons.")
    parser.add_argument("number", type=int, help="of the lesson")
    parser.add_argument("answer", nargs="?", type=Path, help="a Python file; the solution by default")
    options = parser.parse_args()
    stem = next((stem for stem in LESSONS if int(stem[:2]) == options.number), None)
    if stem is None:
        parser.error(f"number: expected 1 to {len(LESSONS)}, got {options.number}")
    path = options.answer or SOLUTIONS[stem]
    found = complaint(stem, load(path))
    print(f"{path}: {found or 'right'}")
    return int(found is not None)


if __name__ == "__main__":
    sys.exit(main())
