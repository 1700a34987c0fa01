"""Errors of jets of elementary functions in units in the last place, against mpmath at fifty digits."""

import json
import math
from functools import cache
from pathlib import Path

import mpmath as mp
import torch
from taylor.hard_points import HARD

from hodiff.taylor import jet

ORDER = 10


TRUTHS = Path(__file__).with_name("taylor_truths.json")


def exact_coefficients(name):
    """Return Taylor coefficients 0 to K + 1 to forty digits, for each point."""
    _, f, points = HARD[name]
    with mp.workdps(50):
        rows = [[each.real for each in mp.taylor(f, mp.mpf(point), ORDER + 1)] for point in points]
        return [[mp.nstr(each, 40) for each in row] for row in rows]


@cache
def truths():
    """Read mpmath's stored coefficients; `write_accuracy.py` recomputes them."""
    return json.loads(TRUTHS.read_text(encoding="utf-8"))


def coefficients(name, point, dtype, order=ORDER):
    x = torch.tensor(point, dtype=dtype)
    line = [torch.ones((), dtype=dtype), *[torch.zeros((), dtype=dtype)] * (order - 1)]
    value, rest = jet(HARD[name][0], (x,), (line,), normalized=True)
    return [each.item() for each in (value, *rest)]


def unit(size, dtype):
    """Return the distance of neighbouring floating-point numbers of a given size."""
    info = torch.finfo(dtype)
    return 2.0 ** math.floor(math.log2(size)) * info.eps if size > info.tiny else info.tiny * info.eps


def errors(name, dtype, order=ORDER):
    """Return the largest error over the points for each order, in units in the last place of the coefficient.

    A coefficient that vanishes by cancellation is as uncertain as the point. Its unit is the effect of a relative
    change of the point, if this is larger.
    """
    with mp.workdps(50):
        return _errors(name, dtype, order)


def _errors(name, dtype, order):
    worst = [0.0] * (order + 1)
    for point, row in zip(HARD[name][2], truths()[name], strict=True):
        exact = [mp.mpf(each) for each in row]
        for k, got in enumerate(coefficients(name, point, dtype, order)):
            moved = (k + 1) * exact[k + 1] * point
            size = float(max(abs(exact[k]), abs(moved)))
            if size > torch.finfo(dtype).max:
                continue
            error = abs(got - exact[k]) if math.isfinite(got) else mp.inf
            worst[k] = max(worst[k], float(error / unit(size, dtype)))
    return worst
