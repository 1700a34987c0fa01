"""Tests of nondeterministic functions, changing data, unchanged buffers, and released objects."""

import gc
import random
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import ravel
from operators.cases import close, problem
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

import hodiff
from hodiff.operators import (
    EmpiricalFisherOperator,
    FisherOperator,
    GaussNewtonOperator,
    HessianOperator,
    JacobianOperator,
    LinearOperator,
)

X = torch.linspace(-1, 1, 12).reshape(6, 2).double()
Y = torch.tensor([0, 1, 2, 0, 1, 2])


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def objective(module: nn.Module) -> Any:
    return lambda p, batch=(X, Y): F.cross_entropy(functional_call(module, p, (batch[0],)), batch[1])


def all_operators(module: nn.Module, **options: Any) -> list[LinearOperator]:
    p = parameters(module)
    return [
        HessianOperator(objective(module), p, (X, Y), **options),
        GaussNewtonOperator(module, F.cross_entropy, p, X, Y, **options),
        FisherOperator(module, F.cross_entropy, p, X, Y, samples=2, **options),
        EmpiricalFisherOperator(module, F.cross_entropy, p, X, Y, **options),
    ]


def test_dropout_is_named() -> None:
    module = nn.Sequential(nn.Linear(2, 30), nn.Dropout(0.25), nn.Linear(30, 3)).double()
    for A in all_operators(module):
        state = torch.get_rng_state()
        with pytest.raises(hodiff.InputError, match=r"random numbers of Dropout\(p=0.25\): call model.eval"):
            A @ parameters(module)
        assert torch.equal(torch.get_rng_state(), state)
    for A in all_operators(module.eval()):
        A @ parameters(module)


def test_random_numbers_without_a_module_are_detected() -> None:
    A = HessianOperator(lambda x: (x * torch.rand(3)).square().sum(), torch.ones(3))
    with pytest.raises(hodiff.InputError, match="The cause are random numbers: call"):
        A @ torch.ones(3)


def test_changing_state_is_detected() -> None:
    calls = []

    def counting(x: Tensor) -> Tensor:
        calls.append(1)
        return x.square().sum() * len(calls)

    for f in (counting, lambda x: x.square().sum() * random.random()):
        with pytest.raises(hodiff.InputError, match="no random number generator of torch"):
            HessianOperator(f, torch.ones(2)) @ torch.ones(2)


class Drifting(nn.BatchNorm1d):
    """A batch norm in training mode whose output depends on the running mean that it updates."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return x - self.running_mean


def test_batch_norm_that_depends_on_its_buffers_is_named() -> None:
    module = nn.Sequential(nn.Linear(2, 3), Drifting(3)).double()
    A = HessianOperator(objective(module), parameters(module))
    before = module[1].running_mean.clone()
    with pytest.raises(hodiff.InputError, match="Drifting in training mode"):
        A @ parameters(module)
    assert torch.equal(module[1].running_mean, before)


def test_check_runs_once_and_can_be_turned_off() -> None:
    calls = []

    def f(x: Tensor) -> Tensor:
        calls.append(1)
        return x.pow(3).sum()

    A = HessianOperator(f, torch.ones(2))
    A @ torch.ones(2)
    A @ torch.ones(2)
    assert len(calls) == 3
    A.at(torch.zeros(2)) @ torch.ones(2)
    assert len(calls) == 4
    calls.clear()
    HessianOperator(f, torch.ones(2), check_deterministic=False) @ torch.ones(2)
    assert len(calls) == 1


@pytest.mark.one_in(6)
@pytest.mark.parametrize("route", ["auto", *hodiff.ROUTES])
def test_buffers_are_unchanged_by_every_route(route: str) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).double()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    held = dict(module.named_buffers())
    A = HessianOperator(objective(module), parameters(module), route=route)
    close(A.to_dense(), HessianOperator(objective(module), parameters(module)).to_dense())
    A @ parameters(module)
    for name, buffer in module.named_buffers():
        assert buffer is held[name]
        assert torch.equal(buffer, before[name])


def test_buffers_are_unchanged_by_all_operators() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for A in all_operators(module):
        A @ parameters(module)
        A.to_dense()
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, before[name])
    assert not any(parameter.grad is not None for parameter in module.parameters())


def test_shuffled_data_is_detected() -> None:
    data = DataLoader(TensorDataset(X, Y), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(1))
    module = nn.Linear(2, 3).double()
    A = HessianOperator(objective(module), parameters(module), data=data, cache=False)
    A @ parameters(module)
    with pytest.raises(hodiff.InputError, match=r"data: expected the same batches .* shuffle=False"):
        run_several_passes(A)


def run_several_passes(A: LinearOperator) -> None:
    """Run so many passes that equal random permutations are improbable."""
    for _ in range(3):
        A @ torch.ones(A.shape[1]).double()


def test_data_loader_with_fixed_order_matches() -> None:
    module = nn.Linear(2, 3).double()
    data = DataLoader(TensorDataset(X, Y), batch_size=4)
    A = HessianOperator(objective(module), parameters(module), data=data, cache=False)
    whole = HessianOperator(objective(module), parameters(module)).to_dense()
    for _ in range(2):
        close(A.to_dense(), whole)


class Changing:
    """Batches that differ from pass to pass."""

    def __init__(self, *passes: Any):
        self.passes = list(passes)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.passes.pop(0))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ([(X[:3], Y[:3])], "1 batches now, 2 on the first pass"),
        ([(X[:3], Y[:3]), (X[3:], Y[3:]), (X, Y)], "more than the 2 batches"),
        ([(X[3:], Y[3:]), (X[:3], Y[:3])], "in another order"),
        (
            [(X[:3], Y[:3]), (X[3:] + 1, Y[3:])],
            "a batch 1 that differs from the first pass: it has other examples or other values",
        ),
        ([(X[:3], Y[:3]), (X[3:].flip(0), Y[3:].flip(0))], "a batch 1 that differs from the first pass"),
    ],
)
def test_changed_data_is_rejected(second: Any, message: str) -> None:
    module = nn.Linear(2, 3).double()
    data = Changing([(X[:3], Y[:3]), (X[3:], Y[3:])], second)
    A = HessianOperator(objective(module), parameters(module), data=data, cache=False)
    A @ parameters(module)
    with pytest.raises(hodiff.InputError, match=f"data: .*{message}"):
        A @ parameters(module)


def test_interrupted_pass_can_be_repeated() -> None:
    class Breaking:
        def __init__(self) -> None:
            self.broken = True

        def __iter__(self) -> Iterator[Any]:
            yield X[:2], Y[:2]
            if self.broken:
                self.broken = False
                raise OSError("disk")
            yield X[2:], Y[2:]

    module = nn.Linear(2, 3).double()
    A = HessianOperator(objective(module), parameters(module), data=Breaking())
    with pytest.raises(OSError, match="disk"):
        A @ parameters(module)
    close(A.to_dense(), HessianOperator(objective(module), parameters(module)).to_dense())


@pytest.mark.parametrize(
    "inputs",
    [
        torch.tensor([1.0, torch.nan, torch.inf]),
        torch.tensor([1j, 2.0]),
        torch.tensor([True, False]),
        torch.eye(2).to_sparse(),
        torch.ones(2, dtype=torch.bfloat16),
        torch.zeros(0),
    ],
    ids=str,
)
def test_batches_with_any_values_are_recognized(inputs: Tensor) -> None:
    def f(x: Tensor, batch: Any) -> Tensor:
        return x.pow(3).sum()

    A = HessianOperator(f, torch.ones(1), data=[(torch.ones(2), inputs)], cache=False)
    for _ in range(2):
        assert (A @ torch.ones(1)).item() == 6


def test_data_is_iterated_once_per_pass() -> None:
    passes = []

    class Data:
        def __iter__(self) -> Iterator[Any]:
            passes.append(1)
            return iter([(X, Y)])

    module = nn.Linear(2, 3).double()
    A = HessianOperator(objective(module), parameters(module), data=Data(), cache=False)
    A @ parameters(module)
    assert len(passes) == 1


def test_rejects_bad_data() -> None:
    module = nn.Linear(2, 3).double()

    def with_data(data: Any, f: Any = None, **options: Any) -> LinearOperator:
        return HessianOperator(f or objective(module), parameters(module), data=data, **options)

    with pytest.raises(hodiff.InputError, match="data: expected at least one batch"):
        with_data([]) @ parameters(module)
    without = lambda p, batch: sum(leaf.square().sum() for leaf in p.values())  # noqa: E731
    with pytest.raises(hodiff.InputError, match=r"examples along its first dimension, got str .* batch_size="):
        with_data(["a"], without) @ parameters(module)
    with pytest.raises(hodiff.InputError, match="examples along its first dimension"):
        with_data([torch.tensor(1.0)], without) @ parameters(module)
    product = with_data(["a"], without, reduction="sum") @ parameters(module)
    torch.testing.assert_close(product["weight"], 2 * module.weight.detach())
    with_data(["a", "bcd"], without, batch_size=len) @ parameters(module)
    for size in (0, -1, float("nan")):
        with pytest.raises(hodiff.InputError, match="batch_size: expected a positive number"):
            with_data([(X, Y)], batch_size=lambda batch, size=size: size) @ parameters(module)
    with pytest.raises(hodiff.InputError, match="the iterator generator"):
        with_data(batch for batch in [(X, Y)])


def test_progress_writes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    module = nn.Linear(2, 3).double()
    A = HessianOperator(objective(module), parameters(module), data=[(X, Y)], progress=True)
    A @ parameters(module)
    assert "batches" in capsys.readouterr().err
    HessianOperator(objective(module), parameters(module), data=[(X, Y)]) @ parameters(module)
    assert not capsys.readouterr().err


def test_operators_are_freed_without_garbage_collection() -> None:

    p = problem("mlp")
    gc.collect()
    gc.disable()
    try:
        for make in (
            lambda: HessianOperator(p.objective(), p.x, data=p.batches(2)),
            lambda: GaussNewtonOperator(p.model, F.cross_entropy, p.x, p.inputs, p.targets),
            lambda: FisherOperator(p.model, F.cross_entropy, p.x, p.inputs, p.targets, samples=2),
            lambda: EmpiricalFisherOperator(p.model, F.cross_entropy, p.x, p.inputs, p.targets),
            lambda: JacobianOperator(p.call, p.x, p.inputs),
            lambda: HessianOperator(p.objective(), p.x, data=p.batches(2)).damped(1.0).inverse(),
            lambda: HessianOperator(p.objective(), p.x, data=p.batches(2)).block("0") * 2,
        ):
            A = make()
            A @ torch.ones(A.shape[1]).double()
            A @ torch.ones(A.shape[1], 3).double()
            seen = weakref.ref(A)
            del A
            assert seen() is None
    finally:
        gc.enable()


def in_parts(module: nn.Module, **options: Any) -> list[LinearOperator]:
    p, data = parameters(module), [(X[:3], Y[:3]), (X[3:], Y[3:])]
    options |= {"data": data}
    return [
        HessianOperator(objective(module), p, **options),
        HessianOperator(objective(module), p, route="forward-over-reverse", **options),
        GaussNewtonOperator(module, F.cross_entropy, p, **options),
        FisherOperator(module, F.cross_entropy, p, samples=2, **options),
        EmpiricalFisherOperator(module, F.cross_entropy, p, **options),
    ]


@pytest.mark.parametrize("options", [{"cache": False}, {"memory_budget": 0}])
def test_module_switched_to_training_between_passes_is_detected(options: Any) -> None:
    module = nn.Sequential(nn.Linear(2, 30), nn.Dropout(0.25), nn.Linear(30, 3)).double().eval()
    for A in in_parts(module, **options):
        for _ in range(2):
            A @ parameters(module)
        module.train()
        with pytest.raises(hodiff.InputError, match="f: expected the same value"):
            A @ parameters(module)
        module.eval()


def test_cached_linearizations_keep_the_old_mode() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double().eval()
    v = parameters(module)
    for options in ({}, {"cache": True}):
        for A in in_parts(module, **options)[::2]:
            before = A @ v
            module.train()
            close(ravel(A @ v), ravel(before))
            module.eval()


class LateDropout(nn.Module):
    """A model that draws random numbers from the second batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.linear(x)
        return outputs if torch.equal(x, X[:3]) else F.dropout(outputs)


@pytest.mark.parametrize("cache", [False, True])
def test_random_numbers_from_the_second_batch_on_are_detected(cache: bool) -> None:
    module = LateDropout()
    for A in in_parts(module, cache=cache):
        with pytest.raises(hodiff.InputError, match="random numbers"):
            A @ parameters(module)
    state = torch.get_rng_state()
    for A in in_parts(module, cache=cache, check_deterministic=False):
        A @ parameters(module)
    torch.set_rng_state(state)


def test_function_that_seeds_itself_is_accepted() -> None:
    def f(x: Tensor, batch: Tensor) -> Tensor:
        torch.manual_seed(0)
        return (x**2 * torch.rand(2) * batch).sum()

    A = HessianOperator(f, torch.ones(2), data=[torch.ones(2), torch.ones(2)], cache=False)
    for _ in range(2):
        assert torch.allclose(A @ torch.ones(2), 2 * torch.rand(2, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("x", [
    torch.tensor([0.5, 1.0, float("nan")]).double(),
    torch.randn(100, 70),
    torch.randn(30, 20).mT,
    torch.randn(2, 3, 40, 50).to(memory_format=torch.channels_last),
    torch.randn(40, dtype=torch.bfloat16),
    {"a": torch.randn(3), "b": torch.randn(300).double(), "c": torch.zeros(0)},
], ids=["nan", "large", "transposed", "channels last", "bfloat16", "several"])  # fmt: skip
def test_point_changed_without_a_version_is_detected(x: Any) -> None:
    def f(x: Any) -> Tensor:
        return sum((leaf**4).sum().double() for leaf in (x.values() if isinstance(x, dict) else [x]))

    v = torch.utils._pytree.tree_map(torch.ones_like, x)
    A, J = HessianOperator(f, x, check_deterministic=False), JacobianOperator(f, x)
    last = x["b"] if isinstance(x, dict) else x
    for _ in range(2):
        A @ v
        J @ v
    last.data.mul_(2)
    for operator in (A, J):
        with pytest.raises(
            hodiff.InputError, match=r"x: expected the values with which the operator was created.*\.data"
        ):
            operator @ v
    A.at(x) @ v


def test_tensor_that_f_reads_changed_in_place_is_detected() -> None:
    for make in (
        lambda x, w: GaussNewtonOperator(lambda x, inputs: w * x**3, F.mse_loss, x, w, w),
        lambda x, w: JacobianOperator(lambda x: w * x**3, x),
    ):
        x, w = torch.ones(3), torch.ones(3)
        A = make(x, w)
        A @ x
        w.mul_(2)
        with pytest.raises(hodiff.InputError, match=r"f: expected the tensors that it read .* changed in place"):
            A @ x


class Masked:
    """A network with masks drawn at each call, which can be reproduced."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(6, 3, dtype=torch.float64, generator=generator)
        self.w = torch.randn(4, 3, dtype=torch.float64, generator=generator)
        self.data = [(self.inputs[:4], torch.zeros(4, dtype=torch.float64)), (self.inputs[4:], torch.ones(2).double())]
        self.states = {}

    def outputs(self, w, inputs):
        self.states.setdefault(len(inputs), torch.get_rng_state())
        return self.with_masks(w, inputs, (torch.rand(len(inputs), 4) < 0.5).double())

    def mask(self, inputs):
        generator = torch.Generator()
        generator.set_state(self.states[len(inputs)])
        return (torch.rand(len(inputs), 4, generator=generator) < 0.5).double()

    @staticmethod
    def with_masks(w, inputs, mask):
        return ((inputs @ w.T).tanh() * mask).sum(1)

    def loss(self, w, batch):
        return (self.outputs(w, batch[0]) - batch[1]).square().mean()

    def hessian(self):
        """Compute the Hessian by torch.func, with the masks as constants."""
        total = 0
        for inputs, targets in self.data:
            mask = self.mask(inputs)
            of_batch = lambda w: (self.with_masks(w, inputs, mask) - targets).square().sum() / 6  # noqa: E731
            total += torch.func.hessian(of_batch)(self.w)
        return total.reshape(12, 12)

    def gauss_newton(self):
        rows = torch.cat([
            torch.func.jacrev(self.with_masks)(self.w, x, self.mask(x)).reshape(-1, 12) for x, _ in self.data
        ])
        return 2 * rows.T @ rows / 6


@pytest.mark.one_in(8)
@pytest.mark.parametrize("options", [{"cache": True}, {"cache": False}], ids=["kept", "made anew"])
@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_randomness_fixed_uses_one_draw(route, options):
    network = Masked()
    A = hodiff.HessianOperator(
        network.loss,
        network.w,
        data=network.data,
        randomness="fixed",
        route=route,
        check_deterministic=False,
        **options,
    )
    before = torch.get_rng_state()
    M = A.to_dense()
    torch.testing.assert_close(M, network.hessian())
    assert not torch.equal(*network.states.values())
    V = torch.randn(12, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(A @ V, M @ V)
    torch.testing.assert_close(A @ V[:, 0], M @ V[:, 0])
    elsewhere = A.at(2 * network.w)
    network.w = 2 * network.w
    torch.testing.assert_close(elsewhere.to_dense(), network.hessian())
    assert torch.equal(torch.get_rng_state(), before)


def test_randomness_fixed_uses_one_draw_in_model_and_loss():
    network = Masked()
    torch.manual_seed(0)
    A = hodiff.GaussNewtonOperator(
        network.outputs, torch.nn.functional.mse_loss, network.w, data=network.data, randomness="fixed"
    )
    network.states.clear()
    M = A.to_dense()
    torch.testing.assert_close(M, network.gauss_newton())
    torch.manual_seed(1)
    other = hodiff.GaussNewtonOperator(
        network.outputs, torch.nn.functional.mse_loss, network.w, data=network.data, randomness="fixed"
    )
    assert not torch.allclose(other.to_dense(), M)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"randomness": "same"}, "HessianOperator: randomness: expected one of 'error', 'fixed', got 'same'"),
        ({"randomness": "fixed", "compile": True}, "randomness: expected 'error' with compile=True"),
        ({}, "pass randomness='fixed'"),
    ],
)
def test_rejects_bad_randomness(options, message):
    network = Masked()
    with pytest.raises(hodiff.InputError, match=message):
        hodiff.HessianOperator(network.loss, network.w, data=network.data, **options).to_dense()


CALLS: list[int] = []


class Moody(nn.Module):
    """A layer that counts its calls, and may draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3).double()
        self.noise = 0.0
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(len(x))
        z = self.layer(x)
        return z + self.noise * torch.rand(z.shape, generator=self.generator, dtype=z.dtype) if self.noise else z


def kfac_factors(module: nn.Module) -> Any:
    return hodiff.KFACOperator(module, F.cross_entropy, parameters(module), X, Y).blocks[0].A


def rows(module: nn.Module) -> Any:
    return hodiff.per_sample.gradients(module, F.cross_entropy, parameters(module), X, Y)


@pytest.mark.parametrize("use", [kfac_factors, rows])
def test_module_is_compared_once_and_random_numbers_are_still_detected(use: Any) -> None:
    """Later operators of the same class trust the comparison, unless random numbers are drawn."""
    torch.manual_seed(0)
    module = Moody()
    use(module)
    counts = []
    for training in (True, False, False):
        CALLS.clear()
        use(module.train(training))
        counts.append(len(CALLS))
    assert counts == [counts[1] - 2, counts[1], counts[1] - 2]
    module.noise = 1.0
    with pytest.raises(hodiff.InputError, match="The cause are random numbers"):
        use(module)


SEVERAL_EVALUATIONS: dict[str, Any] = {
    "a block of EKFAC": lambda m: hodiff.EKFACOperator(m, F.cross_entropy, parameters(m), X, Y).blocks,
    "a block of KFOC": lambda m: hodiff.operators.KFOCOperator(m, F.cross_entropy, parameters(m), X, Y).blocks,
    "a block of Shampoo": lambda m: hodiff.operators.ShampooOperator(m, F.cross_entropy, parameters(m), X, Y).blocks,
    "a diagonal": lambda m: all_operators(m)[1].diagonal(exact=True),
    "a product": lambda m: all_operators(m)[1] @ parameters(m),
}


@pytest.mark.parametrize("use", SEVERAL_EVALUATIONS.values(), ids=SEVERAL_EVALUATIONS)
def test_noise_of_an_own_generator_that_is_switched_on_later_is_detected(use: Any) -> None:
    torch.manual_seed(0)
    module = Moody()
    use(module)
    module.noise, module.generator = 1.0, torch.Generator().manual_seed(0)
    with pytest.raises(hodiff.InputError, match="look for state that f changes"):
        use(module)


def test_compared_modules_are_released() -> None:
    module = Moody()
    rows(module)
    released = weakref.ref(module)
    del module
    gc.collect()
    assert released() is None
