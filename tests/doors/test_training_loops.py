"""Loops of torch alone, with its tools for training, against the plain loop: compiled models, GradScaler, workers."""

from functools import partial

import pytest
import torch
from doors.training import OPTIMIZERS, assert_same, by_hand, loader, network, warm_up
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import hodiff.optim as ho

each = pytest.mark.parametrize("name", OPTIMIZERS)


def scaled(make, *, accumulate, clip):
    """The loop of torch's page on automatic mixed precision."""
    net = network()
    optimizer = make(net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(2):
        for index, (inputs, labels) in enumerate(loader()):
            scaler.scale(cross_entropy(net(inputs), labels) / accumulate).backward()
            if (index + 1) % accumulate:
                continue
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return net


@pytest.mark.one_in(4)
@each
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradient_scaler(name, accumulate):
    make = OPTIMIZERS[name]
    expected = by_hand(make, accumulate=accumulate, clip=0.05)
    assert_same(scaled(make, accumulate=accumulate, clip=0.05), expected, rtol=1e-7, atol=1e-9)


@pytest.mark.slow
@each
def test_compiled_model(name):
    # Inductor rounds differently, which SOAP amplifies: its basis for directions without gradients is arbitrary.
    torch.compiler.reset()
    net = network()
    by_hand(OPTIMIZERS[name], epochs=1, net=net, wrapped=torch.compile(net, backend="aot_eager"))
    assert_same(net, by_hand(OPTIMIZERS[name], epochs=1), rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [partial(ho.SAM, base=torch.optim.SGD, lr=0.1), ho.LBFGS, partial(ho.NewtonCG, damping=1.0), ho.HessianFree],
    ids=["SAM", "LBFGS", "NewtonCG", "HessianFree"],
)
def test_closure_of_a_compiled_model(make):
    def train(wrap):
        torch.compiler.reset()
        net = network()
        model, optimizer = wrap(net), make(net.parameters())
        for inputs, labels in loader():

            def closure(inputs=inputs, labels=labels):
                if make is ho.HessianFree:
                    return model(inputs), lambda outputs: cross_entropy(outputs, labels)
                return cross_entropy(model(inputs), labels)

            optimizer.step(closure)
        return net

    assert_same(train(partial(torch.compile, backend="aot_eager")), train(lambda net: net), rtol=1e-9, atol=1e-11)


@pytest.mark.one_in(4)
@each
def test_warm_up_and_decay(name):
    """A schedule from torch's classes, against rates set by hand."""
    make = partial(OPTIMIZERS[name], lr=0.02)
    net, other = network(), network()
    optimizer, plain = make(net.parameters()), make(other.parameters())
    parts = [LinearLR(optimizer, 0.25, total_iters=3), CosineAnnealingLR(optimizer, 3)]
    scheduler = SequentialLR(optimizer, parts, milestones=[3])
    rates = [0.02 * part for part in (0.25, 0.5, 0.75, 1.0, 0.75, 0.25)]
    for (inputs, labels), rate in zip(loader(), rates, strict=True):
        plain.param_groups[0]["lr"] = rate
        for one, its in ((net, optimizer), (other, plain)):
            cross_entropy(one(inputs), labels).backward()
            its.step()
            its.zero_grad()
        scheduler.step()
    assert_same(net, other, rtol=1e-9, atol=1e-11)


@pytest.mark.one_in(4)
@each
def test_checkpoint_of_model_optimizer_and_schedule(name, tmp_path):
    def run(epochs, folder=None, saved=False):
        net = network()
        optimizer = OPTIMIZERS[name](net.parameters())
        scheduler = warm_up(optimizer, 10)
        parts = {"net": net, "optimizer": optimizer, "scheduler": scheduler}
        if saved:
            for part, state in torch.load(folder / "state.pt", weights_only=True).items():
                parts[part].load_state_dict(state)
        for _ in range(epochs):
            for inputs, labels in loader():
                optimizer.zero_grad(set_to_none=False)
                cross_entropy(net(inputs), labels).backward()
                optimizer.step()
                scheduler.step()
        if folder is not None and not saved:
            torch.save({part: each.state_dict() for part, each in parts.items()}, folder / "state.pt")
        return net

    run(1, tmp_path)
    assert_same(run(1, tmp_path, saved=True), run(2), rtol=0, atol=0)


@pytest.mark.slow
def test_workers_load_the_same_data():
    def train(**options):
        net = network()
        optimizer = OPTIMIZERS["KFAC"](net.parameters())
        for inputs, labels in loader(**options):
            optimizer.zero_grad()
            cross_entropy(net(inputs), labels).backward()
            optimizer.step()
        return net

    assert_same(train(num_workers=2, persistent_workers=True), train(), rtol=0, atol=0)
