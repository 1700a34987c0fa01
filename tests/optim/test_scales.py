"""Steps for losses of any scale equal steps with settings scaled by hand, and non-finite batches raise an error."""

import inspect
import math

import pytest
import torch
from optim.table import TABLE, Problem, cross_entropy, same

import hodiff

every = pytest.mark.parametrize("case", TABLE.values(), ids=TABLE)


# These optimizers square values, whose range in float32 is 1e±38.
HAVE_SQUARES = {
    "AdaHessian",
    "Shampoo",
    "Shampoo, the paper's",
    "SOAP",
    "KLShampoo",
    "KLSOAP",
    "Muon",
    "Muon, the original",
    "LBFGS",
}


def name_of(case):
    return next(name for name, each in TABLE.items() if each is case)


class Scaled(Problem):
    """A problem whose loss is multiplied by a number."""

    def __init__(self, dtype, factor=1.0, count=4):
        super().__init__(count=count)
        self.model.to(dtype)
        self.batches = [(inputs.to(dtype), labels) for inputs, labels in self.batches]
        self.factor = factor

    def loss(self, batch):
        return super().loss(batch) * self.factor

    def closure(self, case, batch):
        if not case.pair:
            return super().closure(case, batch)
        inputs, labels = batch
        return lambda: (self.model(inputs), lambda outputs: cross_entropy(outputs, labels) * self.factor)


def make_optimizer(case, parameters, factor):
    """Return an optimizer with settings scaled by hand."""
    names = inspect.signature(case.make).parameters
    kind = getattr(case.make, "func", case.make)
    # This damping makes the matrices positive definite.
    settings = {"damping": 1.0, "eps": 1e-8, "kl_clip": 0.1}
    options = {name: value * factor for name, value in settings.items() if name in names}
    if kind is hodiff.optim.Shampoo:
        options = {} if case.options.get("lr") == 0.1 else {"grafting": "sgd", "lr": 0.05 / factor}
    if kind is hodiff.optim.SAM:
        options = {"base": torch.optim.SGD, "lr": 0.05 / factor}
    if kind is hodiff.optim.LBFGS:
        options = {"tolerance_grad": 0.0, "tolerance_change": 0.0}
    return case(parameters, **({"weight_decay": 0.0} if "weight_decay" in case.options else {}), **options)


@pytest.mark.one_in(15)
@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [2.0**83, 2.0**-83, 2.0**-60])
def test_scaled_losses_give_scaled_steps(case, dtype, factor):
    if "preconditioned" in name_of(case) or (name_of(case) == "LBFGS" and factor < 1):
        pytest.skip("Martens' preconditioner is no power of the scale, and torch's L-BFGS leaves out small changes")
    if name_of(case) == "SSBroyden":
        pytest.skip("its first step has at most length one, whatever the scale")
    plain, scaled = Scaled(dtype), Scaled(dtype, factor)
    theirs = plain.run(case, make_optimizer(case, plain.model.parameters(), 1.0))
    optimizer = make_optimizer(case, scaled.model.parameters(), factor)
    if dtype == torch.float32 and name_of(case) in HAVE_SQUARES:
        before = scaled.numbers()
        with pytest.raises(hodiff.InputError, match=r"squares are in the range of torch\.float32"):
            scaled.run(case, optimizer)
        assert same(before, scaled.numbers())
    else:
        torch.testing.assert_close(scaled.run(case, optimizer), theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("foreach", [True, False])
def test_low_precision_parameters_match_float64(dtype, foreach):
    """AdaHessian takes the same steps as in float64, to rounding of the parameters."""
    sizes = [1e-3, 0.5, 5.0, 6.0, 300.0]
    settings = {"lr": 0.1, "weight_decay": 0.01, "foreach": foreach}
    runs = []
    for each in (dtype, torch.float64):
        ws = [torch.full((2,), 1.0, dtype=each, requires_grad=True) for _ in sizes]
        optimizer = hodiff.optim.AdaHessian(ws, **settings)
        for step in range(6):
            optimizer.zero_grad()
            sum((h * w * w / 2).sum() for h, w in zip(sizes, ws, strict=True)).backward()
            optimizer.step()
            if step == 2:
                other = hodiff.optim.AdaHessian(ws, **settings)
                other.load_state_dict(optimizer.state_dict())
                optimizer = other
        runs.append([w.detach().double() for w in ws])
        squares = [optimizer.state[w]["curvature_sq"] / (1 - 0.999**6) for w in ws]
        assert {s.dtype for s in squares} == {torch.float32 if each == dtype else torch.float64}
        # The second derivative is the number itself.
        expected = torch.tensor(sizes, dtype=each).double()
        torch.testing.assert_close(torch.stack(squares)[:, 0].sqrt().double(), expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(*runs, rtol=8 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_states_are_loaded_in_float32(dtype):
    """A state of another dtype, or from before states had 32 bits, is converted."""
    w = torch.ones(3, dtype=torch.float16, requires_grad=True)
    optimizer = hodiff.optim.AdaHessian([w], update_every=1)
    state = {"curvature_sq": torch.ones(3, dtype=dtype), "refreshes": 1, "refresh_at": 0}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: state}})
    (w**2).sum().backward()
    optimizer.step()
    assert optimizer.state[w]["curvature_sq"].dtype == torch.float32


BAD = {"NaN": math.nan, "infinite": math.inf}


@pytest.mark.one_in(3)
@every
@pytest.mark.parametrize("number", BAD.values(), ids=BAD)
def test_non_finite_batches_are_rejected_and_leave_the_state(case, number):
    problem, plain = Problem(count=4), Problem(count=4)
    optimizer = case(problem.model.parameters())
    problem.run(case, optimizer, problem.batches[:2])
    inputs, labels = problem.batches[2]
    for bad in (torch.where(torch.arange(3) == 1, number, inputs), inputs * number):
        with pytest.raises(hodiff.InputError, match="expected"):
            problem.run(case, optimizer, [(bad, labels)])
    assert all(p.isfinite().all() for p in problem.model.parameters())
    theirs = case(plain.model.parameters())
    plain.run(case, theirs, plain.batches[:2])
    assert same(problem.numbers(), plain.numbers())
    assert same(problem.run(case, optimizer, problem.batches[2:]), plain.run(case, theirs, plain.batches[2:]))


@pytest.mark.one_in(3)
@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_gradient_batches_do_not_break_training(case, dtype):
    problem = Scaled(dtype)
    optimizer = case(problem.model.parameters())
    problem.run(case, optimizer, problem.batches[:1])
    problem.factor = 0.0
    problem.run(case, optimizer, problem.batches[1:3])
    problem.factor = 1.0
    before = problem.run(case, optimizer, problem.batches[3:])
    after = problem.run(case, optimizer, problem.batches[:1] * 3)
    assert all(p.isfinite().all() for p in after)
    assert not same(before, after)


def test_large_inputs_in_float32_do_not_overflow():
    """Least squares are solved in float32 although the squares of Hessian times gradient overflow."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(10_000, 3, generator=generator) * torch.tensor([1.0, 30.0, 1000.0])
    targets = inputs @ torch.tensor([1.0, 2.0, 3.0])
    for make in (hodiff.optim.NewtonCG, hodiff.optim.LayerwiseGaussNewton, hodiff.optim.HessianFree):
        w = torch.zeros(3, requires_grad=True)
        optimizer = make([w])
        for _ in range(4):
            if make is hodiff.optim.NewtonCG:
                optimizer.step(lambda: (inputs @ w - targets).square().sum())
            else:
                optimizer.step(lambda: (inputs @ w, lambda z: (z - targets).square().sum()))
        torch.testing.assert_close(w.detach(), torch.tensor([1.0, 2.0, 3.0]), rtol=1e-2, atol=0)
