"""Judge an answer to an exercise of the lessons: values, derivatives to third order, batches, and conduct.

python examples/functions/judge.py 3 my_answer.py
python examples/functions/judge.py 3

Without a file, it judges the solution that comes with the lessons. `expected.py` lists the names that answers define.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from conduct import about_backward
from lesson_tools import FOLDER, LESSONS, SOLUTIONS, load
from torch import Tensor

Line = Callable[[Tensor], Tensor]
MODES = {"r": "reverse", "f": "forward"}
TOLERANCE = 1e-11


@dataclass(frozen=True)
class Same:
    """Judge of an answer that should equal a reference function, with all its derivatives.

    Attributes:
        name: Name of the answer, a Function or a function.
        reference: Reference by operators of torch whose derivatives are right.
        inputs: Inputs for the comparison; float64 tensors are differentiated, anything else is a constant.
        elsewhere: More inputs, of other shapes, for comparisons to first order.
        order: The highest derivative.
        batched: Whether to compare `torch.vmap` with a loop.
        by_function: Whether a Function is required; by default if the name is capitalized.
        also: Function that returns a further complaint about the answer's module, or None.
    """

    name: str
    reference: Callable[..., Any]
    inputs: tuple[Any, ...]
    elsewhere: tuple[tuple[Any, ...], ...] = ()
    order: int = 3
    batched: bool = True
    by_function: bool | None = None
    also: Callable[[Any], str | None] = lambda module: None

    def __call__(self, module: Any) -> str | None:
        """Return a complaint about the answer, or None."""
        answer = called(module, self.name)
        if answer is None:
            return f"{self.name} is missing"
        return (
            self.about_values(answer)
            or next((found for routes in self.compositions() if (found := self.about(answer, routes))), None)
            or (self.about_batches(answer) if self.batched else None)
            or next((found for inputs in self.elsewhere if (found := self.about_others(answer, inputs))), None)
            or self.also(module)
            or self.about_conduct(answer)
        )

    def compositions(self) -> list[str]:
        """Return the routes of each order, the innermost first."""
        return ["".join(routes) for k in range(1, self.order + 1) for routes in product(MODES, repeat=k)]

    def about_values(self, answer: Callable[..., Any]) -> str | None:
        """Compare the returned values."""
        try:
            got = answer(*copies(self.inputs))
        except Exception as error:
            return f"{self.name} {raised(error)}"
        found, expected = tensors(got), tensors(self.reference(*self.inputs))
        if len(found) != len(expected):
            outputs = f"{len(found)} output{'s' * (len(found) != 1)}"
            return f"{self.name} returns {outputs}, expected {len(expected)}"
        strange = [type(each).__name__ for each in found if not isinstance(each, Tensor)]
        if strange:
            return f"{self.name} returns {strange[0]}, expected a tensor"
        pairs = zip(found, expected, strict=True)
        if all(each.dtype == right.dtype and close(each, right) for each, right in pairs):
            return None
        return f"{self.name} returns {got}, expected {self.reference(*self.inputs)}"

    def about(self, answer: Callable[..., Any], routes: str) -> str | None:
        """Compare one composition of passes through the answer with reverse passes through the reference."""
        title = "-over-".join(MODES[each] for each in reversed(routes))
        try:
            got = derivative(along_a_line(answer, self.inputs), routes)
        except Exception as error:
            return f"{title} {raised(error)}"
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
            except Exception as error:
                return f"torch.vmap {raised(error)}"
            for place, values in enumerate(got):
                if not close(values, torch.stack([each[place] for each in looped])):
                    return f"torch.vmap with the batch at {dim} differs from a loop"
        return None

    def about_others(self, answer: Callable[..., Any], inputs: tuple[Any, ...]) -> str | None:
        """Compare at inputs of other shapes, to detect rules that depend on the shapes of the first inputs."""
        there = replace(self, inputs=inputs, order=1)
        found = (
            there.about_values(answer)
            or next((found for routes in there.compositions() if (found := there.about(answer, routes))), None)
            or (there.about_batches(answer) if self.batched else None)
            or there.about_conduct(answer)
        )
        shapes = " and ".join(str(tuple(each.shape)) for each in inputs if is_tensor(each))
        return f"for inputs of shape {shapes}, {found}" if found else None

    def about_conduct(self, answer: Callable[..., Any]) -> str | None:
        """Check the Function's own backward, if one is required: the derivatives can be right without it."""
        if not (self.name[0].isupper() if self.by_function is None else self.by_function):
            return None
        leaves = [each.requires_grad_() if is_tensor(each) else each for each in copies(self.inputs)]
        return about_backward(tensors(answer(*leaves)), self.name)


def called(module: Any, name: str) -> Any:
    """Return the callable: a Function's `apply`, or the function itself; None if the name is missing."""
    found = getattr(module, name, None)
    return getattr(found, "apply", found)


def is_tensor(value: Any) -> bool:
    """Return True for floating-point tensors, which are differentiated and batched."""
    return isinstance(value, Tensor) and value.is_floating_point()


def tensors(outputs: Any) -> list[Any]:
    """Return one or several outputs as a list."""
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def raised(error: Exception) -> str:
    """Describe an exception in half a sentence."""
    return f"raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def copies(inputs: Any) -> list[Any]:
    """Copy inputs, so that they may be written to."""
    return [each.clone() if isinstance(each, Tensor) else each for each in inputs]


def close(got: Tensor, right: Tensor) -> bool:
    """Return True if shapes are equal and values are equal up to rounding, without NaN."""
    if got.shape != right.shape:
        return False
    scale = max(1.0, right.abs().max().item()) if right.numel() else 1.0
    return bool(((got - right).abs() <= TOLERANCE * scale).all())


def along_a_line(f: Callable[..., Any], inputs: tuple[Any, ...]) -> Line:
    """Return a scalar function of a scalar: inputs move along random directions, outputs are weighted and curved."""
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
    """Compute the derivative at 0 by a composition of passes, the innermost first."""
    for mode in routes:
        line = torch.func.grad(line) if mode == "r" else forward_slope(line)
    return line(torch.zeros((), dtype=torch.float64))


def forward_slope(line: Line) -> Line:
    """Return the slope by a tangent of 1."""
    return lambda t: torch.func.jvp(line, (t,), (torch.ones_like(t),))[1]


def complaint(stem: str, path: Path) -> str | None:
    """Return a complaint about a file that answers the exercise of a lesson, or None."""
    try:
        module = load(path)
    except FileNotFoundError as error:
        if path.is_file():
            return f"running it {raised(error)}"
        return "there is no such file; give the Python file with your answer"
    except Exception as error:
        return f"running it {raised(error)}"
    expected: Any = load(FOLDER / "expected.py")
    try:
        answer: str | None = expected.EXPECTED[stem](module)
    except AttributeError as error:
        return f"{error.name} is missing" if error.obj is module else f"judging it {raised(error)}"
    except Exception as error:  # an answer may raise anything
        return f"judging it {raised(error)}"
    return answer


def main() -> int:
    """Parse the command line and judge."""
    parser = argparse.ArgumentParser(description="Judge an answer to an exercise of the lessons.")
    parser.add_argument("number", type=int, help="number of the lesson")
    parser.add_argument("answer", nargs="?", type=Path, help="a Python file; the solution by default")
    options = parser.parse_args()
    stem = next((stem for stem in LESSONS if int(stem[:2]) == options.number), None)
    if stem is None:
        parser.error(f"number: expected 1 to {len(LESSONS)}, got {options.number}")
    path = options.answer if options.answer is not None else SOLUTIONS[stem]
    found = complaint(stem, path)
    print(f"{path}: {found or 'right'}")
    return int(found is not None)


if __name__ == "__main__":
    sys.exit(main())
