"""Values and derivatives of a Function by `torch.autograd` and `torch.func` alone, independently of `check`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

BATCH = 3


def behaviour(function: type[torch.autograd.Function], inputs: tuple[Any, ...]) -> dict[str, Any]:
    """Compute values, gradients, tangents, batches and arguments: lists of tensors, or an exception's name."""
    places = [i for i, each in enumerate(inputs) if isinstance(each, Tensor)]
    point = [inputs[i].clone() for i in places]
    generator = torch.Generator().manual_seed(1)
    vectors = [torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in point]

    def call(*tensors: Tensor) -> Tensor:
        filled = list(inputs)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        output = function.apply(*filled)
        return output[0] if isinstance(output, tuple) else output

    given = [*point, *vectors]
    originals = [each.clone() for each in given]

    def attempt(part: Callable[[], list[Tensor]]) -> Any:
        """Return the part's tensors and all arguments, or the exception's name; then restore the arguments."""
        try:
            return [each.detach().clone() for each in (*part(), *given)]
        except Exception as error:
            return type(error).__name__
        finally:
            for each, original in zip(given, originals, strict=True):
                each.copy_(original)

    values = attempt(lambda: [call(*point)])
    if isinstance(values, str):
        return {"values": values}
    weights = torch.randn(values[0].shape, generator=generator, dtype=torch.float64)
    along = tuple(range(len(point)))

    def loss(*tensors: Tensor) -> Tensor:
        y = call(*tensors)
        return (weights * y + 0.5 * weights.roll(1) * y * y).sum()

    def bent(*tensors: Tensor) -> Tensor:
        """Evaluate the loss at curved functions of the inputs, so that tangents depend on the inputs."""
        return loss(*(x + 0.1 * (x - start) ** 2 for x, start in zip(tensors, point, strict=True)))

    def bent_pushed(*tensors: Tensor) -> Tensor:
        return jvp(bent, tensors, tuple(vectors))[1]

    def slope(*tensors: Tensor) -> Tensor:
        return sum((g * v).sum() for g, v in zip(grad(loss, along)(*tensors), vectors, strict=True))

    def pushed(*tensors: Tensor) -> Tensor:
        return jvp(loss, tensors, tuple(vectors))[1]

    seen: dict[str, Callable[[], list[Tensor]]] = {
        "values": lambda: values,
        "left over": lambda: _left_over(call, point, weights),
        "gradient": lambda: list(grad(loss, along)(*point)),
        "tangent": lambda: [jvp(call, tuple(point), tuple(vectors))[1]],
        "tangents alone": lambda: [jvp(_only(call, point, i), (point[i],), (vectors[i],))[1] for i in along],
        "reverse-reverse": lambda: list(grad(slope, along)(*point)),
        "forward-reverse": lambda: [jvp(slope, tuple(point), tuple(vectors))[1]],
        "reverse-forward": lambda: list(grad(pushed, along)(*point)),
        "forward-forward": lambda: [jvp(pushed, tuple(point), tuple(vectors))[1]],
        "bent reverse-forward": lambda: list(grad(bent_pushed, along)(*point)),
        "bent forward-forward": lambda: [jvp(bent_pushed, tuple(point), tuple(vectors))[1]],
        "third": lambda: list(
            grad(lambda *t: jvp(slope, t, tuple(vectors))[1], along)(*point),
        ),
        "batches": lambda: _batches(call, point),
        "batched gradients": lambda: list(vmap(grad(loss, along))(*(torch.stack([x, 1.01 * x]) for x in point))),
    }
    return {name: attempt(part) for name, part in seen.items()}


def _only(call: Callable[..., Tensor], point: list[Tensor], i: int) -> Callable[[Tensor], Tensor]:
    return lambda x: call(*(x if j == i else other for j, other in enumerate(point)))


def _left_over(call: Callable[..., Tensor], point: list[Tensor], weights: Tensor) -> list[Tensor]:
    """Run reverse mode twice, for all inputs and for each input alone; return gradients and all tensors involved."""
    found = []
    for chosen in [tuple(range(len(point))), *((i,) for i in range(len(point)) if len(point) > 1)]:
        leaves = [x.clone().requires_grad_(i in chosen) for i, x in enumerate(point)]
        cotangent = weights.clone()
        output = call(*leaves)
        for _ in range(2):
            found += torch.autograd.grad(output, [leaves[i] for i in chosen], cotangent, retain_graph=True)
        found += [cotangent, output, *leaves]
    return [each.detach().clone() for each in found]


def _batches(call: Callable[..., Tensor], point: list[Tensor]) -> list[Tensor]:
    """Compute batches along the first and the last dimension, and with one batched argument at a time."""
    generator = torch.Generator().manual_seed(2)
    batches = [
        torch.stack([x * (1 + 0.01 * torch.randn(x.shape, generator=generator, dtype=x.dtype)) for _ in range(BATCH)])
        for x in point
    ]
    count = len(point)
    found = [vmap(call)(*batches), vmap(call, in_dims=-1)(*(x.movedim(0, -1) for x in batches))]
    for i in range(count if count > 1 else 0):
        in_dims = tuple(0 if i == j else None for j in range(count))
        found.append(vmap(call, in_dims=in_dims)(*(batches[j] if i == j else point[j] for j in range(count))))
    return found
