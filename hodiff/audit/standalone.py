"""Code that reproductions copy: derivatives by every route and by differences, with torch alone."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

Curve = Callable[[Tensor], Tensor]


def differentiate(f: Curve, route: str) -> Curve:
    """Compose the passes of a route: "reverse-over-forward" is reverse mode through forward mode."""
    for mode in reversed(route.split("-over-")):
        f = partial(_gradient if mode == "reverse" else _tangent, f)
    return f


def _gradient(f: Curve, t: Tensor) -> Tensor:
    try:
        return torch.func.grad(f)(t)
    except RuntimeError as problem:
        if "setup_context" not in str(problem):
            raise
    # torch.func refuses Functions without setup_context, which torch.autograd supports.
    with torch.enable_grad():
        t = t if t.requires_grad else t.detach().requires_grad_()
        return torch.autograd.grad(f(t), t, create_graph=True)[0]


def _tangent(f: Curve, t: Tensor) -> Tensor:
    return torch.func.jvp(f, (t,), (torch.ones_like(t),))[1]


def difference(f: Curve) -> tuple[float, float]:
    """Return f'(0) by central differences, extrapolated to step 0, and its error estimate."""
    best, error = math.nan, math.inf
    last: list[float] = []
    for k in range(10):
        h = torch.tensor(0.1 / 3**k, dtype=torch.float64)
        row = [float((f(h) - f(-h)) / (2 * h))]
        for m, before in enumerate(last, 1):
            row.append(row[-1] + (row[-1] - before) / (9.0**m - 1))
            change = max(abs(row[-1] - row[-2]), abs(row[-1] - before))
            if change <= error:
                best, error = row[-1], change
        last = row
    return best, error


def report(f: Curve, order: int) -> Iterator[str]:
    """Yield a line for each derivative of f at 0: a route is compared with differences of the order below."""
    zero, below = torch.zeros((), dtype=torch.float64), f
    largest = max(0.0, abs(float(f(zero))))  # 0 if the value is NaN
    for k in range(1, order + 1):
        truth, error = difference(below)
        # A derivative that vanishes is compared at the rounding level of the lower orders.
        size = max(1e-300, 1e-8 * largest, abs(truth))
        largest = max(largest, size)
        yield f"order {k}: {truth:.12g} by differences of order {k - 1}"
        right = None
        for passes in product(("reverse", "forward"), repeat=k):
            route = "-over-".join(passes)
            try:
                value = float(differentiate(f, route)(zero))
            except Exception as problem:
                yield f"  {route}: {type(problem).__name__}: {str(problem).strip().splitlines()[0]}"
                continue
            far = abs(value - truth)
            # Differences without a finite value are no reference.
            is_right = math.isnan(truth) or far <= 10 * error + 1e-7 * size + 1e-8 * largest
            right = right or (route if is_right else None)
            yield f"  {route}: {value:.12g}, relative error {far / size:.1e}{'' if is_right else ', WRONG'}"
        if right is None:
            return
        below = differentiate(f, right)
