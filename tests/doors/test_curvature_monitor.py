"""Curvature during training: against dense Hessians of `torch.func`, closed forms, and counted operations."""

from itertools import pairwise

import matplotlib as mpl
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.flop_counter import FlopCounterMode

import hodiff
from hodiff.doors import CurvatureMonitor

ALL = ("sharpness", "eigenvalues", "spectrum", "noise")


def classes(model, batch):
    inputs, labels = batch
    return cross_entropy(model(inputs), labels)


def network(*widths):
    layers = [each for a, b in pairwise(widths) for each in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def draw_batches(width, lengths, classes=3):
    return [(torch.randn(n, width).double(), torch.randint(classes, (n,))) for n in lengths]


def dense_hessian(model, batches):
    """The Hessian of the mean over all examples, by torch alone."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    sizes = [p.numel() for p in parameters]
    inputs, labels = (torch.cat(each) for each in zip(*batches, strict=True))

    def loss(x):
        parts = x.split(sizes)
        point = {name: part.view_as(p) for name, part, p in zip(names, parts, parameters, strict=True)}
        return cross_entropy(torch.func.functional_call(model, point, (inputs,)), labels)

    return torch.func.hessian(loss)(torch.cat([p.detach().reshape(-1) for p in parameters]))


def test_layers_may_be_frozen_and_converted_between_measurements():
    model, batches = network(4, 8, 3), draw_batches(4, [10, 20])
    monitor = CurvatureMonitor(model, classes, batches, iterations=40)
    monitor.measure(0)
    model[0].requires_grad_(False)
    block = dense_hessian(model, batches)[40:, 40:]
    assert monitor.measure(1).sharpness == pytest.approx(torch.linalg.eigvalsh(block)[-1].item(), rel=1e-3)
    model.requires_grad_(False)
    with pytest.raises(hodiff.InputError, match="CurvatureMonitor: model: expected parameters that require"):
        monitor.measure(2)


@pytest.mark.slow
def test_eigenvalues_are_those_of_the_dense_hessian():
    model, batches = network(4, 8, 3), draw_batches(4, [10, 20])
    expected = torch.linalg.eigvalsh(dense_hessian(model, batches))
    monitor = CurvatureMonitor(model, classes, batches, measures=ALL, iterations=30, eigenvalues=3)
    record = monitor.measure(7)
    assert record.step == 7
    assert abs(record.sharpness - expected[-1]) <= 1e-3 * expected[-1]
    assert record.residual <= 0.02 * expected[-1]
    largest = expected[expected.abs().argsort()[-3:]].sort().values
    torch.testing.assert_close(record.eigenvalues, largest, rtol=5e-3, atol=0)
    mean = record.spectrum.moment(1)
    assert abs(mean.value - expected.mean()) < 5 * mean.standard_error
    assert abs(record.spectrum.ritz_values.max() - expected[-1]) < 1e-3 * expected[-1]


def test_the_point_moves_with_the_model():
    model, batches = network(4, 8, 3), draw_batches(4, [10, 20])
    monitor = CurvatureMonitor(model, classes, batches, iterations=60)
    monitor.measure(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    expected = torch.linalg.eigvalsh(dense_hessian(model, batches))[-1]
    assert abs(monitor.measure(1).sharpness - expected) <= 1e-3 * expected


class Noting(nn.Module):
    """A model that counts in buffers, tensors, lists and numbers, shares a tensor, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.net = network(4, 8, 3)
        self.register_buffer("total", torch.zeros(()))
        self.hits, self.steps, self.seen = torch.zeros(3), 0, []
        self.states = {"hits": self.hits}

    def forward(self, inputs):
        self.total += 1
        self.hits.add_(1)
        self.seen.append(len(inputs))
        self.steps += 1
        self.states["sum"] = self.states.get("sum", 0) + 1
        return self.net(inputs + 0.1 * torch.randn_like(inputs))


def test_the_state_of_a_model_and_of_generators_stays():
    model, batches = Noting(), draw_batches(4, [10, 20])
    hits, drawn = model.hits, torch.get_rng_state()
    record = CurvatureMonitor(model, classes, batches, measures=["sharpness", "noise"], iterations=40).measure(0)
    assert record.residual < 0.02 * record.sharpness
    assert torch.equal(torch.get_rng_state(), drawn)
    assert model.hits is hits is model.states["hits"]
    assert (float(model.total), hits.tolist(), model.steps, model.seen) == (0, [0, 0, 0], 0, [])
    assert list(model.states) == ["hits"]


def test_losses_that_are_none_or_write_to_parameters_are_refused():
    model, batches = network(4, 8, 3), draw_batches(4, [10, 20])
    frozen = nn.Linear(2, 2).requires_grad_(False)
    both = nn.ModuleList([model, frozen])

    def averaging(both, batch):
        both[1].weight.data.add_(1)
        return classes(both[0], batch)

    with pytest.raises(hodiff.InputError, match="loss: expected a function that leaves parameters as they are"):
        CurvatureMonitor(both, averaging, batches).measure(0)
    with pytest.raises(hodiff.InputError, match=r"CurvatureMonitor: loss: .* got NoneType"):
        CurvatureMonitor(model, lambda *_: None, batches).measure(0)


def test_noise_scale_is_that_of_the_examples():
    # The gradient of an example is its input.
    x = torch.randn(50, 6, dtype=torch.float64) + 1
    model = nn.Linear(6, 1, bias=False).double()
    single = [row[None] for row in x]
    record = CurvatureMonitor(model, lambda m, b: m(b).mean(), single, measures=["noise"]).measure(0)
    variance = torch.cov(x.T).trace()
    signal = x.mean(0).square().sum() - variance / 50
    assert record.noise_scale == pytest.approx((variance / signal).item(), rel=1e-10)
    assert record.gradient_norm == pytest.approx(x.mean(0).norm().item(), rel=1e-10)


def test_noise_scale_of_unequal_batches_is_unbiased():
    generator = torch.Generator().manual_seed(1)
    model, lengths = nn.Linear(3, 1, bias=False).double(), [2, 5, 9]
    variances, signals = [], []
    for _ in range(400):
        batches = [torch.randn(n, 3, dtype=torch.float64, generator=generator) + 1 for n in lengths]
        record = CurvatureMonitor(model, lambda m, b: m(b).mean(), batches, measures=["noise"]).measure(0)
        # Solve for both estimates: their quotient is the scale, and |g|^2 is the signal and its share of the noise.
        signals.append(record.gradient_norm**2 / (1 + record.noise_scale / sum(lengths)))
        variances.append(record.noise_scale * signals[-1])
    assert torch.tensor(variances).mean() == pytest.approx(3, rel=0.1)
    assert torch.tensor(signals).mean() == pytest.approx(3, rel=0.1)


def test_noise_without_a_mean_gradient_is_infinite():
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    model = nn.Linear(2, 1, bias=False)
    record = CurvatureMonitor(model, lambda m, b: m(b).mean(), [x[:1], x[1:]], measures=["noise"]).measure(0)
    assert record.noise_scale == float("inf")


BOUNDS = {"sharpness": 1 + 2 * (20 + 5), "eigenvalues": 1 + 2 * (5 * 21 + 4), "spectrum": 1 + 2 * 2 * 20, "noise": 1}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("measure", ALL)
def test_cost_is_what_is_documented(measure):
    """Counted operations of matrix products, in those of one gradient."""
    model, batches = network(64, 128, 128, 128, 10).float(), draw_batches(64, [64, 64], 10)
    batches = [(inputs.float(), labels) for inputs, labels in batches]
    with FlopCounterMode(display=False) as counter:
        for batch in batches:
            classes(model, batch).backward()
    gradient = counter.get_total_flops()
    monitor = CurvatureMonitor(model, classes, batches, measures=[measure])
    monitor.measure(0)
    with FlopCounterMode(display=False) as counter:
        record = monitor.measure(1)
    # Lanczos multiplies with its basis, too, and gradients of the first layer cost less.
    assert counter.get_total_flops() / gradient == pytest.approx(record.gradients, rel=0.2)
    assert record.gradients <= BOUNDS[measure]
    assert measure not in {"spectrum", "noise"} or record.gradients == BOUNDS[measure]


def train(measures):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 3))
    batches = [(torch.randn(16, 4), torch.randint(3, (16,))) for _ in range(6)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = CurvatureMonitor(model, classes, batches[:3], every=2, measures=measures) if measures else None
    for batch in batches:
        optimizer.zero_grad()
        classes(model, batch).backward()
        optimizer.step()
        if monitor is not None:
            gradients = [p.grad.clone() for p in model.parameters()]
            monitor.step()
            assert all(map(torch.equal, gradients, [p.grad for p in model.parameters()]))
            assert all(module.training for module in model.modules())
    return model.state_dict(), torch.random.get_rng_state(), monitor


def test_training_is_the_same_with_a_monitor():
    expected, generator, _ = train(())
    state, drawn, monitor = train(ALL)
    assert [record.step for record in monitor.history] == [2, 4, 6]
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert torch.equal(drawn, generator)


def test_wrappers_and_autocast_are_taken_off():
    model, batches = network(4, 8, 3).float(), draw_batches(4, [10, 20])
    batches = [(inputs.float(), labels) for inputs, labels in batches]
    expected = CurvatureMonitor(model, classes, batches).measure(0).sharpness
    wrapped = torch.compile(model, backend="eager")
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert CurvatureMonitor(wrapped, classes, batches).measure(0).sharpness == expected


def test_frozen_parameters_are_constants():
    model, batches = network(4, 8, 3), draw_batches(4, [10, 20])
    model[0].requires_grad_(False)
    block = dense_hessian(model, batches)[40:, 40:]
    record = CurvatureMonitor(model, classes, batches, iterations=40).measure(0)
    assert record.sharpness == pytest.approx(torch.linalg.eigvalsh(block)[-1].item(), rel=1e-3)


@pytest.mark.slow
def test_plot(tmp_path):
    mpl.use("Agg")
    model, batches = network(4, 8, 3), draw_batches(4, [10, 20])
    monitor = CurvatureMonitor(model, classes, batches, measures=ALL, iterations=5, steps=5)
    with pytest.raises(hodiff.InputError, match="at least one measurement"):
        monitor.plot()
    for step in (1, 2, 3):
        monitor.measure(step)
    sharpness, eigenvalues, spectrum, noise = monitor.plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    assert sharpness.lines[0].get_xydata().tolist() == [[r.step, r.sharpness] for r in monitor.history]
    assert len(eigenvalues.lines) == 4
    assert [line.get_label() for line in spectrum.lines] == ["step 1", "step 3"]
    assert noise.get_ylabel() == "noise scale in examples"
    mpl.pyplot.close("all")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"measures": ["sharp"]}, "measures: expected a list of different names"),
        ({"measures": "noise"}, "measures: expected a list"),
        ({"measures": ["noise", "noise"]}, "measures: expected a list of different names"),
        ({"every": 0}, "every: expected an int of 1 or more"),
        ({"samples": 1}, "samples: expected an int of 2 or more"),
        ({"batch_size": 3}, "batch_size"),
    ],
)
def test_errors(options, words):
    with pytest.raises(hodiff.InputError, match=words):
        CurvatureMonitor(network(4, 3), classes, draw_batches(4, [2, 2]), **options)


def test_errors_of_batches():
    with pytest.raises(hodiff.InputError, match="2 or more batches for noise, got 1"):
        CurvatureMonitor(network(4, 3), classes, draw_batches(4, [2]), measures=["noise"])
    with pytest.raises(hodiff.InputError, match="expected a list of batches, got generator"):
        CurvatureMonitor(network(4, 3), classes, (each for each in draw_batches(4, [2])))
    with pytest.raises(hodiff.InputError, match="model: expected"):
        CurvatureMonitor(mse_loss, classes, draw_batches(4, [2]))
