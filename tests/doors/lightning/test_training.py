"""hodiff's optimizers in PyTorch Lightning make the steps of a loop written by hand."""

from functools import partial

import lightning
import pytest
import torch
from doors.pages import run_example
from doors.training import OPTIMIZERS, assert_same, by_hand, loader, network, warm_up
from torch.nn.functional import cross_entropy

import hodiff
import hodiff.optim as ho


class Classifier(lightning.LightningModule):
    def __init__(self, make, *, manual=False, warm=False, by_closure=False):
        super().__init__()
        self.net, self.make, self.warm, self.by_closure = network(), make, warm, by_closure
        self.automatic_optimization = not manual
        self.losses = []

    def loss(self, batch):
        inputs, labels = batch
        return cross_entropy(self.net(inputs), labels)

    def training_step(self, batch, batch_idx):
        if self.automatic_optimization:
            loss = self.loss(batch)
            self.log("loss", loss)
            return loss
        optimizer = self.optimizers()
        if self.by_closure:
            self.losses.append(float(optimizer.optimizer.step(lambda: self.loss(batch))))
            return None
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        if self.warm:
            self.lr_schedulers().step()
        return None

    def configure_optimizers(self):
        optimizer = self.make(self.net.parameters())
        if not self.warm:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": warm_up(optimizer), "interval": "step"},
        }


def trainer(**options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return lightning.Trainer(**({"max_epochs": 2, "enable_checkpointing": False} | quiet | options))


LOOPS = {
    "plain": ({}, {}, {}),
    "warm-up": ({"warm": True}, {}, {"warm": True}),
    "clipped": ({}, {"gradient_clip_val": 0.05}, {"clip": 0.05}),
    "accumulated": ({}, {"accumulate_grad_batches": 3}, {"accumulate": 3}),
    "manual": ({"manual": True}, {}, {}),
    "manual, warm-up": ({"manual": True, "warm": True}, {}, {"warm": True}),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("loop", LOOPS)
def test_steps_are_those_of_the_loop(name, loop):
    of_module, of_trainer, of_hand = LOOPS[loop]
    module = Classifier(OPTIMIZERS[name], **of_module)
    trainer(**of_trainer).fit(module, loader())
    assert_same(module.net, by_hand(OPTIMIZERS[name], **of_hand), rtol=1e-7, atol=1e-9)
    assert module.net[0].weight.sub(network()[0].weight).abs().max() > 1e-3


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumed_from_a_checkpoint(name, tmp_path):
    whole = Classifier(OPTIMIZERS[name], warm=True)
    trainer(max_epochs=3).fit(whole, loader())
    first = trainer(max_epochs=1)
    first.fit(Classifier(OPTIMIZERS[name], warm=True), loader())
    first.save_checkpoint(tmp_path / "first.ckpt")
    resumed = Classifier(OPTIMIZERS[name], warm=True)
    trainer(max_epochs=3).fit(resumed, loader(), ckpt_path=tmp_path / "first.ckpt")
    assert_same(resumed.net, whole.net, rtol=1e-9, atol=1e-11)


def test_several_points_by_automatic_optimization():
    make = partial(ho.SAM, base=torch.optim.SGD, lr=0.1)
    module = Classifier(make)
    trainer().fit(module, loader())
    net = network()
    optimizer = make(net.parameters())
    for _ in range(2):
        for inputs, labels in loader():
            optimizer.step(lambda inputs=inputs, labels=labels: cross_entropy(net(inputs), labels))
    assert_same(module.net, net)


def test_several_points_refuse_accumulated_batches():
    module = Classifier(partial(ho.SAM, base=torch.optim.SGD, lr=0.1))
    with pytest.raises(hodiff.InputError, match="one that adds to gradients"):
        trainer(accumulate_grad_batches=2).fit(module, loader())


def test_newton_by_manual_optimization():
    make = partial(ho.NewtonCG, damping=1.0)
    module = Classifier(make, manual=True, by_closure=True)
    trainer().fit(module, loader())
    net = network()
    optimizer = make(net.parameters())
    for _ in range(2):
        for inputs, labels in loader():
            optimizer.step(lambda inputs=inputs, labels=labels: cross_entropy(net(inputs), labels))
    assert_same(module.net, net)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bfloat16(name):
    module = Classifier(OPTIMIZERS[name])
    module.net.float()
    batch = next(iter(loader(torch.float32)))
    before = module.loss(batch).item()
    trainer(precision="bf16-mixed", max_epochs=5).fit(module, loader(torch.float32))
    assert module.loss(batch).item() < before


def test_example_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    setting = run_example("guides/training_loops.md", "DataLoader(data")
    known = {name: setting[name] for name in ("torch", "hodiff", "model", "loader")}
    names = run_example("guides/training_loops.md", "trainer.fit(Classifier(model), loader)", **known)
    assert names["trainer"].callback_metrics["loss"] < 0.6
