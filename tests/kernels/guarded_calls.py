"""Calls of the compiled kernels on tensors at the edge of their memory, run by test_bounds.py.

The pages before and after each tensor are inaccessible, so a kernel that reads or writes a neighbouring element kills
the process. Outputs and scratch memory lie at such edges, too.
"""

import ctypes
import itertools
import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hodiff.functions import attention
from hodiff.kernels import fused
from hodiff.kernels.cross_entropy import cpu
from hodiff.kernels.fused_library import run

COUNTS = (1, 7, 17, 33, 255, 2049, 16385)
SHAPES = ((1, 1), (3, 7), (2, 16), (5, 17), (33, 33), (7, 257), (70, 255))


class Edge:
    """Memory whose tensors begin or end at an inaccessible page."""

    def __init__(self, last: bool):
        self._last, self._generator = last, torch.Generator().manual_seed(0)
        self._protect = ctypes.CDLL(None).mprotect
        self._protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def copy(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to contiguous memory of exactly its size."""
        page, size = mmap.PAGESIZE, tensor.numel() * tensor.element_size()
        if not size:
            return tensor
        inside = -(-size // page) * page
        area = mmap.mmap(-1, inside + 2 * page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(area))
        for place in (start, start + page + inside):
            assert self._protect(place, page, 0) == 0
        offset = page + inside - size if self._last else page
        found = torch.frombuffer(area, dtype=tensor.dtype, count=tensor.numel(), offset=offset).view(tensor.shape)
        return found.copy_(tensor)

    def draw(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.copy(torch.randn(shape, generator=self._generator, dtype=dtype))

    def draws(self, count: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [self.draw(*shape, dtype=dtype) for _ in range(count)]

    @contextmanager
    def outputs(self) -> Iterator[None]:
        """Allocate new tensors at edges within the context."""

        def at_edge(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
            return lambda *args, **kwargs: self.copy(make(*args, **kwargs))

        with (
            patch.object(torch, "empty_like", at_edge(torch.empty_like)),
            patch.object(torch, "zeros", at_edge(torch.zeros)),
            patch.object(Tensor, "new_empty", at_edge(Tensor.new_empty)),
            patch.object(Tensor, "new_zeros", at_edge(Tensor.new_zeros)),
        ):
            yield


def elementwise(edge: Edge) -> None:
    for count in COUNTS:
        x, by, c, u, w = edge.draws(5, count)
        mask = edge.copy(x > 0)
        with edge.outputs():
            for formula in fused.formulas():
                fused.elementwise(formula, x, by)
                if formula != "gate":
                    fused.elementwise(formula, x)
            for formula in fused.pullbacks():
                fused.pullback(formula, x, by, c)
            fused.gate_curvature(u, w, c, x, by)
            fused.add_relu(x, by)
            fused.add_relu(x)
            fused.masked(x, mask)


def rows(edge: Edge) -> None:
    for count, columns in SHAPES:
        x, v, c, e = edge.draws(4, count, columns)
        scale, (w, a, b) = edge.draw(count, 1), edge.draws(3, columns)
        with edge.outputs():
            fused.logsumexp(x)
            fused.softmax(x, scale, bounded=True)
            fused.softmax_product(x, scale, v, bounded=False)
            fused.weighted(x, v)
            fused.weighted_pullback(x, v, c)
            fused.softmax_curvature(x, v, c, e)
            fused.turned(x)
            for centered in (False, True):
                fused.normalization_curvature(x, v, c, w, a, b, eps=1e-5, centered=centered)


def series(edge: Edge) -> None:
    for (count, columns), dtype in itertools.product(SHAPES, (torch.float32, torch.float64)):
        u, (a, b, w) = edge.draw(count, columns, dtype=dtype), edge.draws(3, columns, dtype=dtype)
        with edge.outputs():
            fused.collapsed(a, b, u, w)
            fused.collapsed(a, b, u, None)


def squares(edge: Edge) -> None:
    for size, further, dtype in itertools.product((1, 31, 33, 150), (0, 3), (torch.float32, torch.float64)):
        # The last row of a block of a matrix ends before the leading dimension does.
        flat = edge.draw((size - 1) * (size + further) + size, dtype=dtype)
        with edge.outputs():
            fused.average_with_transpose(flat.as_strided((size, size), (size + further, 1)))


def logits(edge: Edge) -> None:
    for (count, columns), dtype in itertools.product(SHAPES, (torch.float32, torch.float64)):
        z, z_t = edge.draws(2, count, columns, dtype=dtype)
        lse, g, mean, t, r, t_t, r_t = edge.draws(7, count, 1, dtype=dtype)
        place = edge.copy(torch.arange(count)[:, None] % (columns + 1) - 1)
        cpu.cotangent_(z, lse, g, t, r, place)
        cpu.curvature_(z, z_t, lse, g, mean, (t, t_t), (r, r_t), place)


def heads(edge: Edge) -> None:
    shapes = (((1, 1), (1, 1), (1, 1)), ((3, 7, 5), (1, 9, 5), (3, 9, 4)), ((2, 2, 40, 3), (2, 1, 70, 3), (2, 70, 17)))
    settings: Sequence[dict[str, Any]] = ({}, {"window": (3, 2), "softcap": 1.5}, {"is_causal": True})
    for (q, k, v), dtype, given in itertools.product(shapes, (torch.float32, torch.float64), settings):
        for mask in (None, (k[-2],), (q[-2], 1), (*q[:-1], k[-2])):
            kept = [edge.draw(*shape, dtype=dtype).requires_grad_() for shape in (q, k, v, *([mask] if mask else []))]
            with edge.outputs():
                value = attention(*kept, **given)
                slopes = torch.autograd.grad(value.square().sum(), kept, create_graph=True)
                torch.autograd.grad(sum(each.square().sum() for each in slopes), kept)


def one_further(edge: Edge) -> None:
    """A read past the end of a tensor, which kills the process."""
    x, out = edge.draws(2, 17)
    run("hodiff_elementwise", 0, x.data_ptr(), None, out.data_ptr(), 18)


if __name__ == "__main__":
    torch.set_num_threads(2)
    for name, last in itertools.product(sys.argv[1:], (True, False)):
        sys.stdout.write(f"{name} at the {'end' if last else 'start'}\n")
        sys.stdout.flush()
        globals()[name](Edge(last))
    sys.stdout.write("all are within their memory")
