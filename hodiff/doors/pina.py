"""Derivatives in Taylor mode for PINA's equations, by the labels of coordinates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from pina import LabelTensor
from torch import Tensor

from hodiff.common.options import require_callable
from hodiff.errors import InputError
from hodiff.taylor import laplacian as tensor_laplacian
from hodiff.taylor import partial as tensor_partial


def partial(
    model: Callable[[Tensor], Tensor],
    points: LabelTensor,
    coordinates: Sequence[Sequence[str]],
    inputs: Sequence[str],
) -> list[Tensor]:
    r"""Compute partial derivatives of a model at the points of an equation, in one forward pass.

    $$ \frac{\partial^k u}{\partial x_i\, \partial x_j \cdots} \quad \text{for labels } (i, j, \dots) $$

    PINA passes points and values to an equation, and its operators differentiate the values in reverse mode. Taylor
    mode differentiates the model itself, in any order.

    Args:
        model: The model of the solver: a module or function of a tensor (N, D) that returns (N, k) and needs no labels.
        points: Points (N, D) that the equation receives, with coordinates in any order.
        coordinates: For each derivative a tuple with a label for each differentiation, in any order, such as
            `[("t",), ("x", "x")]`.
        inputs: Labels in the order in which the model takes them, `problem.input_variables`. Points have another order.

    Returns:
        The derivatives, tensors (N, k) that can be differentiated in the model's parameters.

    Raises:
        InputError: If an argument is invalid, points lack a label, or the output at a point depends on other points.

    Example:
        >>> import torch
        >>> from pina import LabelTensor
        >>> from hodiff.doors.pina import partial
        >>> points = LabelTensor(torch.tensor([[3.0, 2.0]]), ["t", "x"])
        >>> u = lambda p: p[:, :1] ** 3 * p[:, 1:]  # x^3 t
        >>> partial(u, points, [("t",), ("x", "x")], inputs=["x", "t"])
        [tensor([[8.]]), tensor([[36.]])]

    Source: As in `hodiff.partial`; PINA's operators are in `pina.operator`.
    """
    place = _ordered("partial", model, points, inputs)
    asked = [(each,) if isinstance(each, str) else tuple(each) for each in coordinates]
    _require_labels("partial", "coordinates", [label for each in asked for label in each] if all(asked) else [], inputs)
    numbers = [tuple(list(inputs).index(label) for label in each) for each in asked]
    found: list[Tensor] = tensor_partial(model, numbers, batched=True)(place)
    return found


def laplacian(
    model: Callable[[Tensor], Tensor], points: LabelTensor, inputs: Sequence[str], d: Sequence[str] | None = None
) -> Tensor:
    r"""Compute the Laplacian of a model at the points of an equation, in one forward pass.

    $$ \Delta u = \sum_{i \in d} \frac{\partial^2 u}{\partial x_i^2} $$

    Args:
        model: As in `hodiff.doors.pina.partial`.
        points: As in `hodiff.doors.pina.partial`.
        inputs: As in `hodiff.doors.pina.partial`.
        d: Labels of the coordinates that count, as in `pina.operator.laplacian`; None for all.

    Returns:
        The Laplacian (N, k), which can be differentiated in the model's parameters.

    Raises:
        InputError: As by `hodiff.doors.pina.partial`.

    Example:
        >>> import torch
        >>> from pina import LabelTensor
        >>> from hodiff.doors.pina import laplacian
        >>> points = LabelTensor(torch.tensor([[3.0, 2.0]]), ["t", "x"])
        >>> laplacian(lambda p: p[:, :1] ** 3 * p[:, 1:], points, ["x", "t"], d=["x"])
        tensor([[36.]])

    Source: As in `hodiff.laplacian`.
    """
    place = _ordered("laplacian", model, points, inputs)
    if d is None:
        whole: Tensor = tensor_laplacian(model, batched=True)(place)
        return whole
    _require_labels("laplacian", "d", d, inputs)
    units = torch.eye(len(inputs), dtype=place.dtype, device=place.device)[[list(inputs).index(each) for each in d]]
    weighted: Tensor = tensor_laplacian(model, weights=units, batched=True)(place)
    return weighted


def _ordered(caller: str, model: object, points: object, inputs: Sequence[str]) -> Tensor:
    """Return the coordinates of the points in the order of the model's inputs."""
    require_callable(caller, model=model)
    if not isinstance(points, LabelTensor):
        raise InputError(
            f"{caller}: points: expected the LabelTensor that an equation receives, got {type(points).__name__}; for "
            f"other tensors call hodiff.{caller}."
        )
    if sorted(inputs) != sorted(points.labels):
        raise InputError(
            f"{caller}: inputs: expected the labels of the points, {', '.join(points.labels)}, in the order in which "
            f"the model takes them, got {inputs!r}; pass problem.input_variables."
        )
    found: Tensor = points.extract(list(inputs)).tensor
    return found


def _require_labels(caller: str, argument: str, labels: Sequence[str], inputs: Sequence[str]) -> None:
    """Raise unless there are labels, all among the inputs."""
    if not labels or not set(labels) <= set(inputs):
        raise InputError(
            f"{caller}: {argument}: expected labels among {', '.join(inputs)}, at least one, got {list(labels)!r}."
        )
