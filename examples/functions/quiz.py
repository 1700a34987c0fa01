"""Quiz about derivatives of Functions; running the code gives the answers.

python examples/functions/quiz.py
python examples/functions/quiz.py --answers
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lesson_tools import lesson
from torch import Tensor


@dataclass(frozen=True)
class Question:
    """Question with several answers, of which one is right.

    Attributes:
        text: Text of the question.
        choices: The answers to choose from.
        run: Function that runs the experiment, and returns the choice that describes the outcome.
        why: Explanation, with the number of the lesson.
    """

    text: str
    choices: tuple[str, ...]
    run: Callable[[], str]
    why: str


def number(value: Any) -> Tensor:
    """Return a float64 number that requires a gradient."""
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def slope_of(y: Tensor, x: Tensor) -> Tensor:
    """Compute the gradient, which can be differentiated again."""
    return torch.autograd.grad(y, x, create_graph=True)[0]


def constant_slope() -> str:
    """Compute the second derivative of a square that saves its slope."""
    try:
        second = torch.func.grad(torch.func.grad(lesson(22).Square.apply))(number(3.0).detach())
    except RuntimeError:
        return "An error."
    return f"{second.item():g}."


def penalty() -> str:
    """Compute the gradient in w of the square of the slope of sin(w x) in x."""
    x, w = number(0.7), number(1.3)
    slope = slope_of(lesson(21).Sine.apply(w * x), x)
    try:
        got = torch.autograd.grad(slope**2, w)[0]
    except RuntimeError:
        return "An error."
    right = torch.autograd.grad(slope_of((w * x).sin(), x) ** 2, w)[0]
    return "The right number." if torch.isclose(got, right) else "A wrong number, without a warning."


def doubled_tangent() -> str:
    """Run gradcheck on a Function whose jvp is wrong by a factor."""
    passes = torch.autograd.gradcheck(lesson(23).Cube.apply, number([0.5, -1.2]), raise_exception=False)
    return "It passes." if passes else "It fails."


def registered_operator() -> str:
    """Compute the tangent of an operator of torch.library that has a backward."""
    if not hasattr(torch.ops.quiz, "cube"):
        cube = torch.library.custom_op("quiz::cube", lambda x: x**3, mutates_args=(), schema="(Tensor x) -> Tensor")
        cube.register_autograd(
            lambda ctx, cotangent: 3 * ctx.saved_tensors[0] ** 2 * cotangent,
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        )
    x = torch.tensor(2.0)
    try:
        tangent = torch.func.jvp(torch.ops.quiz.cube, (x,), (torch.ones(()),))[1]
    except (RuntimeError, NotImplementedError):
        return "An error."
    return f"{tangent.item():g}."


def size_of_a_mask() -> str:
    """Count the bytes of a thousand booleans."""
    return f"{(torch.randn(1000) > 0).untyped_storage().nbytes()} bytes."


def cannot_save_its_output() -> str:
    """Find the function that is not monotonic."""
    x = torch.linspace(-6, 6, 601, dtype=torch.float64)
    functions: dict[str, Any] = {"exp.": torch.exp, "tanh.": torch.tanh, "silu.": F.silu}
    (found,) = (name for name, f in functions.items() if not (f(x).diff() > 0).all())
    return found


def gradient_of_a_bias() -> str:
    """Compute the gradient of a bias that is added to three rows, for a cotangent of ones."""
    gradient = torch.func.grad(lambda b: (torch.zeros(3, 2) + b).sum())(torch.zeros(2))
    return {(3.0, 3.0): "Their sum over the rows.", (1.0, 1.0): "Their mean over the rows."}[tuple(gradient.tolist())]


def logarithm_of_a_sigmoid() -> str:
    """Compute the slope of log(sigmoid(x)) at a large negative number."""
    return f"{torch.func.grad(lambda x: x.sigmoid().log())(number(-800.0).detach()).item():g}."


def closed_over_weight() -> str:
    """Compute the gradient of a weight that a checkpointed function closes over."""
    module = lesson(30)
    x, weight = (each.clone().requires_grad_() for each in module.INPUTS)
    y = module.Checkpoint.apply(lambda x: module.layers(x, weight), x).sum()
    (gradient,) = torch.autograd.grad(y, weight, allow_unused=True)
    return "None: for autograd, the output does not depend on it." if gradient is None else "The right gradient."


def unmarked() -> str:
    """Compute the gradient of an input that a Function modified without marking it."""
    try:
        return f"{lesson(36).slope_of(lesson(36).Unmarked).item():g}."
    except RuntimeError:
        return "An error."


def hooked_tangent() -> str:
    """Compute the tangent behind a hook that halves gradients."""
    module = lesson(34)
    return f"{module.pushed(module.hooked).item():g}."


def exported_rule() -> str:
    """Compute the gradient of an exported straight-through rounding."""
    module = lesson(41)
    x = torch.tensor([0.3, 1.7], requires_grad=True)
    program = torch.export.export(module.Rounding(), (x.detach(),)).module()
    return f"{torch.autograd.grad(program(x).sum(), x)[0][0].item():g}."


QUESTIONS = (
    Question(
        "A Function for x² computes 2x in setup_context and saves it. What is its second derivative?",
        ("2.", "0.", "An error."),
        constant_slope,
        "setup_context runs outside of the graph. Save inputs or outputs. Lesson 22.",
    ),
    Question(
        "backward is marked @once_differentiable, and a gradient penalty differentiates it. What is the result?",
        ("The right number.", "A wrong number, without a warning.", "An error."),
        penalty,
        "torch raises only if the incoming gradient requires a gradient; in a penalty it does not. Lesson 21.",
    ),
    Question(
        "jvp is wrong by a factor of 2, backward is right. What is the result of torch.autograd.gradcheck by default?",
        ("It passes.", "It fails."),
        doubled_tangent,
        "By default it does not check forward mode; hodiff.check compares all routes. Lesson 23.",
    ),
    Question(
        "An operator of torch.library computes x³ and has a registered backward. What is its tangent at 2 under jvp?",
        ("12.", "0.", "An error."),
        registered_operator,
        "There is no registration for forward mode, and no warning. Call the operator in a Function. Lesson 39.",
    ),
    Question(
        "How much memory does the mask of a thousand numbers take, as a tensor of torch.bool?",
        ("125 bytes.", "1000 bytes.", "4000 bytes."),
        size_of_a_mask,
        "torch.bool takes one byte per number, a quarter of float32; bits have to be packed by hand. Lesson 31.",
    ),
    Question(
        "Which function cannot save its output instead of its input?",
        ("exp.", "tanh.", "silu."),
        cannot_save_its_output,
        "silu takes some values twice, with different slopes. Lesson 33.",
    ),
    Question(
        "Y = X + b with X of shape (3, 2) and b of shape (2,). What is the gradient of b, given the gradients of Y?",
        ("The first row of the gradients.", "Their mean over the rows.", "Their sum over the rows."),
        gradient_of_a_bias,
        "The backward of a repetition is a sum. Lesson 10.",
    ),
    Question(
        "What slope of log(sigmoid(x)) does torch compute at -800? The true slope is 1.",
        ("1.", "0.", "nan."),
        logarithm_of_a_sigmoid,
        "sigmoid(-800) is 0 in float64, and 0 · ∞ is NaN. Every order needs a stable formula. Lesson 6.",
    ),
    Question(
        "A checkpoint, a Function of x, runs a function that closes over a weight. What is the weight's gradient?",
        ("The right gradient.", "None: for autograd, the output does not depend on it.", "An error."),
        closed_over_weight,
        "A Function has gradients only for its arguments. Lesson 30.",
    ),
    Question(
        "A Function multiplies its input by 0.1 in place, without ctx.mark_dirty. What is the gradient of the new "
        "value of the input with respect to its old value?",
        ("0.1.", "1.", "An error."),
        unmarked,
        "The graph of the input does not go through the Function. Lesson 36.",
    ),
    Question(
        "A hook halves the gradient of a tensor. What is the tangent after the hook, for a tangent of 1?",
        ("0.5.", "1.", "An error."),
        hooked_tangent,
        "Only reverse mode runs hooks; routes then disagree. Lesson 34.",
    ),
    Question(
        "A rounding with straight-through gradients is exported by torch.export. What is the gradient of the program?",
        ("1.", "0.", "An error."),
        exported_rule,
        "The export contains the operators of forward, but not the backward rule. Lesson 41.",
    ),
)


def ask(question: Question) -> bool:
    """Ask on the terminal; return True if the answer was right."""
    letters = "abc"[: len(question.choices)]
    given = ""
    while given not in letters or len(given) != 1:
        given = input(f"Your answer ({', '.join(letters)}): ").strip().lower()
    return question.choices[letters.index(given)] == question.run()


def main() -> None:
    """Ask all questions, or answer them all."""
    parser = argparse.ArgumentParser(description="A quiz about derivatives of Functions.")
    parser.add_argument("--answers", action="store_true", help="run and print the answers, without asking")
    shown = parser.parse_args().answers or not sys.stdin.isatty()
    right = 0
    for place, question in enumerate(QUESTIONS, start=1):
        print(f"\n{place}. {question.text}")
        for letter, choice in zip("abc", question.choices, strict=False):
            print(f"   {letter}) {choice}")
        if not shown:
            hit = ask(question)
            right += hit
            print("Right." if hit else "No.", end=" ")
        print(f"The code returns: {question.run()} {question.why}")
    if not shown:
        print(f"\n{right} of {len(QUESTIONS)} right.")


if __name__ == "__main__":
    main()
