"""Functions with one mechanical change in one rule, and a test whether the change affects results.

A mutant is the class of a Function, executed from a syntax tree in which one node of one rule is replaced.
"""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

# Names in a rule that are not tensors
_NO_TENSORS = {"ctx", "info", "index", "in_dims", "dim", "dims", "_"}
_OPPOSITE = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
_IN_PLACE = {ast.Add: "add_", ast.Sub: "sub_", ast.Mult: "mul_", ast.Div: "div_"}
# Methods whose removal leaves a tensor of the right kind with wrong values
_DROPPED = {"sum_to_size", "sum", "sign", "abs", "clamp", "detach", "square", "logical_not", "expand", "unsqueeze"}


@dataclass(frozen=True)
class Mutant:
    """A Function with one change in one rule, and a name that says which."""

    name: str
    function: type[torch.autograd.Function]


def mutants(function: type[torch.autograd.Function], rules: tuple[str, ...]) -> Iterator[Mutant]:
    """Yield every change of every rule, one change a mutant."""
    tree = _tree(function)
    for rule in rules:
        names = _tensor_names(_definition(tree, rule))
        for position, node in enumerate(_nodes(tree, rule)):
            for change, replacement in _changes(node, names):
                changed = copy.deepcopy(tree)
                target = next(itertools.islice(_nodes(changed, rule), position, None))
                _Replace(target, replacement).visit(changed)
                text = f"{ast.unparse(node)} -> {ast.unparse(replacement)}"
                name = f"{function.__name__}.{rule}: {change}: {text}"
                yield Mutant(name, _execute(function, changed))


def unchanged(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Return the unchanged Function, executed like a mutant."""
    return _execute(function, _tree(function))


def _tree(function: type) -> ast.Module:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for each in ast.walk(tree):
        if isinstance(each, ast.FunctionDef):
            each.returns = None
            if ast.get_docstring(each) is not None and len(each.body) > 1:
                del each.body[0]
        if isinstance(each, ast.arg):
            each.annotation = None
    return tree


def _definition(tree: ast.Module, rule: str) -> ast.FunctionDef:
    (definition,) = (each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.name == rule)
    return definition


def _nodes(tree: ast.Module, rule: str) -> Iterator[ast.AST]:
    return itertools.chain.from_iterable(ast.walk(statement) for statement in _definition(tree, rule).body)


def _tensor_names(definition: ast.FunctionDef) -> list[str]:
    """Names of the tensors that a rule receives or assigns."""
    given = [each.arg for each in definition.args.args]
    stored = [
        each.id for each in ast.walk(definition) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    ]
    return [name for name in dict.fromkeys(given + stored) if name not in _NO_TENSORS]


def _execute(function: type[torch.autograd.Function], tree: ast.Module) -> type[torch.autograd.Function]:
    """Execute the class in its module's namespace, where its own name refers to the new class."""
    ast.fix_missing_locations(tree)
    module = vars(sys.modules[function.__module__])
    # hodiff trusts its own modules, so the mutant must not carry the name of one.
    namespace = {**module, "__name__": "mutants"}
    exec(compile(tree, f"<{function.__name__}>", "exec"), namespace)
    return namespace[function.__name__]


class _Replace(ast.NodeTransformer):
    def __init__(self, target: ast.AST, replacement: ast.AST) -> None:
        self.target, self.replacement = target, replacement

    def visit(self, node: ast.AST) -> ast.AST:
        return copy.deepcopy(self.replacement) if node is self.target else self.generic_visit(node)


def _changes(node: ast.AST, names: list[str]) -> Iterator[tuple[str, ast.AST]]:
    for kind, operator in _OPERATORS:
        if isinstance(node, kind):
            yield from operator(node, names)


def _of_return(node: ast.Return, names: list[str]) -> Iterator[tuple[str, ast.AST]]:
    """Change the sign or the factor of one returned element, or replace it by zero or None."""
    parts = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
    for i, part in enumerate(parts):
        if part is None or isinstance(part, (ast.Constant, ast.Starred)):
            continue
        source = ast.unparse(part)
        for change, text in (
            ("sign", f"_changed({source}, -1)"),
            ("factor", f"_changed({source}, 2)"),
            ("zero", f"_changed({source}, 0)"),
            ("none", "None"),
        ):
            text = text.replace("_changed", "(lambda value, by: value if value is None else value * by)")
            value = copy.deepcopy(node.value)
            new = _expression(text)
            if isinstance(value, ast.Tuple):
                value.elts[i] = new
            yield change, ast.Return(value=value if isinstance(value, ast.Tuple) else new)


def _of_binary(node: ast.BinOp, names: list[str]) -> Iterator[tuple[str, ast.AST]]:
    """Drop or swap operands, replace the operator, or compute in place."""
    yield "dropped right", node.left
    yield "dropped left", node.right
    if isinstance(node.op, (ast.Sub, ast.Div, ast.Pow, ast.MatMult)):
        yield "swapped", ast.BinOp(left=node.right, op=node.op, right=node.left)
    if type(node.op) in _OPPOSITE:
        yield "operator", ast.BinOp(left=node.left, op=_OPPOSITE[type(node.op)](), right=node.right)
    if type(node.op) in _IN_PLACE and isinstance(node.left, ast.Name):
        yield "in place", _expression(f"{node.left.id}.{_IN_PLACE[type(node.op)]}({ast.unparse(node.right)})")


def _of_unary(node: ast.UnaryOp, names: list[str]) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield "sign", node.operand


def _of_constant(node: ast.Constant, names: list[str]) -> Iterator[tuple[str, ast.AST]]:
    """Increase a number or dimension, or flip a flag."""
    if isinstance(node.value, bool):
        yield "flag", ast.Constant(not node.value)
    elif isinstance(node.value, (int, float)):
        yield "constant", ast.Constant(node.value + 1)


def _of_name(node: ast.Name, names: list[str]) -> Iterator[tuple[str, ast.AST]]:
    """Detach or transpose the tensor, or use another tensor."""
    if not isinstance(node.ctx, ast.Load) or node.id not in names:
        return
    yield "detach", _expression(f"{node.id}.detach()")
    yield "transposed", _expression(f"{node.id}.transpose(0, -1)")
    other = names[(names.index(node.id) + 1) % len(names)]
    if other != node.id:
        yield "other tensor", _expression(other)


def _of_compare(node: ast.Compare, names: list[str]) -> Iterator[tuple[str, ast.AST]]:
    if type(node.ops[0]) in _OPPOSITE:
        op = _OPPOSITE[type(node.ops[0])]()
        yield "comparison", ast.Compare(left=node.left, ops=[op], comparators=node.comparators)


def _of_call(node: ast.Call, names: list[str]) -> Iterator[tuple[str, ast.AST]]:
    """Drop a method, swap the branches of where, or replace a function by its argument."""
    if not isinstance(node.func, ast.Attribute):
        return
    if node.func.attr in _DROPPED:
        yield "dropped call", node.func.value
    if node.func.attr == "where":
        condition, one, other = node.args
        yield "branches", ast.Call(func=node.func, args=[condition, other, one], keywords=[])
        yield "no mask", one
    elif node.func.attr in {"call", "relu", "log"}:
        yield "dropped function", node.args[0]


def _of_choice(node: ast.IfExp, names: list[str]) -> Iterator[tuple[str, ast.AST]]:
    yield "always", node.body
    yield "never", node.orelse


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


_OPERATORS: tuple[tuple[type[ast.AST], Callable[..., Iterator[tuple[str, ast.AST]]]], ...] = (
    (ast.Return, _of_return),
    (ast.BinOp, _of_binary),
    (ast.UnaryOp, _of_unary),
    (ast.Constant, _of_constant),
    (ast.Name, _of_name),
    (ast.Compare, _of_compare),
    (ast.Call, _of_call),
    (ast.IfExp, _of_choice),
)


def equivalent(one: dict[str, object], other: dict[str, object]) -> bool:
    """Whether two recorded behaviours agree to rounding."""
    return all(_alike(one[key], other.get(key, "nothing")) for key in one)


def _alike(a: object, b: object) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return type(a) is type(b)
    assert isinstance(a, list)
    assert isinstance(b, list)
    return len(a) == len(b) and all(
        x.shape == y.shape and x.dtype == y.dtype and torch.allclose(x, y, rtol=1e-9, atol=1e-9, equal_nan=True)
        for x, y in zip(a, b, strict=True)
    )
