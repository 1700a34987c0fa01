"""Rules for functions that are linear in each of two arguments, by sums of products of coefficients.

Products of many factors are computed by halves or by doubled steps, so that factors may be 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from hodiff.errors import InputError
from hodiff.taylor.fallback import unknown
from hodiff.taylor.jets import is_plain_tensor, new_jet
from hodiff.taylor.jets_in_arguments import Batched, along_directions, coefficients_of, moves, value_of
from hodiff.taylor.registry import analytic_rule, enter, name_of, rule
from hodiff.taylor.series import Coefficient, Frame, plus


@rule("linalg.matrix_power", analytic=True)
def matrix_power(frame: Frame, func: Any, A: Any, n: int, *, out: None = None) -> Any:
    """Matrix power by repeated squaring."""
    if n == 0:
        return func(A.value, 0)
    base = torch.linalg.inv(A) if n < 0 else A
    n, result = abs(n), None
    while n:
        if n % 2:
            result = base if result is None else result @ base
        base, n = (base @ base, n // 2) if n > 1 else (base, 0)
    return result


@rule("prod", analytic=True)
def prod(frame: Frame, func: Any, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Multiply the two halves with each other until one factor is left; factors may be 0."""
    x = x if dtype is None else x.to(dtype)
    if dim is None:
        x, dim, keepdim = x.reshape(-1), 0, False
    if x.ndim == 0:
        return x
    x = torch.movedim(x, dim, -1)
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        rest = x[..., 2 * half :]
        x = torch.cat([x[..., :half] * x[..., half : 2 * half], rest], -1)  # dynamo finds no jets in tuples
    if x.shape[-1] == 0:
        return torch.prod(x.value, -1)
    return torch.movedim(x, -1, dim) if keepdim else x.squeeze(-1)


@rule("cumprod", analytic=True)
def cumprod(frame: Frame, func: Any, x: Any, dim: int, *, dtype: Any = None, out: None = None) -> Any:
    """Multiply each element by the partial product 1, 2, 4, ... places before it."""
    x = x if dtype is None else x.to(dtype)
    if x.ndim == 0:
        return x
    x, step = torch.movedim(x, dim, -1), 1
    while step < x.shape[-1]:
        x = torch.cat([x[..., :step], x[..., step:] * x[..., :-step]], -1)
        step *= 2
    return torch.movedim(x, -1, dim)


def bilinear(frame: Frame, func: Any, a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
    r"""$v_k = \sum_{i+j=k} B(a_i, b_j)$."""
    u, v = coefficients_of(frame, a), coefficients_of(frame, b)
    parts = frame.recalled(bilinear, (u, v), (func, args, kwargs))
    for k in range(len(parts), frame.order + 1):
        ends: Coefficient = None
        inner: Coefficient = None
        for i in range(k + 1):
            x, y = u[i], v[k - i]
            if x is None or y is None:
                continue
            each = along_directions(
                func, (Batched(x, frame.has_axis(i)), Batched(y, frame.has_axis(k - i)), *args), kwargs
            )
            if i in (0, k):
                ends = plus(ends, each)
            else:
                inner = plus(inner, each)
        parts.append(plus(ends, frame.summed(k, inner)))
    return new_jet(frame, parts)


BILINEAR = "bmm mm mv dot vdot inner outer kron linalg.cross cross linalg.vecdot tensordot"
for _name in BILINEAR.split():
    enter(_name, bilinear, analytic=True)


@analytic_rule("matmul")
def matmul(frame: Frame, func: Any, a: Any, b: Any, *, out: None = None) -> Any:
    """Matrix product; a constant matrix on the right multiplies all coefficients at once."""
    if func is torch.Tensor.matmul and torch.compiler.is_compiling() and not moves(frame, a):
        # Dynamo passes x @ W, for a jet x, as if it were W @ x.
        raise InputError(
            "jet: @ of a constant tensor and a jet: torch.compile does not show the order of the operands; write "
            "torch.matmul(a, b)."
        )
    if moves(frame, a) and not moves(frame, b) and is_plain_tensor(b) and b.ndim == 2:
        return rows_together(frame, a, b, lambda rows: rows @ b, lambda value: value @ b)
    return bilinear(frame, torch.matmul, a, b)


@analytic_rule("rmatmul")
def rmatmul(frame: Frame, func: Any, a: Any, b: Any) -> Any:
    """Matrix product b @ a."""
    return matmul(frame, func, b, a)


@analytic_rule("nn.linear")
def linear(frame: Frame, func: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    """Linear layer; a constant weight multiplies all coefficients at once."""
    if moves(frame, x) and not moves(frame, weight):
        result = rows_together(
            frame,
            x,
            (weight, value_of(frame, bias)),
            lambda rows: functional.linear(rows, weight),
            lambda value: functional.linear(value, weight, value_of(frame, bias)),
        )
        if moves(frame, bias):
            return new_jet(frame, [result.value, *(result + (bias - bias.value)).coefficients[1:]])
        return result
    product = matmul(frame, torch.matmul, x, weight.mT if weight.ndim > 1 else weight)
    return product if bias is None else product + bias


# Coefficients with at most this many rows are multiplied together, because reading the matrix takes most of the time.
# Larger coefficients are not worth the copy.
FEW_ROWS = 256


def rows_together(frame: Frame, x: Any, constants: Any, function: Any, value_function: Any) -> Any:
    """Apply a linear function of the last axis; small coefficients are stacked into one matrix."""
    value = x.value
    parts = frame.recalled(rows_together, [x.coefficients], constants)
    known = len(parts)
    first = parts[0] if known else value_function(value)
    parts += [first, *[None] * frame.order][known:]
    width = value.shape[-1]
    few: list[tuple[int, Any]] = []
    for k, each in enumerate(x.coefficients):
        if k < max(known, 1) or each is None:
            continue
        if not is_plain_tensor(each) or width == 0 or each.numel() > FEW_ROWS * width:
            parts[k] = function(each)
        else:
            few.append((k, each.reshape(-1, width)))
    if few:
        rows = [each for _, each in few]
        found = function(rows[0] if len(rows) == 1 else torch.cat(rows))
        for (k, _), part in zip(few, found.split([len(each) for each in rows]), strict=True):
            parts[k] = part.reshape(frame.shape(k, first.shape))
    return new_jet(frame, parts)


def _convolution(frame: Frame, func: Any, x: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Any:
    found = bilinear(frame, lambda a, b: func(a, b, None, *args, **kwargs), x, weight)
    if bias is None:
        return found
    rank = getattr(value_of(frame, weight), "ndim", 3) - 2
    return found + bias.reshape(-1, *[1] * rank)


for _name in ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"):
    enter(f"nn.{_name}", _convolution, analytic=True)
    enter(_name, _convolution, analytic=True)


@analytic_rule("einsum")
def einsum(frame: Frame, func: Any, equation: Any, *operands: Any) -> Any:
    """Contract operands from the left, by products of two."""
    if not isinstance(equation, str):
        return unknown(frame, func, (equation, *operands), {})
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if len(operands) == 1:
        x = operands[0]
        parts = [
            None
            if each is None
            else along_directions(lambda a: torch.einsum(equation, a), (Batched(each, frame.has_axis(k)),), {})
            for k, each in enumerate(x.coefficients)
        ]
        return new_jet(frame, parts)
    if len(operands) == 2:
        return bilinear(frame, lambda a, b: torch.einsum(equation, a, b), *operands)
    return _by_pairs(equation, operands)


def _by_pairs(equation: str, operands: tuple[Any, ...]) -> Any:
    """Contract the first two operands, keeping the indices that later operands and the output need."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow:
        letters = inputs.replace(",", "").replace("...", "")
        output = ("..." if "..." in inputs else "") + "".join(
            sorted(letter for letter in set(letters) if letters.count(letter) == 1)
        )
    later = "".join(terms[2:]) + output
    kept = "".join(dict.fromkeys(letter for letter in terms[0] + terms[1] if letter in later and letter != "."))
    dots = "..." if "..." in terms[0] or "..." in terms[1] else ""
    pair = torch.einsum(f"{terms[0]},{terms[1]}->{dots}{kept}", operands[0], operands[1])
    return torch.einsum(f"{dots}{kept},{','.join(terms[2:])}->{output}", pair, *operands[2:])


@analytic_rule("addmm", "addmv", "baddbmm", "addr", "addbmm")
def add_product(frame: Frame, func: Any, x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """Sum of x and a product, computed separately."""
    name = name_of(func).rstrip("_")
    product = {"addr": torch.outer, "addbmm": lambda a, b: torch.bmm(a, b).sum(0)}.get(name, torch.matmul)(a, b)
    return alpha * product if beta == 0 else beta * x + alpha * product


@analytic_rule("chain_matmul", "linalg.multi_dot")
def chain(frame: Frame, func: Any, *matrices: Any) -> Any:
    """Product of matrices, from the left."""
    given = matrices[0] if len(matrices) == 1 else matrices
    result = given[0]
    for each in given[1:]:
        result = torch.matmul(result, each)
    return result


@analytic_rule("nn.bilinear")
def three_fold(frame: Frame, func: Any, a: Any, b: Any, weight: Any, bias: Any = None) -> Any:
    """Bilinear layer, as an einsum."""
    found = torch.einsum("...i,kij,...j->...k", a, weight, b)
    return found if bias is None else found + bias
