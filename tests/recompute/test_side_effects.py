"""A checkpointed function that stores a tensor outside of itself is rejected if derivatives would be lost."""

import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint as by_torch

import hodiff
from hodiff.errors import InputError
from hodiff.recompute.checkpoint import checkpoint

D = torch.float64


class Leaving(nn.Module):
    """A layer that stores its output, or `keep` of its output, in a given place."""

    def __init__(self, place, keep=lambda h: h):
        super().__init__()
        self.place, self.keep = place, keep
        self.linear = nn.Linear(3, 3, dtype=D)
        self.there, self.listed, self.entries = None, [], {}
        self.before = torch.zeros(3, dtype=D)

    def forward(self, x):
        h = self.linear(x).sin()
        kept = self.keep(h)
        if self.place == "attribute":
            self.there = kept
        elif self.place == "new attribute":
            self.new = kept
        elif self.place == "tensor's place":
            self.before = kept
        elif self.place == "list":
            self.listed.append(kept)
        elif self.place == "pair in an entry":
            self.entries["pair"] = (kept, 1)
        return h


PLACES = ["attribute", "new attribute", "tensor's place", "list", "pair in an entry"]


@pytest.mark.parametrize("run", [checkpoint, hodiff.corrected()(lambda f, x: by_torch(f, x, use_reentrant=False))])
@pytest.mark.parametrize("place", PLACES)
def test_stored_result_that_depends_on_the_input_is_rejected(place, run):
    x = torch.randn(3, dtype=D, requires_grad=True)
    with pytest.raises(InputError, match=r"checkpoint: f: expected f to return all .* return it as well, or store it"):
        run(Leaving(place), x)


@pytest.mark.parametrize("transform", [torch.func.grad, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[1]])
def test_stored_result_inside_transforms_is_rejected(transform):
    x = torch.randn(3, dtype=D)
    with pytest.raises(InputError, match="expected f to return all"):
        transform(lambda x: checkpoint(Leaving("attribute"), x).sum())(x)
    transform(lambda x: checkpoint(Leaving("attribute", torch.ones_like), x).sum())(x)


@pytest.mark.parametrize("keep", [torch.detach, torch.ones_like, lambda h: h.shape], ids=["detached", "mask", "shape"])
@pytest.mark.parametrize("place", PLACES)
def test_stored_constant_is_kept(place, keep):
    x = torch.randn(3, dtype=D, requires_grad=True)
    ours, plain = Leaving(place, keep), Leaving(place, keep)
    plain.load_state_dict(ours.state_dict())
    y = checkpoint(ours, x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x), torch.autograd.grad(plain(x).sum(), x))
    for name in ("there", "listed", "entries", "before"):
        torch.testing.assert_close(getattr(ours, name), getattr(plain, name))


def test_recomputation_does_not_repeat_side_effects():
    """A recomputation does not repeat the side effects of the first run, even if they were undone since."""
    layer = Leaving("list", torch.detach)
    layer.entries = {}

    def f(x):
        layer.entries["seen"] = True
        layer.there = 2.0
        return layer(x)

    x = torch.randn(3, dtype=D, requires_grad=True)
    y = checkpoint(f, x)
    layer.entries.clear()
    layer.there = None
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.autograd.grad(slope.sum(), x)
    assert (layer.entries, layer.there, len(layer.listed)) == ({}, None, 1)


def test_result_stored_in_a_variable_is_rejected():
    left = None
    w = torch.randn(3, dtype=D, requires_grad=True)

    def f(x):
        nonlocal left
        left = w * x
        return left.sin()

    with pytest.raises(InputError, match="expected f to return all"):
        checkpoint(f, torch.randn(3, dtype=D))
    left = None
    assert checkpoint(lambda x: (w * x).sin(), torch.randn(3, dtype=D)).requires_grad


def test_hooks_that_write_weights_are_allowed():
    """Hooks that write weights in every call are allowed, since nothing else reads the weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        layer = nn.utils.weight_norm(nn.Linear(3, 3, dtype=D))
    x = torch.randn(2, 3, dtype=D)
    p = {name: each.detach() + 0.5 for name, each in layer.named_parameters()}
    v = {name: torch.randn_like(each) for name, each in p.items()}

    def loss(p, run):
        return run(lambda x: functional_call(layer, p, (x,)), x).pow(3).sum()

    expected = hodiff.hvp(lambda p: loss(p, lambda f, x: f(x)), p, v)
    for route in hodiff.ROUTES:
        found = hodiff.hvp(lambda p: loss(p, checkpoint), p, v, route=route)
        for name in p:
            torch.testing.assert_close(found[name], expected[name])
