"""Tests of the losses: torch's definition of cross-entropy, cost, kinks, and error messages."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hodiff.errors import InputError
from hodiff.functions.losses.losses import cross_entropy, hinge, huber
from hodiff.rules import blockwise

C = 5
SHAPES = [(C,), (4, C), (3, C, 2), (2, C, 2, 3)]


def drawn(shape, kind):
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    samples = shape[:0] if len(shape) == 1 else shape[:1] + shape[2:]
    if kind == "probabilities":
        return x, torch.rand(shape, dtype=torch.float64, generator=generator)
    return x, torch.randint(C, samples, generator=generator)


def derivatives(f, x, target):
    """Compute the value, gradient and a product with respect to all differentiable arguments."""
    leaves = [each.clone().requires_grad_() for each in (x, target) if each.is_floating_point()]
    y = f(leaves[0], leaves[1] if len(leaves) > 1 else target)
    total = (y * torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape)).sum()
    gradient = torch.autograd.grad(total + 0.1 * total**2, leaves, create_graph=True)
    directions = [torch.linspace(-1, 1, g.numel(), dtype=g.dtype).reshape(g.shape) for g in gradient]
    return y, *gradient, *torch.autograd.grad(gradient, leaves, directions)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["indices", "ignored", "probabilities"])
@pytest.mark.parametrize("chunk_size", ["auto", 1, None])
def test_cross_entropy_matches_torch(shape, kind, chunk_size):
    x, target = drawn(shape, kind)
    ignore = int(target.flatten()[-1]) if kind == "ignored" and len(shape) > 1 else -100
    weights = torch.linspace(0.5, 2, C, dtype=torch.float64)
    for reduction, weight, smoothing in itertools.product(("mean", "sum", "none"), (None, weights), (0.0, 0.2)):
        options = {
            "reduction": reduction,
            "weight": weight,
            "label_smoothing": smoothing,
            "ignore_index": ignore,
        }
        ours = derivatives(lambda x, t: cross_entropy(x, t, **options, chunk_size=chunk_size), x, target)
        theirs = derivatives(lambda x, t: F.cross_entropy(x, t, **options), x, target)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_no_counted_sample_gives_nan_as_in_torch():
    assert cross_entropy(torch.zeros(2, 3), torch.tensor([-100, -100])).isnan()
    assert cross_entropy(torch.zeros(2, 3), torch.tensor([-100, -100]), reduction="sum") == 0


def test_ignored_samples_may_be_nan():
    x = torch.tensor([[float("nan"), 0.0], [1.0, 2.0]])
    assert cross_entropy(x, torch.tensor([-100, 0])) == cross_entropy(x[1:], torch.tensor([0]))


def test_class_with_zero_probability_and_infinite_logit():
    x = torch.tensor([[-float("inf"), 0.0, 1.0]], dtype=torch.float64, requires_grad=True)
    loss = cross_entropy(x, torch.tensor([[0.0, 0.5, 0.5]], dtype=torch.float64))
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (product,) = torch.autograd.grad(gradient[0, 1], x)
    assert bool(loss.isfinite())
    assert float(gradient[0, 0].detach()) == float(product[0, 0]) == 0


def test_integer_targets_of_any_width_are_accepted():
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([0, 3, 1])
    for dtype in (torch.uint8, torch.int32, torch.int16):
        assert cross_entropy(x, target.to(dtype)) == cross_entropy(x, target)


class LargeResults(TorchDispatchMode):
    """Record operators whose result has at least `size` elements, and the storages of their results."""

    def __init__(self, size):
        super().__init__()
        self.size, self.passes, self.held = size, [], {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() >= self.size and not function.is_view:
            # Keep the result alive, so that its address is not reused.
            self.held[result.untyped_storage().data_ptr()] = result
            if "empty" not in function.name():
                self.passes.append(function.name())
        return result


def product_passes(f):
    """Record the full-size operations of 6 batched products."""
    x = torch.randn(32, 10, requires_grad=True)
    v = torch.randn(6, 32, 10)
    loss = f(x, torch.arange(32) % 10)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with LargeResults(v.numel()) as mode:
        torch.func.vmap(lambda v: torch.autograd.grad(gradient, x, v, retain_graph=True)[0])(v)
    return mode


def test_hvp_takes_two_full_size_results():
    """A product has two operators with a full-size result, and a sum over one of the results between them."""
    ours = product_passes(cross_entropy)
    assert len(ours.passes) == 2, ours.passes
    assert len(ours.held) == 1
    assert len(product_passes(F.cross_entropy).passes) >= 6


def test_probabilities_exist_for_one_chunk_at_a_time(monkeypatch):
    x = torch.randn(64, 32, requires_grad=True)
    target = torch.arange(64) % 32
    v = torch.randn_like(x)

    def large(chunk_size):
        with LargeResults(x.numel()) as mode:
            loss = cross_entropy(x, target, chunk_size=chunk_size)
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            (product,) = torch.autograd.grad(gradient, x, v)
        return len(mode.held), gradient.detach(), product

    count, gradient, product = large(4)
    assert count == 2  # gradient and product
    _, whole_gradient, whole_product = large(None)
    torch.testing.assert_close(gradient, whole_gradient)
    torch.testing.assert_close(product, whole_product)
    monkeypatch.setitem(blockwise.AUTO, "cpu", 4 * 32)
    assert large("auto")[0] == 2


def test_hvp_computes_one_softmax(monkeypatch):
    """A product computes one softmax, of the logits, and none for the derivative by the incoming gradient."""
    calls = []
    original = torch.softmax
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)  # float32 has its own kernel
    (gradient,) = torch.autograd.grad(cross_entropy(x, torch.tensor([0, 1, 2, 0])), x, create_graph=True)
    monkeypatch.setattr(torch, "softmax", lambda *args: calls.append(args) or original(*args))
    torch.autograd.grad(gradient, x, torch.ones_like(x))
    assert len(calls) == 1


def test_batched_gradients_match_torch():
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    basis = torch.eye(12, dtype=torch.float64).reshape(12, 4, 3)
    rows = []
    for f in (cross_entropy, F.cross_entropy):
        (gradient,) = torch.autograd.grad(f(x, torch.tensor([0, 1, 2, 0])), x, create_graph=True)
        rows.append(torch.autograd.grad(gradient, x, basis, is_grads_batched=True)[0])
    torch.testing.assert_close(*rows)


def test_autocast_computes_in_float32():
    x = torch.randn(4, 3, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(x, torch.tensor([0, 1, 2, 0]))
    assert loss.dtype == torch.float32
    assert torch.autograd.grad(loss, x)[0].dtype == torch.bfloat16


def test_huber_matches_torch_and_its_kinks():
    x, t = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for reduction in ("mean", "sum", "none"):
        torch.testing.assert_close(huber(x, t, 0.7, reduction), F.huber_loss(x, t, delta=0.7, reduction=reduction))
    curvature = torch.func.grad(torch.func.grad(lambda x: huber(x, torch.zeros(()), 1.0)))
    assert [float(curvature(torch.tensor(r))) for r in (-1.5, -1.0, 0.0, 1.0, 1.5)] == [0, 1, 1, 1, 0]


def test_hinge_slope_at_its_kink_and_integer_labels():
    slope = torch.func.grad(lambda x: hinge(x, torch.ones(())))
    assert [float(slope(torch.tensor(s))) for s in (0.5, 1.0, 2.0)] == [-1, 0, 0]
    assert hinge(torch.tensor([2.0]), torch.tensor([-1], dtype=torch.int8)) == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cross_entropy(torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64)), r"class indices of shape \(3,\)"),
        (lambda: cross_entropy(torch.zeros(3, 4), torch.zeros(3, 5)), r"probabilities of shape \(3, 4\)"),
        (lambda: cross_entropy(torch.zeros(3, 4), torch.zeros(3, 4).double()), "in float32 as input, got float64"),
        (lambda: cross_entropy(torch.zeros(()), torch.tensor(0)), "input: expected logits"),
        (lambda: cross_entropy(torch.zeros(3), torch.tensor(True)), "got bool"),
        (lambda: cross_entropy(torch.zeros(3), torch.tensor(0), weight=torch.ones(2)), r"weight: .* shape \(3,\)"),
        (lambda: cross_entropy(torch.zeros(3), torch.tensor(0), label_smoothing=1.5), "from 0 to 1, got 1.5"),
        (lambda: cross_entropy(torch.zeros(3), torch.tensor(0), chunk_size=0), "expected an int of 1 or more or None"),
        (lambda: cross_entropy(torch.zeros(3), torch.tensor(0), reduction="avg"), "reduction: expected one of"),
        (lambda: huber(torch.zeros(3), torch.zeros(3, 1)), r"shape \(3,\) of input, got \(3, 1\)"),
        (lambda: huber(torch.zeros(3), torch.zeros(3), 0.0), "positive number, got 0.0"),
        (lambda: huber(torch.zeros(3), torch.zeros(3), torch.ones(2, 1)), "delta: expected a shape that broadcasts"),
        (lambda: hinge(torch.zeros(3), torch.zeros(3, dtype=torch.bool)), "labels -1 and 1, got bool"),
    ],
)
def test_rejects_bad_arguments(call, message):
    with pytest.raises(InputError, match=message):
        call()
