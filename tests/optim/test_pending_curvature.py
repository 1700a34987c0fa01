"""Steps use the curvature of the losses whose gradients are in `grad`, or raise if it is not known."""

from functools import partial

import pytest
import torch
from optim.table import Problem, same
from torch import nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff.optim import EKFAC, KFAC, AdaHessian, SophiaG, SophiaH

D = torch.float64
EXACT = {"probes": "rademacher", "betas": (0.0, 0.0)}
WITH_CURVATURE = pytest.mark.parametrize("make", [AdaHessian, SophiaH, SophiaG, KFAC, EKFAC])


def numbers(value, shape=(2,)):
    return torch.full(shape, value, dtype=D, requires_grad=True)


def curvature(optimizer, parameter):
    return optimizer.state[parameter]["curvature"].tolist()


def test_backward_with_inputs_has_curvature_of_those_inputs():
    for given in (lambda a: [a], lambda a: a, lambda a: [torch.autograd.graph.get_gradient_edge(a)]):
        a, b = numbers(2.0), numbers(2.0)
        optimizer = SophiaH([a, b], **EXACT)
        loss = (a**2 + 100 * b**3).sum()
        loss.backward(inputs=given(a), retain_graph=True)
        (5 * b**2 + 100 * a**3).sum().backward(inputs=[b])
        optimizer.step()
        assert (curvature(optimizer, a), curvature(optimizer, b)) == ([2.0] * 2, [10.0] * 2)
    a, b = numbers(2.0), numbers(2.0)
    optimizer = SophiaH([a, b], **EXACT)
    (a**3 + b**3).sum().backward(inputs=[a])
    optimizer.step()
    assert curvature(optimizer, a) == [12.0] * 2
    assert not optimizer.state[b]


def by_hand(parameter, loss):
    (parameter.grad,) = torch.autograd.grad(loss, [parameter])


OTHER_WAYS = {
    "autograd.grad": by_hand,
    "a given gradient": lambda p, loss: loss.backward(gradient=torch.tensor(2.0, dtype=D)),
    "a vector": lambda p, loss: (loss * torch.ones(2, dtype=D)).backward(torch.ones(2, dtype=D)),
    "a leaf": lambda p, loss: torch.autograd.backward([p], torch.autograd.grad(loss, [p])),
    "the engine": lambda p, loss: torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (torch.ones((), dtype=D),), False, False, (), allow_unreachable=True, accumulate_grad=True
    ),
}


@pytest.mark.parametrize("other_way", OTHER_WAYS.values(), ids=OTHER_WAYS)
def test_unseen_backward_pass_is_rejected_every_time(other_way):
    w = numbers(2.0)
    optimizer = SophiaH([w], update_every=2, **EXACT)
    for step in range(5):
        optimizer.zero_grad()
        if step % 2:
            other_way(w, (50 * w**2).sum())
            optimizer.step()
            continue
        before, state = w.tolist(), str(optimizer.state_dict())
        for seen in (False, True):
            # The backward pass that the optimizer did not intercept is the only one, or follows an intercepted one.
            optimizer.zero_grad()
            if seen:
                (w**2).sum().backward()
            other_way(w, (50 * w**2).sum())
            with pytest.raises(hodiff.InputError, match="expected gradients of losses from"):
                optimizer.step()
        assert (w.tolist(), str(optimizer.state_dict())) == (before, state)
        optimizer.zero_grad()
        (step * w**2).sum().backward()
        optimizer.step()
        assert curvature(optimizer, w) == [2.0 * step] * 2


def test_unseen_backward_after_update_curvature_is_accepted():
    w = numbers(2.0)
    optimizer = SophiaH([w], **EXACT)
    optimizer.update_curvature((w**3).sum())
    by_hand(w, (w**3).sum())
    optimizer.step()
    assert curvature(optimizer, w) == [12.0, 12.0]


def test_gradients_from_before_a_step_are_rejected():
    w = numbers(2.0)
    optimizer = SophiaH([w], update_every=1, **EXACT)
    (w**2).sum().backward()
    optimizer.step()
    (w**2).sum().backward()
    with pytest.raises(hodiff.InputError, match="from before a step"):
        optimizer.step()


def test_parameter_that_lost_its_gradient_loses_its_curvature():
    a, b = numbers(2.0), numbers(2.0)
    optimizer = SophiaH([a, b], **EXACT)
    for forget in (lambda: setattr(a, "grad", None), lambda: a.grad.zero_(), lambda: a.grad.data.zero_()):
        optimizer.zero_grad()
        (100 * a**2 + b**2).sum().backward()
        forget()
        (a**2 + b**2).sum().backward()
        optimizer.step()
        assert (curvature(optimizer, a), curvature(optimizer, b)) == ([2.0] * 2, [4.0] * 2)
        optimizer.param_groups[0]["taken"] = optimizer.state[a]["refresh_at"]
        optimizer._wait()


def test_scaled_gradients_have_scaled_curvature():
    # One gradient has few nonzero elements, and another has none.
    a, b, still = numbers(2.0), numbers(3.0, (2000,)), numbers(0.0)
    optimizer = SophiaH([a, b, still], **EXACT)
    for _ in range(4):
        (a**3).sum().backward()
        (b[:2] ** 3).sum().backward()
        (still**2).sum().backward()
    for p in (a, b, still):
        p.grad /= 4
    (a**3).sum().backward()
    optimizer.step()
    assert curvature(optimizer, a) == [24.0, 24.0]
    assert curvature(optimizer, b)[:3] == [18.0, 18.0, 0.0]
    assert curvature(optimizer, still) == [2.0, 2.0]


def by_torch(gradients):
    found = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.tensor(1 / 1024))


@pytest.mark.parametrize("size", [511, 512, 513])
def test_scaled_gradients_with_few_entries_have_scaled_curvature(size):
    w = numbers(2.0, (size,))
    optimizer = SophiaH([w], **EXACT)
    (w[1] ** 3).backward()
    w.grad /= 4
    optimizer.step()
    assert curvature(optimizer, w)[:3] == [0.0, 3.0, 0.0]


# Writes that do not change the version of a gradient.
UNCOUNTED = {
    "data": lambda gradients: [each.data.mul_(1 / 1024) for each in gradients],
    "NumPy": lambda gradients: [each.numpy().__imul__(1 / 1024) for each in gradients],
    "unscaling": by_torch,
}


@pytest.mark.parametrize("unscale", UNCOUNTED.values(), ids=UNCOUNTED)
def test_gradients_scaled_without_a_version_change_are_detected(unscale):
    c, start = torch.tensor([1.0, 2.0, 3.0], dtype=D), torch.tensor([1.0, -2.0, 0.5], dtype=D)
    w, still = start.clone().requires_grad_(), numbers(0.0)
    optimizer = SophiaH([w, still], update_every=1, **EXACT)
    for times in (1, 2):
        optimizer.zero_grad()
        with torch.no_grad():
            w.copy_(start)
        for _ in range(times):
            (1024 * (c * w**4).sum() + 1024 * (still**2).sum()).backward()
        version = w.grad._version
        unscale([w.grad, still.grad])
        assert w.grad._version == version
        optimizer.step()
        # The second derivatives are 12 c w^2 and 2.
        torch.testing.assert_close(optimizer.state[w]["curvature"], times * 12 * c * start**2)
        assert curvature(optimizer, still) == [2.0 * times] * 2


@WITH_CURVATURE
def test_unscaled_gradients_without_scaler_step_match(make):
    found = []
    for scaler in (torch.amp.GradScaler("cpu", init_scale=1024.0), torch.amp.GradScaler("cpu", enabled=False)):
        problem = Problem(count=4)
        optimizer = make(problem.model.parameters(), lr=0.05, update_every=2)
        for batch in problem.batches:
            optimizer.zero_grad()
            scaler.scale(problem.loss(batch)).backward()
            scaler.unscale_(optimizer)
            optimizer.step()
            scaler.update()
        found.append(problem.numbers())
    torch.testing.assert_close(*found, rtol=1e-12, atol=0)


def test_negated_gradients_have_negated_curvature():
    w, model = numbers(2.0), nn.Linear(2, 3)
    optimizer, other = SophiaH([w], **EXACT), SophiaG(model.parameters(), betas=(0.0, 0.0))
    (w**2).sum().backward()
    w.grad.neg_()
    optimizer.step()
    assert curvature(optimizer, w) == [-2.0, -2.0]
    nn.functional.cross_entropy(model(torch.randn(4, 2)), torch.arange(4) % 3).backward()
    for p in model.parameters():
        p.grad.mul_(-1)
    other.step()
    assert all(state["curvature"].min() >= 0 for state in other.state.values())


def test_other_in_place_changes_keep_the_curvature():
    """Changing the gradient in place keeps the curvature of the loss."""
    w = torch.tensor([1.0, 2.0, 3.0], dtype=D, requires_grad=True)
    changes = [
        lambda: nn.utils.clip_grad_value_([w], 5.0),
        lambda: w.grad.mul_(torch.tensor([1.0, 0.0, 1.0])),
        lambda: w.grad.add_(torch.randn(3, dtype=D)),
        lambda: w.grad.zero_(),
        lambda: w.grad.mul_(0),
        lambda: SGD([w]).zero_grad(set_to_none=False),
    ]
    for change in changes:
        optimizer = SophiaH([w], lr=0.0, **EXACT)
        optimizer.zero_grad()
        (w**3).sum().backward()
        change()
        optimizer.step()
        assert curvature(optimizer, w) == [6.0, 12.0, 18.0]


ZEROING = {
    "optimizer": lambda w, optimizer: optimizer.zero_grad(set_to_none=False),
    "None": lambda w, _: setattr(w, "grad", None),
    "zero_": lambda w, _: w.grad.zero_(),
    "factor": lambda w, _: w.grad.mul_(0),
    "data": lambda w, _: w.grad.data.zero_(),
    "numpy": lambda w, _: w.grad.numpy().fill(0),
}


@pytest.mark.parametrize("zero", ZEROING.values(), ids=ZEROING)
def test_curvature_of_gradients_zeroed_before_another_pass_is_discarded(zero):
    w = torch.tensor([1.0, 2.0, 3.0], dtype=D, requires_grad=True)
    optimizer = SophiaH([w], lr=0.0, **EXACT)
    (w**3).sum().backward()
    zero(w, optimizer)
    (2 * w**2).sum().backward()
    optimizer.step()
    assert curvature(optimizer, w) == [4.0] * 3


def scaled_run(make, scaler, clip):
    problem = Problem(count=4)
    optimizer = make(problem.model.parameters(), lr=0.05, update_every=2)
    for batch in problem.batches:
        optimizer.zero_grad()
        scaler.scale(problem.loss(batch)).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            clip(problem.model.parameters())
        scaler.step(optimizer)
        scaler.update()
    return problem.numbers()


@WITH_CURVATURE
def test_clipped_gradients_of_scaled_losses_match(make):
    """Clipped gradients of scaled losses give the same steps as without a scaler."""
    clips = [lambda p: None, lambda p: nn.utils.clip_grad_norm_(p, 0.1)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0), torch.amp.GradScaler("cpu", enabled=False)]
    for clip in clips:
        ours, theirs = (scaled_run(make, scaler, clip) for scaler in scalers)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    assert not same(ours, scaled_run(make, scalers[0], None))


def test_clipping_that_hides_the_scale_is_rejected():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with pytest.raises(hodiff.InputError, match="expected gradients of losses from"):
        scaled_run(SophiaH, scaler, lambda p: nn.utils.clip_grad_value_(p, 1e-2))


def test_backward_inside_backward_is_rejected():
    w = numbers(0.5)
    x = torch.ones(2, dtype=D, requires_grad=True)
    optimizer = SophiaH([w], **EXACT)
    checkpoint(lambda x: (x * w).sin().sum(), x, use_reentrant=True).backward(inputs=None)
    with pytest.raises(hodiff.InputError, match="expected gradients of losses from"):
        optimizer.step()


def test_gradient_of_one_parameter_of_a_block_is_rejected():
    model = nn.Linear(3, 2)
    optimizer = KFAC(model.parameters())
    nn.functional.mse_loss(model(torch.randn(4, 3)), torch.zeros(4, 2)).backward(inputs=[model.weight])
    with pytest.raises(hodiff.InputError, match="expected gradients of losses from"):
        optimizer.step()
    model.zero_grad()
    nn.functional.mse_loss(model(torch.randn(4, 3)), torch.zeros(4, 2)).backward()
    optimizer.step()


@pytest.mark.parametrize("make", [KFAC, EKFAC])
@pytest.mark.parametrize("autocast", [False, True])
def test_weight_used_outside_its_layer_later_is_rejected(make, autocast):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = make(model.parameters(), update_every=2)
    inputs, targets = torch.randn(8, 3), torch.randn(8, 4)
    for step in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs = model(inputs)
            if step == 4:
                outputs = outputs @ model[2].weight
        loss = nn.functional.mse_loss(outputs.float(), targets)
        if step < 4:
            loss.backward()
            optimizer.step()
        else:
            with pytest.raises(hodiff.InputError, match="by calls of their layers"):
                loss.backward()


@WITH_CURVATURE
def test_hooks_are_removed_with_the_optimizer(make):
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters(), update_every=2)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(4, 3)), torch.arange(4) % 2).backward()
        optimizer.step()
        assert len(model.weight._post_accumulate_grad_hooks) == 1
    del optimizer
    assert not model.weight._post_accumulate_grad_hooks


def test_steps_inside_the_backward_pass_match():
    ws = [numbers(1.0), numbers(3.0)]
    optimizers = {w: SophiaH([w], lr=0.1, update_every=2, **EXACT) for w in ws}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for w in ws:
        w.register_post_accumulate_grad_hook(step)
    for i in range(5):
        before = ws[0].detach().clone()
        (ws[0] ** 3 + ws[1] ** 2).sum().backward()
        if i % 2 == 0:
            found = [optimizers[w].state[w]["curvature"] for w in ws]
            torch.testing.assert_close(found, [6 * before, torch.full((2,), 2.0, dtype=D)])
    assert ws[1].tolist() == pytest.approx([2.5, 2.5])


@pytest.mark.parametrize("make", [AdaHessian, SophiaH])
def test_parameters_that_a_loss_does_not_use_keep_their_curvature(make):
    """`update_curvature` and `step` with a closure agree."""
    states = []
    for by_update in (True, False):
        a, b = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
        optimizer = make([a, b], betas=(0.9, 0.5), update_every=None if by_update else 1)
        for i in range(3):
            loss = partial(lambda first: (a**2).sum() + ((b**2).sum() if first else 0), i == 0)
            if by_update:
                optimizer.update_curvature(loss())
            else:
                optimizer.step(loss)
        states.append({name: optimizer.state[b][name] for name in optimizer.state[b] if "curvature" in name})
    assert states[0] == states[1]


@pytest.mark.parametrize("make", [KFAC, EKFAC])
def test_layers_that_a_loss_does_not_use_may_stay_unused(make):
    heads = torch.nn.ModuleList([torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)])
    optimizer = make(heads.parameters(), update_every=None)
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    for i in (0, 0, 1, 0):
        optimizer.update_curvature(torch.nn.functional.cross_entropy(heads[i](x), y))
