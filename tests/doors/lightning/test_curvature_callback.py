"""Curvature measured by the callback, against a monitor that measures the same network by itself."""

import lightning
import matplotlib as mpl
import pytest
import torch
from doors.training import assert_same, loader, network
from torch.nn.functional import cross_entropy

import hodiff
from hodiff.doors import CurvatureMonitor
from hodiff.doors.lightning import CurvatureCallback


class Classifier(lightning.LightningModule):
    def __init__(self, manual=False):
        super().__init__()
        self.net = network()
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        loss = cross_entropy(self.net(inputs), labels)
        self.log("loss", loss)
        if self.automatic_optimization:
            return {"loss": loss}
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        return None

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def fit(module, *callbacks, **options):
    trainer = lightning.Trainer(
        max_epochs=2,
        callbacks=list(callbacks),
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, loader())
    return trainer


def classes(net, batch):
    return cross_entropy(net(batch[0]), batch[1])


def test_it_measures_the_module_and_leaves_training_alone(tmp_path):
    mpl.use("Agg")
    measures = ["sharpness", "noise"]
    callback = CurvatureCallback(batches=3, every=6, measures=measures, plot=tmp_path / "curvature.png")
    module, alone = Classifier(), Classifier()
    trainer = fit(module, callback)
    plain = fit(alone)
    assert_same(module, alone, rtol=0, atol=0)
    assert trainer.callback_metrics["loss"] == plain.callback_metrics["loss"]
    assert [record.step for record in callback.monitor.history] == [6, 12]
    expected = CurvatureMonitor(module.net, classes, list(loader())[:3], measures=measures, iterations=40).measure(12)
    record = callback.monitor.history[-1]
    assert record.sharpness == pytest.approx(expected.sharpness, rel=1e-3)
    assert record.noise_scale == pytest.approx(expected.noise_scale, rel=1e-9)
    assert trainer.callback_metrics["curvature/sharpness"].item() == pytest.approx(record.sharpness)
    assert (tmp_path / "curvature.png").stat().st_size > 1000


def test_accumulated_batches_are_measured_once_a_step():
    callback = CurvatureCallback(batches=2, every=1)
    fit(Classifier(), callback, accumulate_grad_batches=2)
    assert [record.step for record in callback.monitor.history] == [1, 2, 3, 4, 5, 6]


def test_manual_optimization_needs_a_loss():
    with pytest.raises(hodiff.InputError, match="manual optimization"):
        fit(Classifier(manual=True), CurvatureCallback())
    callback = CurvatureCallback(lambda module, batch: classes(module.net, batch), every=6)
    fit(Classifier(manual=True), callback)
    assert len(callback.monitor.history) == 2


def test_errors_come_at_once():
    with pytest.raises(hodiff.InputError, match="2 or more batches for noise"):
        CurvatureCallback(batches=1, measures=["noise"])
    with pytest.raises(hodiff.InputError, match="every"):
        CurvatureCallback(every=0)
    with pytest.raises(hodiff.InputError, match="loss"):
        CurvatureCallback(3)
