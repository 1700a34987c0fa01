"""Tests of every optimizer with parameters that are frozen, unfrozen, or not used by the loss of a step."""

import copy
import itertools

import pytest
import torch
from optim.table import TABLE, Problem, cross_entropy, same
from torch import nn

import hodiff

D = torch.float64


def cases(wanted=lambda name, case: True):
    kept = {name: case for name, case in TABLE.items() if wanted(name, case)}
    return pytest.mark.parametrize("case", kept.values(), ids=kept)


every = cases()
watching = cases(lambda name, case: case.watches)


class Heads(nn.Module):
    """A body with two heads, of which a loss uses one."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.body, self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(4, 3)
        self.double()
        self.inputs, self.labels = torch.randn(6, 3, dtype=D), torch.arange(6) % 3

    def forward(self, head):
        return getattr(self, head)(self.body(self.inputs).tanh())

    def loss(self, head):
        return cross_entropy(self(head), self.labels)

    def closure(self, case, head):
        if case.pair:
            return lambda: (self(head), lambda outputs: cross_entropy(outputs, self.labels))
        return lambda: self.loss(head)


def numbers(module):
    return [p.detach().clone() for p in module.parameters()]


def with_backward(optimizer, closure, **zeroing):
    def evaluate():
        optimizer.zero_grad(**zeroing)
        loss = closure()
        loss.backward()
        return loss

    return evaluate


@every
def test_closures_do_not_move_frozen_layers(case):
    """No `zero_grad` runs between the steps, so the frozen layer has a gradient of a step before."""
    forms = [lambda optimizer, closure: closure]
    if case.backward:
        forms.append(lambda optimizer, closure: with_backward(optimizer, closure, set_to_none=False))
    for form in forms:
        problem = Problem()
        layer, last = problem.model[0], problem.model[2]
        optimizer = case(problem.model.parameters())
        for batch in problem.batches[:3]:
            optimizer.step(form(optimizer, problem.closure(case, batch)))
        layer.requires_grad_(False)
        before, trained = numbers(layer), numbers(last)
        for batch in problem.batches[3:7]:
            optimizer.step(form(optimizer, problem.closure(case, batch)))
        assert same(numbers(layer), before)
        assert not same(numbers(last), trained)
        assert all(p.grad is None for p in layer.parameters())


@every
def test_layers_may_be_frozen_and_unfrozen(case):
    # Curvature is due at steps 0, 3 and 6.
    spans = [(2, 4), (3, 5), (0, 3), (0, 4)] if case.watches else [(2, 4)]
    for by_closure, (first, last) in itertools.product((False, True) if case.loop else (True,), spans):
        problem = Problem()
        layer = problem.model[0]
        optimizer, moved = case(problem.model.parameters()), []
        for step, batch in enumerate(problem.batches):
            layer.requires_grad_(not first <= step < last)
            before = numbers(layer)
            if by_closure:
                optimizer.step(problem.closure(case, batch))
            else:
                problem.run(case, optimizer, [batch])
            moved.append(not same(numbers(layer), before))
        assert not any(moved[first:last])
        assert any(moved[last:])
        # A line search may end without a step.
        assert all(moved[last + 1 :]) or not case.loop


@watching
@pytest.mark.parametrize(("by_closure", "expected"), [(True, [2, 2]), (False, [1, 2])])
def test_curvature_missed_while_frozen_is_computed_with_the_next_observed_loss(case, by_closure, expected):
    """A closure is observed from its beginning; a backward pass may have begun before the optimizer could wait."""
    problem = Problem()
    layer, found = problem.model[0], []
    optimizer = case(problem.model.parameters())
    for step, batch in enumerate(problem.batches[:7]):
        layer.requires_grad_(not 2 <= step < 5)
        if by_closure:
            optimizer.step(problem.closure(case, batch))
        else:
            problem.run(case, optimizer, [batch])
        found.append(optimizer.state[layer.weight]["refreshes"])
    assert found == [1] * 5 + expected


@cases(lambda name, case: name != "LBFGS")
def test_unused_heads_stay_after_steps_that_used_them(case):
    model = Heads()
    optimizer = case(model.parameters())
    for head in "aab":
        optimizer.step(model.closure(case, head))
    for used, unused in ((model.b, model.a), (model.a, model.b)):
        before, moving = numbers(unused), numbers(used)
        for _ in range(3):
            optimizer.step(model.closure(case, "b" if used is model.b else "a"))
        assert same(numbers(unused), before)
        assert not same(numbers(used), moving)
        assert all(p.grad is None for p in unused.parameters())


@every
def test_a_model_that_is_frozen_whole_is_rejected(case):
    problem = Problem()
    optimizer = case(problem.model.parameters())
    problem.run(case, optimizer, problem.batches[:2])
    problem.model.requires_grad_(False)
    before = problem.numbers()
    with pytest.raises(hodiff.InputError, match=r"got one that depends on no parameter|got frozen ones only"):
        optimizer.step(problem.closure(case, problem.batches[2]))
    assert same(problem.numbers(), before)
    problem.model.requires_grad_(True)
    for batch in problem.batches[3:6]:
        optimizer.step(problem.closure(case, batch))
    assert not same(problem.numbers(), before)


@watching
def test_zero_gradients_without_curvature_wait(case):
    """A head is first used on a step that is not due, and has a zero gradient on the next."""
    model = Heads()
    optimizer, moved = case(model.parameters()), []
    for head in "abaabb":
        optimizer.zero_grad(set_to_none=False)
        model.loss(head).backward()
        before = numbers(model.b)
        optimizer.step()
        moved.append(not same(numbers(model.b), before))
    assert moved == [False] * 4 + [True] * 2


@watching
def test_zero_gradients_without_curvature_wait_for_update_curvature(case):
    model = Heads()
    optimizer = case(model.parameters(), update_every=None)
    optimizer.update_curvature(lambda: model.loss("a"))
    before = numbers(model.b)
    for p in model.b.parameters():
        p.grad = torch.zeros_like(p)
    model.loss("a").backward()
    optimizer.step()
    assert same(numbers(model.b), before)
    model.loss("b").backward()
    with pytest.raises(hodiff.InputError, match="expected curvature for each parameter with a gradient"):
        optimizer.step()


def test_lbfgs_with_a_frozen_layer_matches_torch_without_it():
    problem = Problem()
    optimizer = hodiff.optim.LBFGS(problem.model.parameters(), max_iter=3)
    for frozen in (False, True, False):
        problem.model[0].requires_grad_(not frozen)
        other = problem.copy()
        theirs = torch.optim.LBFGS(
            [p for p in other.model.parameters() if p.requires_grad], max_iter=3, line_search_fn="strong_wolfe"
        )
        for batch in problem.batches[:3]:
            optimizer.step(problem.closure(TABLE["LBFGS"], batch))
            theirs.step(with_backward(theirs, lambda batch=batch: other.loss(batch)))
        torch.testing.assert_close(problem.numbers(), other.numbers(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["LBFGS", "SSBroyden"])
def test_steps_resume_with_a_frozen_first_layer(name):
    case, problem = TABLE[name], Problem()
    problem.model[0].requires_grad_(False)
    optimizer = case(problem.model.parameters())
    problem.run(case, optimizer, problem.batches[:3])
    other = problem.copy()
    loaded = case(other.model.parameters())
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert same(problem.run(case, optimizer, problem.batches[3:5]), other.run(case, loaded, problem.batches[3:5]))


def test_ssbroyden_steps_in_the_parameters_that_the_loss_uses():
    """Until the other head is used, steps are those of an optimizer without it, whose inverse Hessian stays."""
    case, model = TABLE["SSBroyden"], Heads()
    other = copy.deepcopy(model)
    optimizer = case(model.parameters())
    alone = case([*other.body.parameters(), *other.a.parameters()])
    for _ in range(2):
        optimizer.step(model.closure(case, "a"))
        alone.step(other.closure(case, "a"))
    assert same(numbers(model), numbers(other))
    size = sum(p.numel() for p in model.b.parameters())
    state = optimizer.state[model.body.weight]
    ours, theirs = state["inverse_hessian"], alone.state[other.body.weight]["inverse_hessian"]
    assert torch.equal(ours[:-size, :-size], theirs)
    optimizer.step(model.closure(case, "b"))
    block = state["inverse_hessian"][-size:, -size:].clone()
    optimizer.step(model.closure(case, "a"))
    assert torch.equal(state["inverse_hessian"][-size:, -size:], block)
    assert not state["inverse_hessian"][-size:, :-size].any()
    assert torch.linalg.eigvalsh(state["inverse_hessian"]).min() > 0


@pytest.mark.parametrize("make", [hodiff.optim.KFAC, hodiff.optim.EKFAC])
@pytest.mark.parametrize("part", ["weight", "bias"])
def test_blocks_follow_the_trained_parameters_of_a_layer(make, part):
    """After a part of a layer was frozen and unfrozen, steps are those of a new optimizer."""
    problem = Problem()
    options = {"momentum": 0.0, "kl_clip": None, "fisher": "exact", "update_every": 2}
    optimizer = make(problem.model.parameters(), **options)
    frozen = [getattr(problem.model[i], part) for i in (0, 2)]

    def steps(count):
        for batch in problem.batches[:count]:
            optimizer.zero_grad()
            problem.loss(batch).backward()
            optimizer.step()

    steps(2)
    for p in frozen:
        p.requires_grad_(False)
    steps(3)
    for p in frozen:
        p.requires_grad_(True)
    before = [p.detach().clone() for p in frozen]
    steps(1)
    assert same(before, frozen)  # their block was replaced, and the next is due with the next step
    make(problem.model.parameters()).load_state_dict(optimizer.state_dict())
    other = problem.copy()
    new = make(other.model.parameters(), **options)
    for batch in problem.batches[:5]:
        optimizer.step(lambda batch=batch: problem.loss(batch))
        new.step(lambda batch=batch: other.loss(batch))
    torch.testing.assert_close(problem.numbers(), other.numbers(), rtol=1e-10, atol=1e-13)
    assert not same(before, frozen)
