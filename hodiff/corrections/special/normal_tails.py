r"""Rules for functions of the normal distribution's tail, whose derivatives in torch subtract nearly equal numbers.

Mills' ratio is a continued fraction. With $ρ_n = 1 / (2x + 2(n+1)ρ_{n+1})$,

$$ \operatorname{erfcx}(x) = e^{x^2} \operatorname{erfc}(x) = \tfrac{2}{\sqrt\pi} ρ_0(x), \qquad
   \frac{d}{dx} \log Φ(x) = -x + \sqrt2\,ρ_1(-x/\sqrt2), $$

and nothing cancels in the Taylor series of a fraction of positive terms.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hodiff.corrections.special.towers import enter

# Bound from which the fraction is used, and its number of levels.
FAR = 3.0
LEVELS = 80


def _mills(x: Tensor, n: int, m: int) -> Tensor:
    """The derivative of order m of ρ_n, for x from `FAR` on."""
    series = [torch.zeros_like(x) for _ in range(m + 1)]
    for level in range(n + LEVELS, n - 1, -1):
        below = [2 * (level + 1) * each for each in series]
        below[0] = below[0] + 2 * x
        if m:
            below[1] = below[1] + 2
        series = [1 / below[0]]
        for k in range(1, m + 1):
            series.append(-series[0] * torch.stack([below[j] * series[k - j] for j in range(1, k + 1)]).sum(0))
    return series[m] * math.factorial(m)


def _erfcx(x: Tensor, m: int) -> Tensor:
    r"""Derivative by $y' = 2xy - 2/\sqrt\pi$, $y^{(k+1)} = 2 x y^{(k)} + 2 k y^{(k-1)}$, or by the fraction."""
    near = x.clamp(max=FAR)
    values = [torch.special.erfcx(near)]
    for k in range(m):
        values.append(2 * near * values[k] + (2 * k * values[k - 1] if k else -2 / math.sqrt(math.pi)))
    return torch.where(x > FAR, 2 / math.sqrt(math.pi) * _mills(x.clamp(min=FAR), 0, m), values[m])


def _log_ndtr(x: Tensor, m: int) -> Tensor:
    r"""Derivative by $r = φ/Φ$ with $r' = -r (x + r)$ and its derivatives, or by the fraction."""
    limit = -FAR * math.sqrt(2)
    near, far = x.clamp(min=limit), x.clamp(max=limit)
    ratios = [torch.exp(-0.5 * near * near - torch.special.log_ndtr(near)) / math.sqrt(2 * math.pi)]
    sums = [near + ratios[0]]
    for k in range(m - 1):
        ratios.append(-torch.stack([math.comb(k, j) * ratios[j] * sums[k - j] for j in range(k + 1)]).sum(0))
        sums.append(ratios[-1] + (0 if k else 1))
    tail = math.sqrt(2) * (-math.sqrt(0.5)) ** (m - 1) * _mills(far * -math.sqrt(0.5), 1, m - 1)
    tail = tail - (far if m == 1 else 1 if m == 2 else 0)
    return torch.where(x < limit, tail, ratios[m - 1])


_GAUTSCHI = "W. Gautschi, Efficient computation of the complex error function (1970), section 2"

enter(
    "erfcx",
    _erfcx,
    reason="for large x it is a difference of equal numbers; at 1e4 the third derivative has the wrong size",
    reference=_GAUTSCHI,
)
enter(
    "log_ndtr",
    _log_ndtr,
    reason="far in the tail it is a difference of equal numbers; at -300 the third derivative has the wrong size",
    reference=_GAUTSCHI,
)
