r"""Gradients inside of a function of jets, as in physics-informed networks.

With a scalar s of a series u, $\partial s_K / \partial u_j$ is coefficient $K - j$ of $\nabla s(u)$: one backward pass
from the highest coefficient gives all coefficients of the gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from hodiff.errors import InputError
from hodiff.taylor.jets import Jet, new_jet
from hodiff.taylor.jets_in_arguments import coefficients_of, moves
from hodiff.taylor.registry import RULES, Entry, analytic_rule
from hodiff.taylor.series import Frame, filled


@analytic_rule("requires_grad")
def requires_grad_(frame: Frame, func: Any, x: Any, requires_grad: bool = True) -> Any:
    """Make all coefficients, including zeros, leaves that require gradients."""
    if not requires_grad:
        return x
    frame.recall_nothing()
    return new_jet(frame, [_leaf(filled(frame, x.coefficients, k, x.value)) for k in range(frame.order + 1)])


def _leaf(x: Any) -> Any:
    # The caller's tensor must not change.
    return x.view_as(x) if x.requires_grad else x.detach().clone().requires_grad_()


def _series_of_both(frame: Frame, y: Any, weight: Any) -> tuple[Any, Any]:
    """Return the coefficients of an output and of its weight."""
    ys = coefficients_of(frame, y)
    return ys, coefficients_of(frame, torch.ones_like(ys[0]) if weight is None else weight)


def _requires_grad(x: Any) -> bool:
    return x is not None and bool(x.requires_grad)


def grad(
    frame: Frame,
    func: Any,
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: Any = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Any, ...]:
    """`torch.autograd.grad` of jets with respect to jets and constants."""
    frame.recall_nothing()
    if is_grads_batched:
        raise InputError(
            "jet: is_grads_batched=True is not supported in Taylor mode: compute one gradient after another."
        )
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    inputs = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    weights = grad_outputs if isinstance(grad_outputs, (tuple, list)) else [grad_outputs] * len(outputs)
    pairs = [_series_of_both(frame, y, weight) for y, weight in zip(outputs, weights, strict=True)]
    if not any(_requires_grad(each) for y, _ in pairs for each in y):
        raise InputError(
            "jet: torch.autograd.grad: no output requires a gradient: call x.requires_grad_() before x is used."
        )
    unused, order = allow_unused or materialize_grads, frame.order

    def one(k: int, x: Any, direction: int | None = None) -> Any:
        """Gradient of coefficient k of the weighted sum of outputs; the weights are constant."""
        ys, ws = [], []
        for y, w in pairs:
            for i in range(k + 1):
                left, right = y[i], w[k - i]
                if not _requires_grad(left) or right is None:
                    continue
                if direction is not None:
                    left = left[direction] if frame.has_axis(i) else left
                    right = right[direction] if frame.has_axis(k - i) else right
                elif frame.has_axis(k - i) and not frame.has_axis(i):
                    right = right.sum(0)
                ys.append(left)
                ws.append(right.expand(left.shape))
        if not ys or not _requires_grad(x):
            return None
        return torch.autograd.grad(ys, x, ws, retain_graph=True, create_graph=create_graph, allow_unused=True)[0]

    moving_pairs = [each for y, w in pairs for each in (*y[1:], *w[1:])]
    found = []
    for x in inputs:
        if not moves(frame, x):
            if frame.directions is not None and any(each is not None for each in moving_pairs):
                raise InputError(
                    "jet: torch.autograd.grad: expected a gradient with respect to a jet, since a Laplacian has "
                    "several directions, got one with respect to a constant; use torch.func.grad inside of f, or "
                    "hodiff.hessian."
                )
            parts = [one(k, x) for k in range(order + 1)]
        else:
            if not all(map(_requires_grad, x.coefficients)):
                raise InputError(
                    "jet: torch.autograd.grad: a coefficient of an input requires no gradient: call "
                    "x.requires_grad_() on the jet before it is used, or use torch.func.grad."
                )
            # Directions that are not summed have separate last coefficients.
            parts = [one(order, x.coefficients[order - m]) for m in range(order + 1)]
            if frame.has_axis(order):
                parts[0] = None if parts[0] is None else parts[0][0]
                parts[order] = torch.stack([
                    g if (g := one(order, x.coefficients[0], r)) is not None else torch.zeros_like(x.value)
                    for r in range(frame.directions or 0)
                ])
        if parts[0] is None and not unused:
            raise InputError(
                "jet: one of the inputs of torch.autograd.grad has no part in its outputs; allow_unused=True?"
            )
        value = parts[0] if parts[0] is not None else torch.zeros_like(x.value if isinstance(x, Jet) else x)
        missing = all(part is None for part in parts) and not materialize_grads
        found.append(None if missing else new_jet(frame, [value, *parts[1:]]))
    return tuple(found)


@analytic_rule("backward", "register_hook", "retain_grad", "register_post_accumulate_grad_hook")
def leaves_something(frame: Frame, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise an error for a function that changes tensors or gradients as a side effect."""
    raise InputError(
        f"jet: {getattr(func, '__name__', func)} is not supported for a jet: expected inner gradients by "
        "torch.autograd.grad(..., create_graph=True) or torch.func.grad."
    )


RULES[torch.autograd.backward] = Entry("autograd.backward", leaves_something, analytic=True)
RULES[torch.autograd.grad] = Entry("autograd.grad", grad, analytic=True)
