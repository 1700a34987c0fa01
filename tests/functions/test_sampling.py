"""Tests of the distribution, noise and straight-through derivatives of Gumbel-softmax samples."""

import pytest
import torch
from drawing import seeded

from hodiff.errors import InputError
from hodiff.functions.sampling import gumbel_softmax, perturbed_softmax, sample_gumbel


def test_hard_samples_have_softmax_probabilities():
    logits = torch.tensor([0.0, 1.0, -1.0])
    shares = gumbel_softmax(logits.expand(40000, 3), hard=True, generator=seeded()).mean(0)
    torch.testing.assert_close(shares, logits.softmax(0), rtol=0, atol=0.01)


def test_noise_depends_on_the_generator_only():
    logits = torch.randn(4, 3, generator=seeded())
    state = torch.get_rng_state()
    one, same, other = (gumbel_softmax(logits, generator=seeded(s)) for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(one, perturbed_softmax(logits, sample_gumbel(logits, seeded(1))))


def test_hard_samples_have_soft_derivatives():
    logits, noise = torch.randn(2, 2, 4, dtype=torch.float64, generator=seeded())
    weights = torch.arange(4.0, dtype=torch.float64)
    hard = perturbed_softmax(logits, noise, 0.5, hard=True, dim=-1)
    assert torch.equal(hard, torch.nn.functional.one_hot((logits + noise).argmax(-1), 4).double())

    def loss(kind):
        return lambda x, t: (perturbed_softmax(x, noise, t, hard=kind) * weights).sum()

    temperature = torch.tensor(0.5, dtype=torch.float64)
    ours = torch.func.hessian(loss(True), argnums=(0, 1))(logits, temperature)
    theirs = torch.func.hessian(loss(False), argnums=(0, 1))(logits, temperature)
    for a, b in zip(torch.utils._pytree.tree_leaves(ours), torch.utils._pytree.tree_leaves(theirs), strict=True):
        torch.testing.assert_close(a, b)
        assert bool(b.any())


def test_other_dimensions_and_vmap_are_supported():
    logits = torch.randn(3, 4, generator=seeded())
    assert torch.equal(gumbel_softmax(logits, hard=True, dim=0, generator=seeded()).sum(0), torch.ones(4))
    for randomness, equal in (("same", True), ("different", False)):
        batch = torch.func.vmap(gumbel_softmax, randomness=randomness)(torch.zeros(2, 5))
        assert torch.equal(batch[0], batch[1]) is equal


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gumbel_noise_is_finite_with_the_right_mean(dtype):
    noise = sample_gumbel(torch.zeros(100_000, dtype=dtype), seeded())
    assert noise.dtype == dtype
    assert bool(noise.isfinite().all())
    assert abs(float(noise.double().mean()) - 0.5772) < 0.02


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gumbel_softmax(torch.zeros(3), 0.0), "temperature: expected a positive number, got 0.0"),
        (lambda: gumbel_softmax(torch.zeros(2, 3), torch.ones(3)), r"shape that broadcasts to \(2, 1\)"),
        (lambda: gumbel_softmax(torch.zeros(3), generator=0), "expected a torch.Generator or None, got 0"),
        (lambda: gumbel_softmax(torch.zeros(3), dim=1), "dim: expected ints from -1 to 0"),
        (lambda: gumbel_softmax(torch.zeros(())), "expected at least one dimension"),
        (lambda: perturbed_softmax(torch.zeros(3), torch.zeros(2)), r"noise: expected the shape \(3,\)"),
    ],
)
def test_rejects_bad_arguments(call, message):
    with pytest.raises(InputError, match=message):
        call()
