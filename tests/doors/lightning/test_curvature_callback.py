"""Curvature measured by the callback, against a monitor that measures the same network by itself."""

import csv
import sys

import lightning
import matplotlib as mpl
import pytest
import torch
import torchmetrics
from doors.training import assert_same, loader, network
from lightning.pytorch.loggers import CSVLogger
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
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"logger": False, **options},
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


class Counting(Classifier):
    """Its training step has a metric, a buffer, counters and random numbers, and names the index in its own way."""

    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.mean = torchmetrics.MeanMetric()
        self.scores = torchmetrics.CatMetric()
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))
        self.calls, self.seen, self.largest = 0, [], torch.zeros(3)

    def training_step(self, batch, i):
        inputs, labels = batch
        outputs = self.net(inputs + 0.1 * torch.randn_like(inputs))
        loss = cross_entropy(outputs, labels)
        self.calls += 1
        self.seen.append(i)
        self.total += loss.detach()
        self.largest[i % 3] += 1
        self.mean(loss.detach())
        self.scores(outputs.detach()[:1, 0])
        self.log("accuracy", self.accuracy(outputs, labels))
        self.log("epoch", self.accuracy, on_epoch=True, on_step=False)
        return loss


def test_what_a_training_step_counts_is_not_counted_twice():
    callback = CurvatureCallback(batches=3, every=3, measures=["sharpness", "noise"], iterations=40)
    module, alone = Counting(), Counting()
    torch.manual_seed(0)
    trainer = fit(module, callback)
    drawn = torch.get_rng_state()
    torch.manual_seed(0)
    plain = fit(alone)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert_same(module, alone, rtol=0, atol=0)
    for metric in ("accuracy", "epoch"):
        assert trainer.callback_metrics[metric] == plain.callback_metrics[metric]
    assert (module.calls, module.seen, module.total) == (alone.calls, alone.seen, alone.total)
    assert torch.equal(module.largest, alone.largest)
    for one, other in ((module.mean, alone.mean), (module.scores, alone.scores)):
        assert torch.equal(one.compute(), other.compute())
    # The random numbers stay the same within a measurement: otherwise Lanczos would not converge.
    for record in callback.monitor.history:
        assert record.residual < 0.02 * record.sharpness


def test_a_second_fit_measures_its_own_module_and_batches():
    callback = CurvatureCallback(batches=2, every=6)
    fit(Classifier(), callback)
    module = Classifier()
    module.net[0].weight.data.mul_(2)
    trainer = fit(module, callback)
    assert [record.step for record in callback.monitor.history] == [6, 12]
    expected = CurvatureMonitor(module.net, classes, list(loader())[:2], iterations=40).measure(12)
    assert callback.monitor.history[-1].sharpness == pytest.approx(expected.sharpness, rel=1e-3)
    last = trainer.callback_metrics["curvature/sharpness"].item()
    assert last == pytest.approx(callback.monitor.history[-1].sharpness)


@pytest.mark.parametrize(("every", "log_every"), [(5, 50), (2, 3)])
def test_loggers_have_each_measurement_once_at_its_step(every, log_every, tmp_path):
    callback = CurvatureCallback(batches=2, every=every)
    fit(Classifier(), callback, logger=CSVLogger(tmp_path), log_every_n_steps=log_every)
    (path,) = tmp_path.glob("**/metrics.csv")
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row["curvature/sharpness"]]
    logged = [(int(row["step"]), float(row["curvature/sharpness"])) for row in rows]
    assert logged == [(record.step, record.sharpness) for record in callback.monitor.history]


class Interrupted(Classifier):
    def training_step(self, batch, batch_idx):
        if self.global_step == 8:
            raise KeyError("of the step")
        return super().training_step(batch, batch_idx)


def test_the_plot_is_checked_before_training_and_saved_after_an_exception(tmp_path, monkeypatch):
    mpl.use("Agg")
    callback = CurvatureCallback(batches=2, every=4, plot=tmp_path / "curvature.png")
    with pytest.raises(KeyError, match="of the step"):
        fit(Interrupted(), callback)
    assert (tmp_path / "curvature.png").stat().st_size > 1000
    with pytest.raises(hodiff.InputError, match="CurvatureCallback: plot: expected a file in an existing folder"):
        CurvatureCallback(plot=tmp_path / "missing" / "curvature.png")
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(hodiff.HodiffError, match=r"CurvatureCallback: plot: needs matplotlib.*hodiff\[plot\]"):
        CurvatureCallback(plot=tmp_path / "curvature.png")


class Averaging(Classifier):
    """Its training step updates an average of the weights."""

    def __init__(self):
        super().__init__()
        self.teacher = network().requires_grad_(False)

    def training_step(self, batch, batch_idx):
        for average, weight in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            average.data.lerp_(weight.detach(), 0.1)
        return super().training_step(batch, batch_idx)


def test_a_training_step_that_writes_to_parameters_is_refused():
    with pytest.raises(hodiff.InputError, match="CurvatureMonitor: loss: expected a function that leaves parameters"):
        fit(Averaging(), CurvatureCallback(batches=2, every=2))
    fit(Averaging(), CurvatureCallback(lambda module, batch: classes(module.net, batch), batches=2, every=2))
