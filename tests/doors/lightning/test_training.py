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
    def __init__(self, make, *, manual=False, warm=False, closure=None):
        super().__init__()
        self.net, self.make, self.warm, self.closure = network(), make, warm, closure
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
        if self.closure is not None:
            self.losses.append(float(optimizer.step(closure=lambda: self.closure(self.net, *batch))))
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


class Normalized(Classifier):
    """A classifier with batch norm, whose statistics the averaging computes in a last pass without backward passes."""

    def __init__(self, make):
        super().__init__(make)
        self.net.insert(1, torch.nn.BatchNorm1d(self.net[0].out_features, dtype=torch.float64))
        self.averaged = []

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.current_epoch == 3:
            self.averaged.append([p.detach().clone() for p in self.net.parameters()])


AVERAGED = OPTIMIZERS | {
    "SAM": partial(ho.SAM, base=torch.optim.SGD, lr=0.1),
    "LBFGS": partial(ho.LBFGS, lr=0.1, max_iter=2),
    "SSBroyden": partial(ho.SSBroyden, max_iter=2),
    "Muon": partial(ho.Muon, lr=0.01),
}


@pytest.mark.parametrize("name", AVERAGED)
def test_averaged_weights_stay_while_batch_norm_is_updated(name):
    callback = lightning.pytorch.callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    module = Normalized(AVERAGED[name])
    trainer(max_epochs=3, callbacks=[callback]).fit(module, loader())
    assert len(module.averaged) == module.net[1].num_batches_tracked == len(loader())
    for weight, averaged in zip(module.net.parameters(), module.averaged[0], strict=True):
        assert torch.equal(weight, averaged)


def value(net, inputs, labels):
    return cross_entropy(net(inputs), labels)


def pair(net, inputs, labels):
    return net(inputs), lambda outputs: cross_entropy(outputs, labels)


SOLVERS = {
    "NewtonCG": (partial(ho.NewtonCG, damping=1.0, cg_iterations=5), value),
    "LayerwiseGaussNewton": (partial(ho.LayerwiseGaussNewton, cg_iterations=5), pair),
    "HessianFree": (partial(ho.HessianFree, cg_iterations=5), pair),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_closures_by_manual_optimization(name):
    make, closure = SOLVERS[name]
    module, made = Classifier(make, manual=True, closure=closure), trainer(max_epochs=5, max_steps=8)
    made.fit(module, loader())
    net = network()
    optimizer = make(net.parameters())
    losses = [
        float(optimizer.step(lambda inputs=inputs, labels=labels: closure(net, inputs, labels)))
        for inputs, labels in [*loader(), *loader()][:8]
    ]
    assert made.global_step == 8
    assert module.losses == pytest.approx(losses)
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
