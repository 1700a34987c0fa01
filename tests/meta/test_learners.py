"""Tests of meta-learners against explicit loops over tasks with torch.autograd.grad."""

import copy
import gc
import inspect
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drawing import draw
from meta.problems import Tree, batch, mse, network
from torch import Tensor, nn
from torch.func import functional_call

from hodiff import HodiffWarning, InputError
from hodiff.meta import ANIL, FOMAML, IMAML, MAML, SGD, Adam, MetaSGD, NonFiniteError, Reptile, adapt
from hodiff.meta.learner import MetaLearner

Tasks = tuple[Tensor, ...]


def tasks(count: int = 3) -> Tasks:
    pairs = [(*batch(2 * i), *batch(2 * i + 1, size=4)) for i in range(count)]
    return tuple(map(torch.stack, zip(*pairs, strict=True)))


def descend(
    module: nn.Module, x: Tensor, y: Tensor, *, lr: Any = 0.1, steps: int = 2, again: bool = True, names: Any = None
) -> Tree:
    """Run some steps of gradient descent on one task."""
    params = {name: each for name, each in module.named_parameters() if each.requires_grad}
    for _ in range(steps):
        chosen = {name: each for name, each in params.items() if names is None or name in names}
        loss = mse(functional_call(module, params, (x,)), y)
        grads = torch.autograd.grad(loss, list(chosen.values()), create_graph=again)
        for (name, each), grad in zip(chosen.items(), grads, strict=True):
            params[name] = each - (lr[name] if isinstance(lr, dict) else lr) * grad
    return params


def reference(module: nn.Module, given: Tasks, **options: Any) -> Tensor:
    losses = []
    for support_x, support_y, query_x, query_y in zip(*given, strict=True):
        params = descend(module, support_x, support_y, **options)
        losses.append(mse(functional_call(module, params, (query_x,)), query_y))
    return torch.stack(losses).mean()


def assert_same_step(learner: MetaLearner, given: Any, expected: Tensor) -> None:
    names, parameters = zip(*((n, p) for n, p in learner.module.named_parameters() if p.requires_grad), strict=True)
    grads = dict(zip(names, torch.autograd.grad(expected, parameters), strict=True))
    learner.zero_grad()
    loss = learner(given)
    torch.testing.assert_close(loss.detach(), expected.detach())
    loss.backward()
    for name, each in learner.module.named_parameters():
        if each.requires_grad:
            torch.testing.assert_close(each.grad, grads[name])
            assert each.grad.abs().max() > 1e-4


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"chunk_size": 2},
    "mixed": {"route": "forward-over-reverse"},
    "checkpointed": {"checkpoint": 1},
    "by optimizer": {"optimizer": SGD(0.1)},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_maml_matches_a_loop(options: str) -> None:
    module = network()
    assert_same_step(MAML(module, mse, 0.1, 2, **OPTIONS[options]), tasks(), reference(module, tasks()))


def test_lists_of_unequal_tasks_match() -> None:
    module = network()
    given = [(*batch(0, size=3), *batch(1)), (*batch(2, size=6), *batch(3, size=2))]
    expected = [reference(module, tuple(each.unsqueeze(0) for each in task)) for task in given]
    assert_same_step(MAML(module, mse, 0.1, 2), given, torch.stack(expected).mean())


def test_fomaml_matches_a_loop() -> None:
    module = network()
    assert_same_step(FOMAML(module, mse, 0.1, 2), tasks(), reference(module, tasks(), again=False))


def test_anil_matches_a_loop() -> None:
    module = network()
    expected = reference(module, tasks(), names=("2.weight", "2.bias"))
    for head in (None, "2", ["2.weight", "2.bias"]):
        assert_same_step(ANIL(module, mse, 0.1, 2, head=head), tasks(), expected)
        expected = reference(module, tasks(), names=("2.weight", "2.bias"))


def test_meta_sgd_matches_a_loop() -> None:
    module = network()
    learner = MetaSGD(module, mse, 0.1, 2)
    with torch.no_grad():
        for rate in learner.lr:
            rate.mul_(1 + torch.rand_like(rate))
    rates = dict(zip(learner.names, learner.lr, strict=True))
    of_rates = torch.autograd.grad(reference(module, tasks(), lr=rates), list(rates.values()))
    assert_same_step(learner, tasks(), reference(module, tasks(), lr=rates))
    for rate, expected in zip(learner.lr, of_rates, strict=True):
        torch.testing.assert_close(rate.grad, expected)


def test_reptile_matches_a_loop() -> None:
    module = network()
    expected = [torch.zeros_like(each) for each in module.parameters()]
    for x, y in zip(*tasks()[:2], strict=True):
        ends = descend(module, x, y, again=False)
        for total, start, end in zip(expected, module.parameters(), ends.values(), strict=True):
            total += (start - end).detach() / 3
    for given in (tasks(), tasks()[:2], list(zip(*tasks()[:2], strict=True))):
        module.zero_grad()
        Reptile(module, mse, 0.1, 2)(given).backward()
        for each, grad in zip(module.parameters(), expected, strict=True):
            torch.testing.assert_close(each.grad, grad)


def test_inner_state_and_clipping_are_separate_per_task() -> None:
    module = network()
    learner = MAML(module, mse, steps=3, optimizer=Adam(0.1), clip=0.05)
    together = learner(tasks())
    single = [learner(tuple(each[i : i + 1] for each in tasks())) for i in range(3)]
    torch.testing.assert_close(together, torch.stack(single).mean())


def test_adapt_to_one_task_matches() -> None:
    module = network()
    x, y = batch(3)
    for learner in (MAML(module, mse, 0.1, 2), FOMAML(module, mse, 0.1, 2), Reptile(module, mse, 0.1, 2)):
        torch.testing.assert_close(learner.adapt((x, y)), descend(module, x, y))
        torch.testing.assert_close(learner.adapt((x, y), steps=4), descend(module, x, y, steps=4))
        with torch.no_grad():
            assert not learner.adapt((x, y))["0.weight"].requires_grad


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [FOMAML, *(pytest.param(each, marks=pytest.mark.slow) for each in (MAML, ANIL, MetaSGD, Reptile))]
)
def test_compiled_meta_gradient_matches_eager(kind: type[MetaLearner]) -> None:
    if kind is MetaSGD and torch.__version__ < "2.13":
        pytest.skip("dynamo traces no copy.copy")
    learner = kind(network(), mse, 0.1, 2)
    point = {name: each.detach() for name, each in learner.named_parameters()}
    eager = torch.func.grad_and_value(lambda p, given: functional_call(learner, p, (given,)))
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(point, tasks()), eager(point, tasks()))


def test_adapt_works_in_inference_mode() -> None:
    module = network()
    expected = descend(module, *batch(3))
    with torch.inference_mode():
        adapted = MAML(module, mse, 0.1, 2).adapt(batch(3))
    torch.testing.assert_close({name: each.clone() for name, each in adapted.items()}, expected)


def test_batch_norm_in_transforms_matches() -> None:
    module = with_norm()
    learner = MAML(module, mse, 0.1, 2)
    point = {name: each.detach() for name, each in learner.named_parameters()}
    gradients = torch.func.grad(lambda p: functional_call(learner, p, (tasks(),)))(point)
    learner(tasks()).backward()
    for name, each in learner.named_parameters():
        torch.testing.assert_close(gradients[name], each.grad)


def test_higher_meta_gradients_match_in_transforms() -> None:
    module = network()
    learner = MAML(module, mse, 0.1, 1)
    names = [f"module.{name}" for name in learner.names]
    points = [each.detach().requires_grad_() for each in module.parameters()]

    def f(*leaves):
        return functional_call(learner, dict(zip(names, leaves, strict=True)), (tasks(2),))

    assert torch.autograd.gradcheck(f, points, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, points, atol=1e-4, fast_mode=True)
    points = [each.detach() for each in points]
    expected = torch.autograd.grad(reference(module, tasks(2), steps=1), list(module.parameters()))
    torch.testing.assert_close(torch.func.grad(f, argnums=tuple(range(4)))(*points), expected)


def test_frozen_unused_and_tied_parameters_match() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)
            self.second.weight = self.first.weight
            self.last.bias.requires_grad_(False)
            self.unused = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.second(self.first(x).tanh()).tanh())

    module = Tied().double()
    learner = MAML(module, mse, 0.1, 2)
    assert learner.names == ["unused", "first.weight", "first.bias", "second.bias", "last.weight"]
    module.unused.requires_grad_(False)
    expected = reference(module, tasks())
    grads = torch.autograd.grad(expected, [module.first.weight, module.last.weight])
    module.unused.requires_grad_(True)
    learner(tasks()).backward()
    torch.testing.assert_close((module.first.weight.grad, module.last.weight.grad), grads)
    assert module.last.bias.grad is None
    assert module.unused.grad is None


def with_norm(momentum: float | None = 0.1) -> nn.Module:
    norm = nn.BatchNorm1d(3, momentum=momentum)
    return nn.Sequential(nn.Linear(2, 3), norm, nn.Tanh(), nn.Linear(3, 1)).double()


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("policy", ["per-task", "shared", "frozen"])
@pytest.mark.parametrize("learner", [MAML, Reptile, IMAML])
@pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
def test_batch_norm_policies_update_statistics(policy: str, learner: type[MetaLearner], momentum: float | None) -> None:
    """Statistics with momentum None are means over all batches so far, and each task counts its own batches."""
    module = with_norm(momentum)
    module[1].num_batches_tracked += 0 if momentum else 4
    started = module[1].num_batches_tracked.item()
    module[1].running_mean += 0.5
    before = {name: each.clone() for name, each in module.named_buffers()}
    loss = learner(module, mse, 0.1, 2, batch_norm=policy)(tasks())
    loss.backward()
    assert module[1].training
    after = dict(module.named_buffers())
    if policy != "shared":
        for name, each in after.items():
            assert torch.equal(each, before[name])
        if learner is MAML:
            module.train(policy == "per-task")
            scratch = copy.deepcopy(module)
            torch.testing.assert_close(loss, reference(scratch, tasks()), check_device=False)
        return
    if learner is IMAML:
        return
    passes = 2 if learner is Reptile else 3
    assert after["1.num_batches_tracked"] == started + passes
    own = []
    for task in zip(*tasks(), strict=True):
        twin = copy.deepcopy(module)
        for name, each in twin.named_buffers():
            each.copy_(before[name])
        params = descend(twin, task[0], task[1])
        if passes == 3:
            functional_call(twin, params, (task[2],))
        own.append(twin[1].running_mean)
    torch.testing.assert_close(after["1.running_mean"], torch.stack(own).mean(0))


OPTIONS_OF_NORMS: dict[str, dict[str, Any]] = {
    "checkpointed": {"checkpoint": 1},
    "mixed": {"route": "forward-over-reverse"},
    "chunked": {"chunk_size": 1},
}


@pytest.mark.parametrize("policy", ["per-task", "shared", "frozen"])
@pytest.mark.parametrize("options", OPTIONS_OF_NORMS)
def test_cumulative_statistics_match_the_plain_loop(policy: str, options: str) -> None:
    """Recomputed steps do not count twice, and chunks of tasks do not continue each other's counts."""
    modules: list[nn.Module] = []
    gradients = []
    for chosen in ({}, OPTIONS_OF_NORMS[options]):
        torch.manual_seed(0)
        module = with_norm(None)
        MAML(module, mse, 0.1, 2, batch_norm=policy, **chosen)(tasks()).backward()
        modules.append(module)
        gradients.append([each.grad.clone() for each in module.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])
    plain, other = (dict(module.named_buffers()) for module in modules)
    torch.testing.assert_close(plain["1.num_batches_tracked"], other["1.num_batches_tracked"])
    torch.testing.assert_close(plain["1.running_mean"], other["1.running_mean"])
    torch.testing.assert_close(plain["1.running_var"], other["1.running_var"])


@pytest.mark.parametrize("policy", ["per-task", "frozen"])
def test_cumulative_statistics_in_transforms_match(policy: str) -> None:
    module = with_norm(None)
    learner, given = MAML(module, mse, 0.1, 2, batch_norm=policy), tasks()
    weights = {f"module.{name}": each.detach() for name, each in module.named_parameters()}
    learner(given).backward()
    expected = {name: each.grad for name, each in learner.named_parameters()}

    def meta_loss(weights: Tree) -> Tensor:
        return functional_call(learner, weights, (given,))

    torch.testing.assert_close(torch.func.grad(meta_loss)(weights), expected)


def test_batch_norm_in_evaluation_uses_running_statistics() -> None:
    module = with_norm().eval()
    assert_same_step(MAML(module, mse, 0.1, 2), tasks(), reference(module, tasks()))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [{}, {"checkpoint": 1}, {"route": "forward-over-reverse"}])
def test_dropout_with_a_generator_is_replayed(options: dict[str, Any]) -> None:
    module = nn.Sequential(nn.Linear(2, 6), nn.Dropout(0.4), nn.Linear(6, 1)).double()
    support_x, support_y, *_ = tasks()

    def f(weight: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(5)
        learner = MAML(module, mse, 0.1, 2, generator=generator, **options)
        params = functional_call_adapt(learner, {"module.0.weight": weight}, (support_x, support_y))
        return params.square().sum()

    assert torch.autograd.gradcheck(f, [module[0].weight])


def functional_call_adapt(learner: MetaLearner, replaced: Tree, support: tuple[Tensor, Tensor]) -> Tensor:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.learner = learner

        def forward(self) -> Tensor:
            return self.learner.adapt_all(support).params["2.weight"]

    return functional_call(Adapted(), {f"learner.{name}": each for name, each in replaced.items()}, ())


def test_tasks_draw_their_own_dropout() -> None:
    module = nn.Sequential(nn.Linear(2, 6), nn.Dropout(0.4), nn.Linear(6, 1)).double()
    same = tuple(each[:1].expand(2, *each.shape[1:]) for each in tasks())
    adapted = MAML(module, mse, 0.1).adapt_all(same[:2]).params["0.weight"]
    assert not torch.equal(adapted[0], adapted[1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_modules_match(kind: type[nn.Module]) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.last = kind(2, 3, batch_first=True), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.cell(x)[0][:, -1])

    module = Reader().double()
    given = (draw(2, 4, 3, 2), draw(2, 4, 1, seed=1), draw(2, 4, 3, 2, seed=2), draw(2, 4, 1, seed=3))
    assert_same_step(MAML(module, mse, 0.5, 2), given, reference(module, given, lr=0.5))


def test_convolutions_with_cross_entropy_match() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)).double()
    x = draw(2, 4, 1, 6, 6)
    y = torch.arange(8).view(2, 4) % 3
    expected = []
    for i in range(2):
        params = dict(module.named_parameters())
        loss = F.cross_entropy(functional_call(module, params, (x[i],)), y[i])
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        params = {name: each - 0.1 * grad for (name, each), grad in zip(params.items(), grads, strict=True)}
        expected.append(F.cross_entropy(functional_call(module, params, (x[i],)), y[i]))
    assert_same_step(MAML(module, F.cross_entropy, 0.1), (x, y, x, y), torch.stack(expected).mean())


def quadratic_tasks() -> tuple[nn.Module, Tasks]:
    """Return a linear regression, whose support losses have constant Hessians, and its tasks."""
    module = nn.Linear(2, 1, bias=False).double()
    return module, tasks()


def exact_implicit(module: nn.Module, given: Tasks, strength: float) -> tuple[Tensor, Tensor]:
    """Compute the loss and the meta-gradient by dense linear algebra."""
    start, losses, total = module.weight.detach().flatten(), [], torch.zeros(2, dtype=torch.float64)
    for x, y, query_x, query_y in zip(*given, strict=True):
        H, b = 2 * x.T @ x / len(x), 2 * x.T @ y.flatten() / len(x)
        shifted = H + strength * torch.eye(2, dtype=torch.float64)
        end = torch.linalg.solve(shifted, b + strength * start)
        rest = query_x @ end - query_y.flatten()
        losses.append(rest.square().mean())
        total += strength * torch.linalg.solve(shifted, 2 * query_x.T @ rest / len(rest)) / 3
    return torch.stack(losses).mean(), total


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_imaml_matches_the_exact_implicit_gradient(chunk_size: int | None) -> None:
    module, given = quadratic_tasks()
    learner = IMAML(module, mse, 0.1, 300, strength=0.7, cg_tolerance=1e-12, chunk_size=chunk_size)
    loss = learner(given)
    (3 * loss).backward()
    expected, gradient = exact_implicit(module, given, 0.7)
    torch.testing.assert_close(loss.detach(), expected)
    torch.testing.assert_close(module.weight.grad.flatten(), 3 * gradient)
    assert learner.residual.shape == (3,)
    assert (learner.residual <= 1e-12).all()


def test_unconverged_imaml_warns() -> None:
    module, given = quadratic_tasks()
    with pytest.warns(HodiffWarning, match="IMAML: conjugate gradients stopped at a relative residual"):
        loss = IMAML(module, mse, 0.1, 5, strength=0.1, cg_steps=1)(given)
    # For higher derivatives, a second warning reports how far the inner loop is from its minimum.
    with pytest.warns(HodiffWarning) as told:
        torch.autograd.grad(loss, module.weight, create_graph=True)
    messages = [str(each.message) for each in told]
    assert any("the solver's result does not solve the equation" in each for each in messages)


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", [{}, {"checkpoint": 1}, {"route": "forward-over-reverse"}])
def test_memory_of_meta_steps_is_constant(options: dict[str, Any]) -> None:
    """The garbage collector is off, so reference cycles would accumulate."""
    steps = 50 if options else 300
    module = nn.Linear(2, 1).double()
    learner = MAML(module, mse, 0.1, **options)
    optimizer = torch.optim.SGD(learner.parameters(), 1e-3)
    counts = []
    gc.collect()
    gc.disable()
    try:
        for step in range(steps):
            optimizer.zero_grad()
            learner(tasks_once).backward()
            optimizer.step()
            if step in {10, steps - 1}:
                counts.append(sum(map(is_tensor_module_or_of_hodiff, gc.get_objects())))
    finally:
        gc.enable()
    assert counts[1] == counts[0]


def is_tensor_module_or_of_hodiff(each: object) -> bool:
    """Whether the object is a tensor, a module or from hodiff; torch's pytrees leave cycles of functions behind."""
    kind = type(each)
    return isinstance(kind, type) and (
        issubclass(kind, (Tensor, nn.Module)) or str(kind.__module__).startswith("hodiff")
    )


tasks_once = tasks(2)


def test_training_lowers_the_loss() -> None:
    module = network()
    learner = MAML(module, mse, 0.1)
    optimizer = torch.optim.Adam(learner.parameters(), 1e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = learner(tasks_once)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def no_gradient(prediction: Tensor, target: Tensor) -> Tensor:
    return mse(prediction.detach(), target)


def only_inner() -> Callable[[Tensor, Tensor], Tensor]:
    calls = itertools.count()
    return lambda p, y: mse(p if next(calls) == 0 else p.detach(), y)


class Scaled(nn.Module):
    """A module with a zero-dimensional parameter and a buffer that it reassigns."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.register_buffer("last", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.mean()
        return self.scale * x.sum(-1, keepdim=True)


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 2)
        self.head.weight = self.body.weight


def test_assigned_buffers_are_restored() -> None:
    module = Scaled()
    MAML(module, mse, 0.1)(tasks()).backward()
    assert torch.equal(module.last, torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize("kind", [MAML, IMAML, Reptile])
def test_generator_also_draws_for_the_query(kind: type[MetaLearner]) -> None:
    module = nn.Sequential(nn.Linear(2, 6), nn.Dropout(0.4), nn.Linear(6, 1)).double()

    def losses() -> list[Tensor]:
        options: dict[str, Any] = {"strength": 1e3} if kind is IMAML else {}
        learner = kind(module, mse, 1e-4, generator=torch.Generator().manual_seed(3), **options)
        return [learner(tasks()).detach() for _ in range(2)]

    first, second = losses()
    torch.manual_seed(17)
    state = torch.get_rng_state()
    assert losses() == [first, second]
    assert first != second
    assert torch.equal(torch.get_rng_state(), state)


def test_learners_with_clipping_are_picklable() -> None:
    learner = MAML(network(), mse, 0.1, clip=0.5)
    torch.testing.assert_close(pickle.loads(pickle.dumps(learner))(tasks()), learner(tasks()))


def test_modules_that_vmap_rejects_match_a_loop() -> None:
    """Spectral norm writes its vectors with out=, which has no batching rule in torch."""

    torch.manual_seed(0)
    module = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 1).double())
    assert_same_step(MAML(module, mse, 0.1, 2), tasks(), reference(module, tasks()))


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "module": (lambda: MAML(3, mse), InputError, "MAML: module: expected an nn.Module"),
    "loss": (lambda: MAML(network(), 3), InputError, "MAML: loss"),
    "frozen": (lambda: FOMAML(network().requires_grad_(False), mse), InputError, "FOMAML: module: expected parameters"),
    "policy": (lambda: MAML(network(), mse, batch_norm="no"), InputError, "batch_norm: expected one of 'per-task'"),
    "chunk": (lambda: MAML(network(), mse, chunk_size=0), InputError, "chunk_size"),
    "head": (lambda: ANIL(network(), mse, head="3"), InputError, "ANIL: head: .*'3'"),
    "first order twice": (lambda: FOMAML(network(), mse, first_order=False), TypeError, "'first_order'"),
    "rates and an optimizer": (lambda: MetaSGD(network(), mse, optimizer=SGD(0.1)), InputError, "MetaSGD: optimizer"),
    "rates": (lambda: MetaSGD(network(), mse, torch.ones(())), InputError, "MetaSGD: lr"),
    "strength": (lambda: IMAML(network(), mse, strength=0.0), InputError, "IMAML: strength"),
    "parts": (lambda: MAML(network(), mse)(tasks()[:3]), InputError, "MAML: tasks: .*query_y.*3 parts"),
    "tensor": (lambda: MAML(network(), mse)(draw(3)), InputError, "MAML: tasks: expected a tuple"),
    "counts": (lambda: MAML(network(), mse)((*tasks(3)[:2], *tasks(2)[2:])), InputError, "same number of tasks"),
    "no tasks": (lambda: MAML(network(), mse)([]), InputError, "at least one task"),
    "in a list": (lambda: MAML(network(), mse)([tasks(), 3]), InputError, r"tasks\[1\]"),
    "steps": (lambda: MAML(network(), mse, steps=-1), InputError, "MAML: steps"),
    "cg steps": (lambda: IMAML(network(), mse, cg_steps=0), InputError, "IMAML: cg_steps"),
    "cg tolerance": (lambda: IMAML(network(), mse, cg_tolerance="1"), InputError, "IMAML: cg_tolerance"),
    "independent": (lambda: MAML(network(), no_gradient)(tasks()), InputError, "depends on the parameters"),
    "vector loss": (
        lambda: MAML(network(), lambda a, b: (a - b) ** 2)(tasks()),
        InputError,
        r"MAML: loss: .*shape \(\)",
    ),
    "rate of a shape": (lambda: MAML(network(), mse, torch.ones(7))(tasks()), InputError, r"SGD: lr: .*params\['0"),
    "rate for each task": (lambda: MAML(Scaled(), mse, torch.ones(3))(tasks()), InputError, r"SGD: lr: .*scale"),
    "a tied head": (
        lambda: ANIL(TiedHead(), mse, head="head"),
        InputError,
        "ANIL: head: .*'head.weight', which is tied",
    ),
    "unreached": (lambda: MAML(network(), only_inner())(tasks()), InputError, "query loss that depends"),
    "nan": (lambda: MAML(network(), mse, 1e200, 3)(tasks()), NonFiniteError, r"step \d of 3: .*params\['"),
}


@pytest.mark.parametrize("case", BAD)
def test_rejects_bad_arguments(case: str) -> None:
    call, kind, match = BAD[case]
    with pytest.raises(kind, match=match):
        call()


@pytest.mark.slow
def test_thousand_steps_fit_in_a_gigabyte() -> None:
    """The peak memory of a subprocess grows by about 600 MB without segments and about 30 MB with them."""
    import subprocess
    import sys

    run = subprocess.run([sys.executable, "-c", THOUSAND_STEPS], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    before, after = map(float, run.stdout.split())
    assert after - before < 200e3  # kilobytes


THOUSAND_STEPS = """
import resource, torch
from torch import nn
from torch.func import functional_call
from sklearn.datasets import load_digits
from hodiff.meta import SGD, adapt
torch.set_num_threads(1)
pixels, labels = load_digits(return_X_y=True)
x, y = torch.tensor(pixels[:64] / 16).float().view(-1, 1, 8, 8), torch.tensor(labels[:64])
net = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))
loss = lambda p, b: nn.functional.cross_entropy(functional_call(net, p, (b[0],)), b[1])
params = dict(net.named_parameters())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
end = adapt(loss, params, (x, y), SGD(0.05), 1000, checkpoint=32)
loss(end, (x, y)).backward()
assert all(p.grad.isfinite().all() and p.grad.any() for p in net.parameters())
print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.parametrize("cls", [MAML, FOMAML, ANIL, MetaSGD, IMAML, Reptile])
def test_signatures_name_every_option(cls: Any) -> None:
    named = {each.name: each.default for each in inspect.signature(cls).parameters.values()}
    shared = {"route": "auto", "batch_norm": "per-task", "chunk_size": None, "check_finite": True, "optimizer": None}
    assert {name: named.get(name) for name in shared} == shared
    assert ("first_order" in named) == (cls is not FOMAML)
    assert "options" not in named
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'chunksize'"):
        cls(network(), mse, chunksize=3)


@pytest.mark.parametrize("cls", [MAML, FOMAML, ANIL, MetaSGD, IMAML, Reptile])
def test_docstrings_explain_every_option(cls: Any) -> None:
    text = inspect.getdoc(cls) or ""
    named = [name for name, each in inspect.signature(cls).parameters.items() if each.kind is each.KEYWORD_ONLY]
    assert {name: text.count(f"\n    {name}: ") for name in named} == dict.fromkeys(named, 1)
    assert "**options" not in text


NO_SUCH = {
    "optimizer": ["SGD", torch.optim.SGD],
    "checkpoint": [0, 1.0, "2"],
    "truncate": [-1, True],
    "clip": [-1.0, 0.0, math.nan, "1", torch.tensor(-1.0), torch.ones(2), len],
    "route": ["reverse", None],
    "batch_norm": ["no"],
    "chunk_size": [0, "auto"],
    "generator": [3],
    "check_finite": ["no"],
    "first_order": ["no", 1],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NO_SUCH.items() for value in values])
@pytest.mark.parametrize("cls", [MAML, ANIL, MetaSGD, Reptile, IMAML])
def test_learner_rejects_bad_options(cls, name, value):
    with pytest.raises(InputError, match=f"^{cls.__name__}: {name}: expected"):
        cls(network(), mse, **{name: value})


def test_every_option_is_tested_with_a_bad_value():
    named = [each.name for each in inspect.signature(MAML).parameters.values() if each.kind is each.KEYWORD_ONLY]
    assert set(named) == set(NO_SUCH)


ADAPT = {
    "clip": [-1.0, 0.0, "1", torch.tensor(-1.0)],
    "generator": [3],
    "first_order": ["no"],
    "check_finite": ["no"],
    "correct": ["no"],
    "history": [1],
    "progress": ["yes"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in ADAPT.items() for value in values])
def test_adapt_rejects_bad_options(name, value):
    with pytest.raises(InputError, match=f"^adapt: {name}: expected"):
        adapt(lambda w, batch: (w * w).sum(), torch.ones(2), None, SGD(0.1), 1, **{name: value})
