"""How many units in the last place jets of elementary functions are off, against mpmath at fifty digits."""

import math
from functools import cache

import mpmath as mp
import torch
from taylor.hard_points import HARD

from hodiff.taylor import jet

ORDER = 10


@cache
def exact_coefficients(name, point, order=ORDER):
    """Taylor coefficients 0 to K + 1 at a point."""
    with mp.workdps(50):
        return mp.taylor(HARD[name][1], mp.mpf(point), order + 1)


def coefficients(name, point, dtype, order=ORDER):
    x = torch.tensor(point, dtype=dtype)
    line = [torch.ones((), dtype=dtype), *[torch.zeros((), dtype=dtype)] * (order - 1)]
    value, rest = jet(HARD[name][0], (x,), (line,), normalized=True)
    return [each.item() for each in (value, *rest)]


def unit(size, dtype):
    """The distance of neighbours among the numbers of a size."""
    info = torch.finfo(dtype)
    return 2.0 ** math.floor(math.log2(size)) * info.eps if size > info.tiny else info.tiny * info.eps


def errors(name, dtype, order=ORDER):
    """By order the largest error over the points, in units in the last place of the coefficient.

    A coefficient that vanishes by cancellation is as uncertain as the point: the unit is that of what a change of the
    point by itself would change, where this is larger.
    """
    worst = [0.0] * (order + 1)
    for point in HARD[name][2]:
        exact = [each.real for each in exact_coefficients(name, point, order)]
        for k, got in enumerate(coefficients(name, point, dtype, order)):
            moved = (k + 1) * exact[k + 1] * point
            size = float(max(abs(exact[k]), abs(moved)))
            if size > torch.finfo(dtype).max:
                continue
            error = abs(mp.mpf(got) - exact[k]) if math.isfinite(got) else mp.inf
            worst[k] = max(worst[k], float(error / unit(size, dtype)))
    return worst
