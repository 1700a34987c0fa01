"""Plot of a straight-through estimator: its values, its gradients, and gradient descent with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hodiff.common.options import require_amount, require_callable, require_int
from hodiff.errors import InputError
from hodiff.functions import straight_through as estimator_of
from hodiff.plot.derivatives import require_interval
from hodiff.plot.shared import one_number, require_package

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 601  # of a curve
CELLS = 251  # of the surface, along each axis
TARGET = (0.7, -1.2)  # where the loss by default has its minimum, if weights were not quantized
COUPLING = 0.6  # of the two weights in it

Map = Callable[[Tensor], Tensor]


def straight_through(
    forward: Map,
    surrogate: Map,
    *,
    low: float = -2.5,
    high: float = 2.5,
    loss: Callable[[Tensor], Tensor] | None = None,
    start: Sequence[float] = (-1.6, 1.7),
    rate: float = 0.1,
    steps: int = 60,
    axes: Sequence[Axes] | None = None,
) -> list[Axes]:
    r"""Draw the values, the gradients and the descent that `hodiff.straight_through(forward, surrogate)` gives.

    Three panels: the values of both functions; the derivative of the surrogate, which backward returns, beside the
    slope of forward between its jumps; and the loss of two weights that forward quantizes, with the path of gradient
    descent by the estimator.

    Args:
        forward: The quantizer, elementwise.
        surrogate: The function that is differentiated instead, elementwise.
        low: Left end of all axes.
        high: Right end of all axes.
        loss: Maps two quantized weights, a float64 tensor (2,), to a tensor with one number, by torch's functions, as
            `torch.func.vmap` maps it; by default a quadratic one with its minimum at (0.7, -1.2).
        start: Start of the descent.
        rate: Learning rate of the descent.
        steps: Number of steps of the descent.
        axes: Three matplotlib axes to draw in; axes of a new figure by default.

    Returns:
        The axes.

    Raises:
        InputError: If a number is out of range, or the result of a function is invalid.

    Example:
        >>> import matplotlib as mpl, torch
        >>> mpl.use("Agg")
        >>> _, slopes, surface = straight_through(torch.round, lambda x: x)
        >>> bool(slopes.get_ylim()[1] < 2)
        True

    Source: Y. Bengio, N. Léonard & A. Courville, "Estimating or propagating gradients through stochastic neurons for
    conditional computation", 2013, section 4.
    """
    require_interval("straight_through", low, high)
    require_amount("straight_through", "rate", rate, positive=True)
    require_int("straight_through", "steps", steps, 1)
    estimator = estimator_of(forward, surrogate)
    loss = _quadratic if loss is None else loss
    require_callable("straight_through", loss=loss)
    way = _descend(lambda w: one_number("straight_through", loss(estimator(w))), start, rate, steps)
    values, slopes, surface = _panels(axes)
    x = torch.linspace(low, high, POINTS, dtype=torch.float64)
    with torch.no_grad():
        stepped = forward(x)
        values.plot(x, _broken(stepped), label="forward")
        values.plot(x, surrogate(x), "--", label="surrogate")
    handed = torch.func.grad(lambda x: estimator(x).sum())(x)
    slopes.plot(x, handed, "--", color="C1", label="backward: slope of the surrogate")
    slopes.plot(x, _slope_between_jumps(x, stepped), color="C0", label="slope of forward")
    _draw_surface(surface, loss, forward(torch.linspace(low, high, CELLS, dtype=torch.float64)), (low, high))
    surface.plot(way[:, 0], way[:, 1], ".-", color="C3", markersize=3, linewidth=0.8, label="descent")
    surface.plot(*way[-1], "o", color="C3", label=f"after {steps} steps")
    surface.set(xlim=(low, high), ylim=(low, high), xlabel="$w_1$", ylabel="$w_2$")
    surface.set_title("loss of two quantized weights", fontsize="medium")
    for ax, title in ((values, "what goes forward"), (slopes, "what comes back")):
        ax.set_title(title, fontsize="medium")
        ax.set_xlabel("$x$")
        ax.grid(alpha=0.3)
    for ax in (values, slopes, surface):
        ax.legend(fontsize="small")
    return [values, slopes, surface]


def _quadratic(w: Tensor) -> Tensor:
    away = w - w.new_tensor(TARGET)
    return away.square().sum() + COUPLING * away.prod()


def _descend(f: Callable[[Tensor], Tensor], start: Sequence[float], rate: float, steps: int) -> np.ndarray:
    w = torch.tensor([float(each) for each in start], dtype=torch.float64)
    if w.shape != (2,):
        raise InputError(f"straight_through: start: expected two numbers, got {len(w)}.")
    way = [w]
    for _ in range(steps):
        way.append(way[-1] - rate * torch.func.grad(f)(way[-1]))
    return torch.stack(way).numpy()


def _broken(values: Tensor) -> np.ndarray:
    """Return values with a gap at each jump, so that no line is drawn across it."""
    found = values.numpy().copy()
    found[1:][_jumps(found)] = np.nan
    return found


def _slope_between_jumps(x: Tensor, values: Tensor) -> np.ndarray:
    found = np.gradient(values.numpy(), x.numpy())
    jumps = _jumps(values.numpy())
    found[1:][jumps] = found[:-1][jumps] = np.nan
    return found


def _jumps(values: np.ndarray) -> np.ndarray:
    """Mask of the steps between points at which a function jumps: they are far above the typical step."""
    steps = np.abs(np.diff(values))
    span = np.ptp(values) or 1.0
    return steps > max(20 * float(np.median(steps)), 1e-3 * span) if len(steps) else np.zeros(0, dtype=bool)


def _draw_surface(ax: Axes, loss: Callable[[Tensor], Tensor], quantized: Tensor, ends: tuple[float, float]) -> None:
    """Draw the loss of two quantized weights, with a tile for each pair of levels."""
    with torch.no_grad():
        pairs = torch.cartesian_prod(quantized, quantized)
        heights = torch.func.vmap(lambda w: one_number("straight_through", loss(w)))(pairs)
    # The first weight is the horizontal one.
    rows = heights.reshape(CELLS, CELLS).T.numpy()
    image = ax.imshow(rows, origin="lower", extent=(*ends, *ends), aspect="auto", cmap="viridis")
    ax.figure.colorbar(image, ax=ax, label="loss")


def _panels(axes: Sequence[Axes] | None) -> list[Axes]:
    if axes is None:
        pyplot = require_package("matplotlib.pyplot", "straight_through", 'pip install "hodiff[plot]"')
        return list(pyplot.subplots(1, 3, figsize=(13, 3.8), layout="constrained")[1])
    if len(axes) != 3:
        raise InputError(f"straight_through: axes: expected 3, got {len(axes)}.")
    return list(axes)
