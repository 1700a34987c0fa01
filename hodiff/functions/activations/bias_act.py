"""A bias and an activation in one Function, which saves less than two separate ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_choice
from hodiff.common.overriding import overridable
from hodiff.functions.activations.gated import GELU, SiLU
from hodiff.functions.activations.gated_derivatives import GELUSlope, SiLUSlope
from hodiff.functions.activations.rectifiers import where_positive
from hodiff.recompute.intermediates import can_forget, forget_between
from hodiff.rules.any_order import AnyOrderFunction
from hodiff.rules.arguments import require_broadcastable, require_floating
from hodiff.rules.elementwise import batch_in_front
from hodiff.rules.nesting import nestable_jvp


@dataclass(frozen=True)
class Activation:
    """An activation of `bias_act`: its value and its derivative."""

    value: Callable[[Tensor], Tensor]
    # Multiplies a tangent or cotangent by the derivative, given the tensor that `reads` names.
    transport: Callable[[Tensor, Any], Tensor]
    # What `transport` reads: "output", "preactivation", or "" for nothing.
    reads: str


ACTIVATIONS = {
    "identity": Activation(lambda z: z, lambda v, _: v, ""),
    "relu": Activation(torch.relu, where_positive, "output"),
    "sigmoid": Activation(torch.sigmoid, lambda v, y: v * (y * (1 - y)), "output"),
    "tanh": Activation(torch.tanh, lambda v, y: v * (1 - y * y), "output"),
    "gelu": Activation(GELU.forward, GELUSlope.scaled, "preactivation"),
    "silu": Activation(SiLU.forward, SiLUSlope.scaled, "preactivation"),
}

# Activations that read the pre-activation.
GATES = {"gelu": GELU.call, "silu": SiLU.call}


class BiasAct(AnyOrderFunction):
    """The Function behind `bias_act`. Saves its output, or its inputs for gelu and silu, and nothing for the identity.

    The pre-activation is never saved, but recomputed from the inputs.
    """

    @staticmethod
    def forward(x: Tensor, b: Tensor, act: str) -> Tensor:
        """Compute $a(x + b)$."""
        return ACTIVATIONS[act].value(x + b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save what the activation's derivative reads."""
        x, b, act = inputs
        reads = ACTIVATIONS[act].reads
        if reads == "output":
            ctx.save_for_backward(output)
        elif reads == "preactivation":
            ctx.save_for_backward(x, b)
        ctx.save_for_forward(x, b)
        ctx.act, ctx.shapes, ctx.shape = act, (x.shape, b.shape), output.shape
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        """Multiply by the activation's derivative, and sum to the shape of each input."""
        if cotangent is None:
            return None, None, None
        activation = ACTIVATIONS[ctx.act]
        read = None
        if activation.reads == "output":
            (read,) = ctx.saved_tensors
        elif activation.reads == "preactivation":
            x, b = ctx.saved_tensors
            read = x + b
        total = activation.transport(cotangent, read)
        needs_x, needs_b, _ = ctx.needs_input_grad
        return (
            total.sum_to_size(ctx.shapes[0]) if needs_x else None,
            total.sum_to_size(ctx.shapes[1]) if needs_b else None,
            None,
        )

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_tangent: Tensor | None, b_tangent: Tensor | None, _: None) -> Tensor:
        """Multiply the sum of the tangents by the activation's derivative."""
        x, b = ctx.saved_tensors
        activation = ACTIVATIONS[ctx.act]
        read = None
        if activation.reads == "output":
            read = BiasAct.call(x, b, ctx.act)
        elif activation.reads == "preactivation":
            read = x + b
        tangents = [each for each in (x_tangent, b_tangent) if each is not None]
        tangent = tangents[0] if len(tangents) == 1 else tangents[0] + tangents[1]
        # Two tangents must not share memory, because functions may change one of them in place.
        tangent = tangent.clone() if len(tangents) == 1 and ctx.act == "identity" else tangent
        return activation.transport(tangent.expand(ctx.shape), read)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, b: Tensor, act: str) -> tuple[Tensor, int]:
        """Apply the elementwise function to the whole batch."""
        x, b = batch_in_front(in_dims[:2], (x, b))
        return BiasAct.call(x, b, act), 0


@overridable
def bias_act(x: Tensor, b: Tensor, act: str = "relu") -> Tensor:
    r"""Add a bias and apply an activation, $a(x + b)$.

    The derivative of relu at 0 is 0. Relu, sigmoid and tanh save the output for backward; gelu and silu save the
    inputs. The pre-activation is never saved.

    Args:
        x: Floating-point tensor of any shape.
        b: Floating-point tensor that broadcasts with `x`; a bias of channels has shape `(channels, 1, 1)`.
        act: `"identity"`, `"relu"`, `"sigmoid"`, `"tanh"`, `"gelu"` or `"silu"`.

    Returns:
        Tensor of the broadcast shape.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> bias_act(torch.zeros(2, 3), torch.tensor([-1.0, 0.0, 1.0]), "relu")
        tensor([[0., 0., 1.],
                [0., 0., 1.]])

    Source: T. Karras et al., "Analyzing and improving the image quality of StyleGAN", 2020, section 2.
    """
    require_floating("bias_act", x=x, b=b)
    require_broadcastable("bias_act", x=x, b=b)
    require_choice("bias_act", "act", act, tuple(ACTIVATIONS))
    if act in GATES and can_forget():
        return forget_between(torch.add, (x, b), GATES[act])
    return BiasAct.call(x, b, act)
