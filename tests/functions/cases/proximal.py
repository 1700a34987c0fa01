"""Proximal maps and projections."""

import torch
from functions.case import Extremes, FunctionCase, normal, uniform
from mpmath import mp

from hodiff.functions.projections.proximal import (
    ProjectL2Ball,
    ProjectSimplex,
    SoftThreshold,
    group_soft_threshold,
    project_l2_ball,
    project_simplex,
    soft_threshold,
)

INF = float("inf")
LAM = 0.75


def exact_soft_threshold(x, lam):
    return mp.sign(x) * max(abs(x) - lam, mp.mpf(0))


def groups(dtype, g):
    """Draw groups of norms 2, 1/2, 3 and 1/4, above and below the thresholds."""
    x = normal((4, 3), torch.float64, g)
    norms = torch.tensor([[2.0], [0.5], [3.0], [0.25]], dtype=torch.float64)
    return (x / x.norm(dim=-1, keepdim=True) * norms).to(dtype)


def levels(dtype, g):
    return uniform(0.8, 1.2, (4, 1), dtype, g)


def simplex_points(dtype, g):
    """Draw rows with one, two, three and four entries on the support."""
    rows = [[3.0, 0.1, -0.4, 0.3], [1.0, 0.7, -0.6, -1.5], [0.5, 0.1, 0.4, -1.0], [0.2, 0.25, 0.1, 0.15]]
    return (torch.tensor(rows, dtype=torch.float64) + uniform(0, 0.01, (4, 4), torch.float64, g)).to(dtype)


def simplex_by_newton(x, radius):
    """Project by Michelot's algorithm: average over a support that shrinks until it is correct."""
    support = torch.ones_like(x)
    for _ in range(x.shape[-1]):
        threshold = ((support * x).sum(-1, keepdim=True) - radius) / support.sum(-1, keepdim=True)
        support = (x > threshold).to(x.dtype) * support
    return support * (x - threshold)


CASES = [
    FunctionCase(
        name="soft_threshold",
        function=soft_threshold,
        Function=SoftThreshold,
        inputs=lambda dtype, g: (normal((3, 4), dtype, g), uniform(0.4, 0.8, (4,), dtype, g)),
        formula=r"\operatorname{sign}(x)\max(\lvert x\rvert - \lambda, 0)",
        reference=lambda x, lam: x.sign() * (x.abs() - lam).relu(),
        saved_bytes=lambda x, lam: x.nbytes,
        saved="output",
        extremes=[
            Extremes(
                exact_soft_threshold,
                others={1: LAM},
                domain=((-INF, -LAM), (-LAM, LAM), (LAM, INF)),
                limits={INF: (INF, 1, 0, 0), -INF: (-INF, 1, 0, 0), LAM: (0, 0, 0, 0), -LAM: (0, 0, 0, 0)},
            ),
            Extremes(
                exact_soft_threshold,
                argnum=1,
                others={0: -3.0},
                domain=((0, 3), (3, INF)),
                limits={3.0: (0, 0, 0, 0), 0.0: (-3, 1, 0, 0), INF: (0, 0, 0, 0)},
            ),
        ],
        empty=lambda dtype: (torch.ones(0, 3, dtype=dtype), torch.ones(3, dtype=dtype)),
    ),
    FunctionCase(
        name="group_soft_threshold",
        function=group_soft_threshold,
        Function=ProjectL2Ball,
        inputs=lambda dtype, g: (groups(dtype, g), levels(dtype, g)),
        formula=r"x \max(1 - \lambda / \lVert x\rVert_2, 0)",
        reference=lambda x, lam: x * (1 - lam / x.square().sum(-1, keepdim=True).sqrt()).relu(),
        saved_bytes=lambda x, lam: x.nbytes + lam.nbytes,
        saved="inputs",
        empty=lambda dtype: (torch.ones(0, 3, dtype=dtype), torch.ones(0, 1, dtype=dtype)),
    ),
    FunctionCase(
        name="project_l2_ball",
        function=project_l2_ball,
        Function=ProjectL2Ball,
        inputs=lambda dtype, g: (groups(dtype, g), levels(dtype, g)),
        formula=r"x \min(1, r / \lVert x\rVert_2)",
        reference=lambda x, radius: x * (radius / x.square().sum(-1, keepdim=True).sqrt()).clamp(max=1),
        saved_bytes=lambda x, radius: x.nbytes + radius.nbytes,
        saved="inputs",
        empty=lambda dtype: (torch.ones(0, 3, dtype=dtype), torch.ones(0, 1, dtype=dtype)),
    ),
    FunctionCase(
        name="project_l2_ball-columns",
        function=lambda x, radius: project_l2_ball(x, radius, dim=(0, 2)),
        Function=ProjectL2Ball,
        inputs=lambda dtype, g: (normal((2, 2, 3), dtype, g), uniform(0.8, 1.2, (), dtype, g)),
        formula=r"x \min(1, r / \lVert x\rVert_2)",
        reference=lambda x, radius: x * (radius / x.square().sum((0, 2), keepdim=True).sqrt()).clamp(max=1),
        saved_bytes=lambda x, radius: x.nbytes + radius.nbytes,
        saved="inputs",
    ),
    FunctionCase(
        name="project_simplex",
        function=project_simplex,
        Function=ProjectSimplex,
        inputs=lambda dtype, g: (simplex_points(dtype, g), uniform(0.8, 1.2, (4, 1), dtype, g)),
        formula=r"\max(x - \tau, 0),\ \textstyle\sum_i y_i = r",
        reference=simplex_by_newton,
        saved_bytes=lambda x, radius: x.nbytes,
        saved="output",
        empty=lambda dtype: (torch.ones(0, 3, dtype=dtype), torch.ones(0, 1, dtype=dtype)),
    ),
    FunctionCase(
        name="project_simplex-columns",
        function=lambda x: project_simplex(x, 2.0, dim=0),
        Function=ProjectSimplex,
        inputs=lambda dtype, g: (simplex_points(dtype, g).mT.contiguous(),),
        formula=r"\max(x - \tau, 0),\ \textstyle\sum_i y_i = r",
        reference=lambda x: simplex_by_newton(x.mT, 2.0).mT,
        saved_bytes=lambda x: x.nbytes,
        saved="output",
    ),
]
