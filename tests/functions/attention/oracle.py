"""Reference attention by torch primitives, and derivatives by every route, for the tests of the kernels."""

import math

import torch

ROUTES = ("value", "tangent", "gradient", "reverse over reverse", "forward over reverse", "reverse over forward")


def normal(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def by_primitives(
    q, k, v, mask=None, *, is_causal=False, window=(None, None), corner="upper-left", softcap=None, keep=1.0
):
    """Compute attention from its definition with whole matrices; dropout multiplies the weights by `keep`."""
    rows, keys = q.shape[-2], k.shape[-2]
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    place = torch.arange(rows)[:, None] + (keys - rows if corner == "lower-right" else 0)
    distance = torch.arange(keys) - place
    visible = torch.ones(rows, keys, dtype=torch.bool) if mask is None or mask.dtype != torch.bool else mask
    visible = visible & (distance <= 0) if is_causal else visible
    visible = visible if window[0] is None else visible & (distance >= -window[0])
    visible = visible if window[1] is None else visible & (distance <= window[1])
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask
        visible = visible & (mask != -math.inf)
    seen = visible.expand(scores.shape).any(-1, keepdim=True)
    scores = scores.masked_fill(~visible, -math.inf).masked_fill(~seen, 0.0)
    return (torch.softmax(scores, -1).masked_fill(~seen, 0.0) * keep) @ v


def derivatives(f, inputs, directions, cotangent):
    """Compute the derivatives by all ROUTES of a loss that is nonlinear in the output of `f`."""

    def loss(*x):
        y = f(*x)
        return (y * cotangent).sum() + y.square().sum()

    everywhere = tuple(range(len(inputs)))
    gradient = torch.func.grad(loss, everywhere)
    leaves = [x.clone().requires_grad_() for x in inputs]
    first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    inner = sum((a * b).sum() for a, b in zip(first, directions, strict=True))
    slope = torch.func.jvp(loss, inputs, directions)[1]
    return {
        "value": (f(*inputs),),
        "tangent": (torch.func.jvp(f, inputs, directions)[1], slope),
        "gradient": gradient(*inputs),
        "reverse over reverse": torch.autograd.grad(inner, leaves),
        "forward over reverse": torch.func.jvp(gradient, inputs, directions)[1],
        "reverse over forward": torch.func.grad(lambda *x: torch.func.jvp(loss, x, directions)[1], everywhere)(*inputs),
    }


def assert_close(found, expected, tolerance):
    assert found.keys() == expected.keys() == set(ROUTES)
    for name, tensors in found.items():
        for a, b in zip(tensors, expected[name], strict=True):
            scale = max(1.0, float(b.detach().abs().max())) if b.numel() else 1.0
            torch.testing.assert_close(a.double(), b, rtol=0, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}")
