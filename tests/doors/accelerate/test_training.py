"""hodiff's optimizers in Hugging Face accelerate make the steps of a loop written by hand."""

from functools import partial

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from doors.pages import run_example
from doors.training import OPTIMIZERS, assert_same, by_hand, loader, network, warm_up
from torch.nn.functional import cross_entropy

import hodiff.optim as ho


@pytest.fixture(autouse=True)
def _new_state():
    # The states are shared by all accelerators of a process.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Run:
    """Model, optimizer and data as accelerate prepares them."""

    def __init__(self, make, *, net=None, clip=None, warm=False, data=None, **options):
        self.accelerator = accelerate.Accelerator(cpu=True, **options)
        self.net = network() if net is None else net
        optimizer = make(self.net.parameters())
        scheduler = warm_up(optimizer) if warm else None
        self.clip = clip
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            self.net, optimizer, loader() if data is None else data, scheduler
        )

    def epochs(self, count):
        for _ in range(count):
            for inputs, labels in self.loader:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(cross_entropy(self.model(inputs), labels))
                    if self.clip is not None and self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                    self.optimizer.step()
                    if self.scheduler is not None:
                        self.scheduler.step()
                    self.optimizer.zero_grad()
        return self.net


LOOPS = {
    "plain": ({}, {}),
    "warm-up": ({"warm": True}, {"warm": True}),
    "clipped": ({"clip": 0.05}, {"clip": 0.05}),
    "accumulated": ({"gradient_accumulation_steps": 3}, {"accumulate": 3}),
    "accumulated and clipped": ({"gradient_accumulation_steps": 2, "clip": 0.05}, {"accumulate": 2, "clip": 0.05}),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("loop", LOOPS)
def test_steps_are_those_of_the_loop(name, loop):
    options, of_hand = LOOPS[loop]
    net = Run(OPTIMIZERS[name], **options).epochs(2)
    assert_same(net, by_hand(OPTIMIZERS[name], **of_hand), rtol=1e-7, atol=1e-9)
    assert net[0].weight.sub(network()[0].weight).abs().max() > 1e-3


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_saved_and_loaded(name, tmp_path):
    whole = Run(OPTIMIZERS[name], warm=True).epochs(3)
    first = Run(OPTIMIZERS[name], warm=True)
    first.epochs(1)
    first.accelerator.save_state(tmp_path)
    resumed = Run(OPTIMIZERS[name], warm=True)
    resumed.accelerator.load_state(tmp_path)
    assert_same(resumed.epochs(2), whole, rtol=1e-9, atol=1e-11)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bfloat16(name):
    run = Run(OPTIMIZERS[name], net=network().float(), data=loader(torch.float32), mixed_precision="bf16")
    inputs, labels = next(iter(loader(torch.float32)))
    before = cross_entropy(run.net(inputs), labels).item()
    run.epochs(5)
    assert cross_entropy(run.net(inputs), labels).item() < before


def test_workers_load_the_same_data():
    make = OPTIMIZERS["KFAC"]
    assert_same(Run(make, data=loader(num_workers=2)).epochs(1), Run(make).epochs(1), rtol=0, atol=0)


def test_a_closure_passes_through():
    make = partial(ho.SAM, base=torch.optim.SGD, lr=0.1)
    run, net = Run(make), network()
    optimizer = make(net.parameters())
    for inputs, labels in loader():
        run.optimizer.step(lambda inputs=inputs, labels=labels: cross_entropy(run.model(inputs), labels))
        optimizer.step(lambda inputs=inputs, labels=labels: cross_entropy(net(inputs), labels))
    assert_same(run.net, net, rtol=0, atol=0)


def test_example_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    setting = run_example("guides/training_loops.md", "DataLoader(data")
    known = {name: setting[name] for name in ("torch", "hodiff", "model", "loader")}
    names = run_example("guides/training_loops.md", "accelerate.Accelerator(", **known)
    assert names["loss"] < 0.6
    assert (tmp_path / "checkpoint").exists()
