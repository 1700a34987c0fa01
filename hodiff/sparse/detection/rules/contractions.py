"""Rules for products of matrices and for linear algebra."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from hodiff.sparse.detection.call import Call, rule
from hodiff.sparse.detection.memory_supports import has_derivatives, is_strided
from hodiff.sparse.detection.supports import Supports


def product(call: Call, a: Any, b: Any) -> Supports:
    """Union of row i of a and column j of b, for the element (i, j) of each pair of matrices."""
    if _is_fixed_sparse(call, a):
        return _selected(a, call.supports(b))
    if _is_fixed_sparse(call, b):
        chosen = call.supports(a)
        return _transposed(_selected(b.mT, _transposed(chosen)))
    rows = call.supports(a).over((-1,), keepdim=True)
    columns = call.supports(b).over((-2,), keepdim=True)
    return rows | columns


def _is_fixed_sparse(call: Call, x: Any) -> bool:
    """Whether a factor is a constant sparse matrix, whose indices are part of the function's structure."""
    return isinstance(x, Tensor) and not is_strided(x) and x.dim() == 2 and not call.moves(x)


def _selected(matrix: Tensor, supports: Supports) -> Supports:
    """Union of a vector's elements, or a matrix's rows, at the entries of each row of a sparse matrix."""
    entries = matrix.detach().to_sparse_coo().coalesce().indices().cpu().numpy()
    columns = supports.shape[1:]
    width = math.prod(columns)
    chosen = supports.reshape(supports.shape[0], width)
    places = entries[0][:, None] * width + np.arange(width)
    return chosen.take(chosen.which[entries[1]]).merged(places, (matrix.shape[0], *columns))


def _transposed(supports: Supports) -> Supports:
    return supports.take(supports.which.T)


@rule("mm", "bmm", "int_mm")
def mm(call: Call) -> list[Supports | None]:
    """Product of matrices, or of batches of matrices."""
    return [product(call, call["self"], call["mat2"])]


@rule("sparse_mm")
def sparse_mm(call: Call) -> list[Supports | None]:
    """Product of a sparse matrix and a dense matrix."""
    return [product(call, call["sparse"], call["dense"])]


@rule("addmm", "baddbmm", "sparse_addmm")
def addmm(call: Call) -> list[Supports | None]:
    """Product of matrices plus a summand."""
    factors = [call.get("mat1", call.get("batch1")), call.get("mat2", call.get("batch2"))]
    found = product(call, *factors)
    return [found | call.supports(call["self"]).broadcast(found.shape)]


@rule("addbmm")
def addbmm(call: Call) -> list[Supports | None]:
    """Products of matrices, summed over the batch, plus a summand."""
    found = product(call, call["batch1"], call["batch2"]).over((0,))
    return [found | call.supports(call["self"]).broadcast(found.shape)]


@rule("mv", "addmv")
def mv(call: Call) -> list[Supports | None]:
    """Product of a matrix and a vector."""
    matrix, vector = (call["self"], call["vec"]) if call.name == "mv" else (call["mat"], call["vec"])
    if _is_fixed_sparse(call, matrix):
        found = _selected(matrix, call.supports(vector))
    else:
        found = call.supports(matrix).over((-1,)) | call.supports(vector).whole(())
    return [found if call.name == "mv" else found | call.supports(call["self"]).broadcast(found.shape)]


@rule("dot", "vdot", "dist", "linalg_lstsq", "linalg_householder_product", "ormqr", "pdist_backward")
def everything(call: Call) -> list[Supports | None]:
    """Make every element depend on all elements of all arguments."""
    return list(call.dense())


@rule("ger", "outer")
def outer(call: Call) -> list[Supports | None]:
    """Union of an element of each vector."""
    a, b = call.supports(call["self"]), call.supports(call["vec2"])
    return [a.reshape(-1, 1) | b.reshape(1, -1)]


@rule("cdist_forward")
def cdist(call: Call) -> list[Supports | None]:
    """Union of point i of one set and point j of the other set."""
    a, b = call.supports(call["x1"]).over((-1,)), call.supports(call["x2"]).over((-1,))
    return [a.take(a.which[..., :, None]) | b.take(b.which[..., None, :])]


@rule("pdist_forward")
def pdist(call: Call) -> list[Supports | None]:
    """Union of the points of each pair."""
    points = call.supports(call["self"]).over((-1,))
    first, second = np.triu_indices(points.shape[0], 1)
    return [points.take(points.which[first]) | points.take(points.which[second])]


@rule("trilinear")
def trilinear(call: Call) -> list[Supports | None]:
    """Product of three tensors with missing dimensions added, summed over dimensions."""
    union = call.none(())
    for name, missing in (("i1", "expand1"), ("i2", "expand2"), ("i3", "expand3")):
        supports = call.supports(call[name])
        union = union | supports.take(np.expand_dims(supports.which, tuple(call[missing])))
    return [union.over(call["sumdim"])]


@rule("cdist_backward")
def cdist_backward(call: Call) -> list[Supports | None]:
    """Union of point i, its distances, and all points of the other set."""
    others = call.supports(call["x2"]).over((-2, -1))
    distances = call.supports(call["cdist"]) | call.supports(call["grad"])
    united = distances.over((-1,), keepdim=True) | others.take(others.which[..., None, None])
    return [(united | call.supports(call["x1"]).over((-1,), keepdim=True)).broadcast(call.outputs[0].shape)]


# Linear systems: a column of the solution depends on all of the matrix, and on its own right-hand side.
_RIGHT_SIDES = {"linalg_solve_triangular": "B", "triangular_solve": "self", "cholesky_solve": "self"}


def of_matrices(call: Call) -> list[Supports | None]:
    """Union of all elements of the matrices, batch by batch."""
    # A determinant has only the dimensions of the batch; a vector of eigenvalues has one more.
    matrices = [x for x in call.tensors if x.dim() >= 2 and has_derivatives(x)]
    batch = np.broadcast_shapes(*(x.shape[:-2] for x in matrices))
    united = call.none(batch)
    right = call.get(_RIGHT_SIDES.get(call.name, ""))
    for x in matrices:
        if x is not right:
            united = united | call.supports(x).over((-2, -1)).broadcast(batch)
    for x in call.tensors:
        if x.dim() < 2:
            united = united | call.supports(x).whole(())
    return [_spread(call, united, right, each) for each in call.outputs]


def _spread(call: Call, united: Supports, right: Any, output: Tensor) -> Supports | None:
    if not output.numel():
        return None
    rest = output.dim() - len(united.shape)
    found = united.reshape(*united.shape, *(1,) * rest).broadcast(output.shape)
    if right is None:
        return found
    if output.shape[-2:] != right.shape[-2:]:
        return found  # not the solution
    left = call.get("left", True)
    columns = call.supports(right).over((-2,) if left else (-1,), keepdim=True)
    return found | columns.broadcast(output.shape)
