"""Soft ranks and soft sorting."""

import itertools

import torch
from functions.case import FunctionCase, uniform

from hodiff.functions.projections.sorting import PermutahedronProjection, soft_rank, soft_sort


def rows(dtype, g):
    """Draw gaps far above and far below the temperature, so that some blocks are merged."""
    x = torch.tensor([[0.1, 2.0, 0.4, 1.9, -1.0], [1.0, 0.2, -0.3, 0.5, 0.6]], dtype=torch.float64)
    return (x + uniform(0, 0.05, x.shape, torch.float64, g)).to(dtype)


def project(z, w):
    """Project on the permutahedron by the minimax formula of isotonic regression, from the means of all intervals."""
    z, order = z.sort(descending=True)
    gap, size = z - w, len(z)
    mean = {(i, j): gap[i : j + 1].mean() for i, j in itertools.combinations_with_replacement(range(size), 2)}
    pooled = [
        torch.stack([torch.stack([mean[i, j] for j in range(k, size)]).amax() for i in range(k + 1)]).amin()
        for k in range(size)
    ]
    projected = z - torch.stack(pooled)
    return projected[order.argsort()]


def ranks_by_minimax(x, temperature):
    descending = torch.arange(x.shape[-1], 0, -1, dtype=x.dtype)
    return torch.stack([project(row / temperature, descending) for row in x])


def sorted_by_minimax(x, temperature):
    descending = torch.arange(x.shape[-1], 0, -1, dtype=x.dtype)
    return torch.stack([-project(descending / temperature, (-row).sort(descending=True).values) for row in x])


CASES = [
    FunctionCase(
        name="soft_rank",
        function=soft_rank,
        Function=PermutahedronProjection,
        inputs=lambda dtype, g: (rows(dtype, g), uniform(0.4, 0.5, (), dtype, g)),
        formula=r"P(x / \varepsilon, \rho),\ \rho = (n, \dots, 1)",
        reference=ranks_by_minimax,
        saved="blocks, order, input",
        empty=lambda dtype: (torch.ones(0, 3, dtype=dtype), torch.ones((), dtype=dtype)),
    ),
    FunctionCase(
        name="soft_rank-columns",
        function=lambda x: soft_rank(x, 0.4, dim=0, descending=True),
        Function=PermutahedronProjection,
        inputs=lambda dtype, g: (rows(dtype, g).mT.contiguous(),),
        formula=r"P(-x / \varepsilon, \rho),\ \rho = (n, \dots, 1)",
        saved="blocks, order",
        empty=lambda dtype: (torch.ones(0, 3, dtype=dtype),),
    ),
    FunctionCase(
        name="soft_sort",
        function=soft_sort,
        Function=PermutahedronProjection,
        inputs=lambda dtype, g: (rows(dtype, g), uniform(2.5, 3.0, (), dtype, g)),
        formula=r"P(\rho / \varepsilon, x),\ \rho = (n, \dots, 1)",
        reference=sorted_by_minimax,
        saved="blocks, order, temperature",
        empty=lambda dtype: (torch.ones(0, 3, dtype=dtype), torch.ones((), dtype=dtype)),
    ),
    FunctionCase(
        name="soft_sort-columns",
        function=lambda x: soft_sort(x, 2.5, dim=0, descending=True),
        Function=PermutahedronProjection,
        inputs=lambda dtype, g: (rows(dtype, g).mT.contiguous(),),
        formula=r"P(\rho / \varepsilon, x),\ \rho = (n, \dots, 1)",
        saved="blocks, order",
        empty=lambda dtype: (torch.ones(0, 3, dtype=dtype),),
    ),
]
