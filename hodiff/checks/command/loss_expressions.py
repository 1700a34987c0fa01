"""Reader of losses written as text, `mse_loss(output, randn(3, 1))`, without evaluating it as Python."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.checks.attempts import first_line
from hodiff.checks.command.expressions import CALLS, CONSTANTS, Reader
from hodiff.checks.command.targets import load_target
from hodiff.errors import InputError

OUTPUT = "output"

# Functions of torch.nn.functional that are losses or compare two tensors.
FUNCTIONS = (
    *sorted(name for name in dir(F) if name.endswith("_loss") and not name.startswith("_")),
    *("cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"),
    *("cosine_similarity", "pairwise_distance"),
)

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.MatMult: operator.matmul,
}
_TRANSPOSES = ("T", "mT")
_TARGET = re.compile(r"[^()\[\]\s]+:[A-Za-z_][\w.]*")

# Maps the output of a model to the value of an expression.
Loss = Callable[[Any], Any]


def read_loss(text: str, generator: torch.Generator) -> Loss:
    """Return a loss of `output` from an expression or a function's name; random tensors are drawn once, in float64."""
    if _TARGET.fullmatch(text.strip()):
        return _named(text.strip())
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        raise InputError(_refusal(text, f"is no expression ({error.args[0]})")) from error
    if not any(isinstance(node, ast.Name) and node.id == OUTPUT for node in ast.walk(tree)):
        raise InputError(_refusal(text, f"does not hold {OUTPUT!r}"))
    return _Builder(text, generator).build(tree.body)


def _named(text: str) -> Loss:
    loss: Loss = load_target(text, what="--loss")
    if isinstance(loss, type):
        raise InputError(f"check: --loss: expected a function of the module's output, got the Function {text!r}.")
    return loss.double() if isinstance(loss, torch.nn.Module) else loss


class _Builder:
    """Builder of a function from an expression; parts that do not depend on the output are evaluated once."""

    def __init__(self, text: str, generator: torch.Generator) -> None:
        self.text = text
        self.constants = Reader(torch.float64, what="--loss", generator=generator, hint=_ALLOWED)

    def build(self, node: ast.expr) -> Loss:
        if not any(isinstance(each, ast.Name) and each.id == OUTPUT for each in ast.walk(node)):
            value = self.constants.value(node, self.text)
            return lambda output: value
        builder = self._BUILDERS.get(type(node))
        if builder is None:
            raise self.refused(node)
        return builder(self, node)

    def refused(self, node: ast.expr) -> InputError:
        return InputError(_refusal(self.text, f"holds {ast.unparse(node)!r}"))

    def _name(self, node: Any) -> Loss:
        return lambda output: output

    def _binary(self, node: Any) -> Loss:
        if type(node.op) not in _BINARY:
            raise self.refused(node)
        left, right, apply = self.build(node.left), self.build(node.right), _BINARY[type(node.op)]
        return self.guarded(node, lambda output: apply(left(output), right(output)))

    def _negative(self, node: Any) -> Loss:
        if not isinstance(node.op, ast.USub):
            raise self.refused(node)
        operand = self.build(node.operand)
        return self.guarded(node, lambda output: -operand(output))

    def _index(self, node: Any) -> Loss:
        value, index = self.build(node.value), self._place(node.slice)

        def part(output: Any) -> Any:
            whole = value(output)
            if isinstance(whole, Tensor) and isinstance(index, str):
                raise TypeError("a tensor has no names")
            return whole[index]

        return self.guarded(node, part)

    def _transpose(self, node: Any) -> Loss:
        if node.attr not in _TRANSPOSES:
            raise self.refused(node)
        value = self.build(node.value)
        return self.guarded(node, lambda output: getattr(value(output), node.attr))

    def _place(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Tuple):
            return tuple(self._place(each) for each in node.elts)
        if isinstance(node, ast.Slice):
            ends = (node.lower, node.upper, node.step)
            return slice(*(None if end is None else self.constants.value(end, self.text) for end in ends))
        return self.constants.value(node, self.text)

    def _call(self, node: Any) -> Loss:
        if any(isinstance(each, ast.Starred) for each in node.args) or any(not k.arg for k in node.keywords):
            raise self.refused(node)
        called = self._called(node)
        args = [self.build(each) for each in node.args]
        kwargs = {each.arg: self.build(each.value) for each in node.keywords}
        return self.guarded(
            node, lambda output: called(output)(*(a(output) for a in args), **{k: v(output) for k, v in kwargs.items()})
        )

    def _called(self, node: Any) -> Callable[[Any], Callable[..., Any]]:
        """Return a loss function by its name, or a method of a tensor."""
        if isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
            function = getattr(F, node.func.id)
            return lambda output: function
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name.startswith("_") or name.endswith("_") or not callable(getattr(Tensor, name, None)):
            raise self.refused(node)
        owner = self.build(node.func.value)

        def method(output: Any) -> Callable[..., Any]:
            found = owner(output)
            if not isinstance(found, Tensor):
                raise TypeError(f"expected a tensor before .{name}, got {type(found).__name__}")
            bound: Callable[..., Any] = getattr(found, name)
            return bound

        return method

    def guarded(self, node: ast.expr, loss: Loss) -> Loss:
        """Wrap a loss so that errors name the part of the expression that raised."""

        def guarded(output: Any) -> Any:
            try:
                return loss(output)
            except InputError:
                raise
            except Exception as error:
                raise InputError(
                    f"check: --loss: {ast.unparse(node)!r} raises {first_line(error)}. {_output(output)} "
                    "Write the loss for that."
                ) from error

        return guarded

    _BUILDERS: dict[type[ast.expr], Callable[[_Builder, Any], Loss]] = {  # noqa: RUF012 (a table, never written to)
        ast.Name: _name,
        ast.BinOp: _binary,
        ast.UnaryOp: _negative,
        ast.Subscript: _index,
        ast.Attribute: _transpose,
        ast.Call: _call,
    }


def _output(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"The output is a tensor of shape {tuple(output.shape)}."
    if isinstance(output, dict):
        return f"The output is a {type(output).__name__} with the keys {', '.join(map(repr, output))}."
    return f"The output is a {type(output).__name__}."


_ALLOWED = (
    f"Allowed are {OUTPUT!r}; {', '.join(FUNCTIONS)}; methods of tensors, .T and .mT; indices; + - * / ** @; calls of "
    f"{', '.join(CALLS)}; numbers, strings, True, False, None and the names {', '.join(CONSTANTS)}; or "
    'package.module:Name of a function. For example: "mse_loss(output, randn(3, 1))".'
)


def _refusal(text: str, what: str) -> str:
    return f"check: --loss: {text!r} {what}. {_ALLOWED}"
