"""States of random number generators, against draws of separate generators with equal seeds."""

import torch

from hodiff.common.randomness import RandomState, drawn_seed, seeded


def test_rewind_repeats_draws_of_all_generators():
    own = torch.Generator().manual_seed(1)
    state = RandomState([torch.ones(2)], [own])
    first = torch.rand(3), torch.rand(3, generator=own)
    state.rewind()
    assert torch.equal(torch.rand(3), first[0])
    assert torch.equal(torch.rand(3, generator=own), first[1])


def test_replay_restores_the_generators_afterwards():
    own = torch.Generator().manual_seed(1)
    state = RandomState([], [own])
    first = torch.rand(3), torch.rand(3, generator=own)
    now = torch.get_rng_state(), own.get_state()
    with state.replayed():
        assert torch.equal(torch.rand(3), first[0])
        assert torch.equal(torch.rand(3, generator=own), first[1])
        torch.rand(50), torch.rand(50, generator=own)
    assert torch.equal(torch.get_rng_state(), now[0])
    assert torch.equal(own.get_state(), now[1])


def test_seeded_context_restores_the_global_state():
    expected = torch.rand(4, generator=torch.Generator().manual_seed(5))
    before = torch.get_rng_state()
    with seeded(5, [torch.ones(1)]):
        assert torch.equal(torch.rand(4), expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_drawn_seed_depends_on_the_generator_only():
    one, other = torch.Generator().manual_seed(2), torch.Generator().manual_seed(2)
    assert [drawn_seed(one), drawn_seed(one)] == [drawn_seed(other), drawn_seed(other)]
    assert drawn_seed(one) != drawn_seed(other.manual_seed(3))
