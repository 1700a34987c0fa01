"""Values of the options `--inputs` and `--loss`, which are Python expressions or names of objects."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.checks.attempts import first_line
from hodiff.checks.command.targets import load_object, load_target
from hodiff.errors import InputError

# Maps the output of a model to a scalar.
Loss = Callable[[Any], Any]

_FLOATING = ("float64", "float32", "bfloat16", "float16")
_TARGET = re.compile(r"[^()\[\]\s]+:[A-Za-z_][\w.]*")
_NAMES = {name: value for name, value in {**vars(torch), **vars(F), "torch": torch}.items() if name[:2] != "__"}


def dtype_named(name: str, option: str = "--dtype") -> torch.dtype:
    """Return the floating-point dtype of this name."""
    name = name.removeprefix("torch.")
    if name not in _FLOATING:
        raise InputError(f"check: {option}: expected one of {', '.join(_FLOATING)}, got {name!r}.")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def read_inputs(text: str, dtype: torch.dtype, generator: torch.Generator) -> Any:
    """Evaluate an expression, or a named object or function without arguments; `dtype` is the default dtype."""
    text = text.strip()
    found = load_object(text, "--inputs") if _TARGET.fullmatch(text) else None
    try:
        with _drawing(generator, dtype):
            # The command imports and runs the target anyway, so evaluating the user's own argument adds no risk.
            return eval(text, dict(_NAMES)) if found is None else found() if callable(found) else found
    except Exception as error:
        raise _refusal("--inputs", text, error) from error


def read_loss(text: str, generator: torch.Generator) -> Loss:
    """Return a function of `output` from an expression or its name; random tensors are drawn once, in float64."""
    text = text.strip()
    if _TARGET.fullmatch(text):
        named: Loss = load_target(text, "--loss")
        if isinstance(named, type):
            raise InputError(f"check: --loss: expected a function of the module's output, got the Function {text!r}.")
        return named.double() if isinstance(named, torch.nn.Module) else named
    names = dict(_NAMES)
    try:
        with _drawing(generator, torch.float64):
            tree = _Constants(names).visit(ast.parse(text, mode="eval"))
        if not any(isinstance(node, ast.Name) and node.id == "output" for node in ast.walk(tree)):
            raise NameError("the loss does not use 'output'")
        evaluate = eval(f"lambda output: {ast.unparse(tree)}", names)
    except Exception as error:
        raise _refusal("--loss", text, error) from error

    def loss(output: Any) -> Any:
        try:
            return evaluate(output)
        except Exception as error:
            raise _refusal("--loss", text, error, f"The output is {_description(output)}. ") from error

    return loss


def _description(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    keys = f" with the keys {', '.join(map(repr, output))}" if isinstance(output, dict) else ""
    return f"a {type(output).__name__}{keys}"


def _refusal(option: str, text: str, error: Exception, facts: str = "") -> InputError:
    return InputError(
        f"check: {option}: {text!r} raises {first_line(error)}. {facts}Expected a Python expression with the names of "
        "torch and torch.nn.functional, or file.py:name."
    )


class _Constants(ast.NodeTransformer):
    """Evaluates calls that contain known names only, so that random tensors are the same in each call of a loss."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not all(each.id in self.names for each in ast.walk(node) if isinstance(each, ast.Name)):
            return self.generic_visit(node)
        name = f"_constant_{len(self.names)}"
        self.names[name] = eval(compile(ast.Expression(node), "--loss", "eval"), self.names)
        return ast.copy_location(ast.Name(name, ast.Load()), node)


@contextmanager
def _drawing(generator: torch.Generator, dtype: torch.dtype) -> Iterator[None]:
    """Draw random numbers from a generator, in this dtype by default; restore torch's own settings afterwards."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(generator.get_state())
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
            generator.set_state(torch.get_rng_state())
