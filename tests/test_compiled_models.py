"""Models and functions compiled by torch.compile: hodiff differentiates the original function.

The backend raises if it is asked to compile, so a derivative proves that no compiled code ran in it.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff.optim import AdaHessian, HessianFree, LayerwiseGaussNewton, NewtonCG, SophiaG, SophiaH
from hodiff.optimize import minimize
from hodiff.torch_internals.compilers import dynamo
from hodiff.torch_internals.compilers.dynamo import compiled_code

# Optimizers of other tests that are not yet garbage collected may warn here.
pytestmark = pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
D = torch.float64
X, V = torch.tensor([0.3, -0.8, 1.2], dtype=D), torch.tensor([1.0, 2.0, -1.0], dtype=D)


def raise_if_compiled(graph: Any, inputs: Any, **_: Any) -> Any:
    raise AssertionError("compiled")


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend=raise_if_compiled, **options)


@pytest.fixture(autouse=True)
def _fresh_caches() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def energy(x: Tensor) -> Tensor:
    return (x.sin() * x.exp()).sum() + x.pow(3).sum() * x[0]


def pair(x: Tensor) -> Tensor:
    return torch.stack([x[0] * x[1], x[1].sin() * x[2]])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(D)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 3, dtype=D, generator=generator), torch.randn(8, 2, dtype=D, generator=generator)


# Derivatives of a function of a vector of three elements
OF_SCALARS: dict[str, Callable[[Any], Any]] = {
    **{f"hvp {route}": lambda f, route=route: hodiff.hvp(f, X, V, route=route) for route in hodiff.ROUTES},
    "hvp without corrections": lambda f: hodiff.hvp(f, X, V, correct=False),
    "value_grad_hvp": lambda f: hodiff.value_grad_hvp(f, X, V)[2],
    "hessian": lambda f: hodiff.hessian(f)(X),
    "hessian_matrix": lambda f: hodiff.hessian_matrix(f, X),
    "hessian_diagonal": lambda f: hodiff.hessian_diagonal(f)(X),
    "laplacian": lambda f: hodiff.laplacian(f)(X),
    "laplacian without corrections": lambda f: hodiff.laplacian(f, correct=False)(X),
    "directional_derivatives": lambda f: hodiff.directional_derivatives(f, X, V, order=3)[3],
    "HessianOperator": lambda f: hodiff.HessianOperator(f, X) @ V,
    "HessianOperator.to_dense": lambda f: hodiff.HessianOperator(f, X).to_dense(),
    "sparse.hessian": lambda f: hodiff.sparse.hessian(f)(X).to_dense(),
    "sparse.hessian_pattern": lambda f: torch.from_numpy(hodiff.sparse.hessian_pattern(f, X).toarray()),
    "minimize": lambda f: torch.as_tensor(minimize(lambda x: f(x) + x.pow(4).sum(), X, options={"maxiter": 3}).x),
    "vmap of hvp": lambda f: vmap(lambda x: hodiff.hvp(f, x, V))(torch.stack([X, 2 * X])),
    "grad of laplacian": lambda f: grad(hodiff.laplacian(f))(X),
    "torch.func within corrected": lambda f: hodiff.corrected(torch.func.hessian(f))(X),
    "checkpoint": lambda f: hodiff.hvp(lambda x: hodiff.functions.checkpoint(f, x), X, V),
    "torch's checkpoint": lambda f: hodiff.hvp(lambda x: checkpoint(f, x, use_reentrant=False), X, V),
    "torch's checkpoint without corrections": lambda f: hodiff.hvp(
        lambda x: checkpoint(f, x, use_reentrant=False), X, V, correct=False
    ),
    "check": lambda f: torch.tensor(hodiff.check(f, X, scipy=False, vmap=False).ok),
    "preflight": lambda f: torch.tensor(hodiff.preflight(f, X).ok),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("take", OF_SCALARS.values(), ids=OF_SCALARS)
def test_derivatives_of_compiled_scalar_functions_match(take):
    torch.testing.assert_close(take(compiled(energy)), take(energy), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "take",
    [
        lambda f: hodiff.jacobian(f)(X),
        lambda f: hodiff.jacobian(f, mode="forward")(X),
        lambda f: hodiff.jacobian(f, correct=False)(X),
        lambda f: hodiff.JacobianOperator(f, X).to_dense(),
        lambda f: hodiff.sparse.jacobian(f)(X).to_dense(),
        lambda f: torch.as_tensor(hodiff.optimize.least_squares(f, X, max_nfev=3).x),
    ],
)
def test_derivatives_of_compiled_vector_functions_match(take):
    torch.testing.assert_close(take(compiled(pair)), take(pair), rtol=1e-12, atol=1e-12)


def _in_place(module: nn.Module) -> nn.Module:
    module.compile(backend=raise_if_compiled)
    return module


def _compile_first_layer(module: nn.Module) -> nn.Module:
    module[0] = compiled(module[0], fullgraph=True)
    return module


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch.compile": compiled,
    "fullgraph": lambda module: compiled(module, fullgraph=True),
    "dynamic": lambda module: compiled(module, dynamic=True),
    "reduce-overhead": lambda module: compiled(module, mode="reduce-overhead"),
    "module.compile": _in_place,
    "a submodule": _compile_first_layer,
}
MODELS: dict[str, Callable[[Any, Any], Any]] = {
    "hessian_matrix": lambda f, loss: hodiff.hessian_matrix(lambda p: loss(f(p, data()[0]), data()[1]), _point(f)),
    "GaussNewtonOperator": lambda f, loss: hodiff.GaussNewtonOperator(f, loss, _point(f), data=[data()]).to_dense(),
    "EmpiricalFisherOperator": lambda f, loss: hodiff.EmpiricalFisherOperator(
        f, loss, _point(f), data=[data()]
    ).to_dense(),
}


class _Called:
    """A module as a function of its parameters and input."""

    def __init__(self, module: nn.Module):
        self.module = module

    def __call__(self, parameters: Any, x: Tensor) -> Tensor:
        return functional_call(self.module, parameters, (x,))


def _point(f: _Called) -> dict[str, Tensor]:
    return {name: each.detach() for name, each in f.module.named_parameters()}


@pytest.mark.parametrize("take", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_operators_of_compiled_models_match(way, take):
    found = take(_Called(way(model())), compiled(mse_loss))
    torch.testing.assert_close(found, take(_Called(model()), mse_loss), rtol=1e-12, atol=1e-12)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", [compiled, _compile_first_layer])
def test_check_of_compiled_models_passes(way):
    loss = compiled(mse_loss)
    report = hodiff.check(way(model()), data()[0][:2], loss=lambda y: loss(y, data()[1][:2]))
    assert report.ok, str(report)


def test_kfac_of_a_compiled_model_matches():
    module = _in_place(model())
    found = hodiff.KFACOperator(module, compiled(mse_loss), dict(module.named_parameters()), data=[data()]).to_dense()
    plain = model()
    expected = hodiff.KFACOperator(plain, mse_loss, dict(plain.named_parameters()), data=[data()]).to_dense()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("build", [hodiff.GaussNewtonOperator, hodiff.KFACOperator])
def test_compiled_module_with_names_of_its_original(build):
    plain = model()
    x = dict(plain.named_parameters())
    found = build(compiled(plain), mse_loss, x, *data()).to_dense()
    torch.testing.assert_close(found, build(plain, mse_loss, x, *data()).to_dense())
    with pytest.raises(hodiff.InputError, match=r"names of the module's parameters, got unknown w; pass dict"):
        build(compiled(plain), mse_loss, {"w": torch.ones(1)}, *data())


# Optimizers that need curvature at each step never run compiled code.
EACH_STEP: dict[str, Callable[[Any], Any]] = {
    "SophiaH": lambda p: SophiaH(p, lr=0.01, update_every=1),
    "SophiaG": lambda p: SophiaG(p, lr=0.01, update_every=1),
    "AdaHessian": lambda p: AdaHessian(p, lr=0.01),
    "KFAC": lambda p: hodiff.optim.KFAC(p, lr=0.01, update_every=1),
}


def _labels() -> Tensor:
    return torch.tensor([0, 1, 1, 0, 1, 0, 0, 1])


def _trained(make: Callable[[Any], Any], way: Callable[[Any], Any], loss: Any, *, closure: bool) -> Tensor:
    module = model()
    called = way(module)
    optimizer = make(module.parameters())

    def evaluated() -> Tensor:
        optimizer.zero_grad()
        return loss(called(data()[0]), _labels())

    for _ in range(2):
        if closure:
            optimizer.step(evaluated)
        else:
            evaluated().backward()
            optimizer.step()
    return torch.cat([each.detach().flatten() for each in module.parameters()])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("closure", [False, True], ids=["backward", "closure"])
@pytest.mark.parametrize(
    "way", [compiled, _in_place, _compile_first_layer], ids=["torch.compile", "module.compile", "a submodule"]
)
@pytest.mark.parametrize("make", EACH_STEP.values(), ids=EACH_STEP)
def test_optimizers_of_compiled_models_match(make, way, closure):
    expected = _trained(make, lambda module: module, cross_entropy, closure=closure)
    torch.testing.assert_close(_trained(make, way, compiled(cross_entropy), closure=closure), expected)


@pytest.mark.parametrize("make", [NewtonCG, HessianFree, LayerwiseGaussNewton])
def test_second_order_solvers_of_compiled_models_match(make):
    def trained(way: Callable[[Any], Any]) -> Tensor:
        module = model()
        called, loss, optimizer = way(module), way(cross_entropy), make(module.parameters())
        x, labels = data()[0], _labels()
        if make is NewtonCG:
            optimizer.step(lambda: loss(called(x), labels))
        else:
            optimizer.step(lambda: (called(x), lambda outputs: loss(outputs, labels)))
        return torch.cat([each.detach().flatten() for each in module.parameters()])

    torch.testing.assert_close(trained(compiled), trained(lambda each: each))


def test_steps_without_curvature_run_compiled():
    counted: list[int] = []

    def count(graph: Any, inputs: Any) -> Any:
        counted.append(1)
        return graph.forward

    module = model()
    called = torch.compile(module, backend=count)
    optimizer = SophiaH(module.parameters(), update_every=3)
    made = []
    for _ in range(4):
        optimizer.zero_grad()
        mse_loss(called(data()[0]), data()[1]).backward()
        optimizer.step()
        made.append(len(counted))
    assert made == [0, 1, 1, 1]


@pytest.mark.slow
def test_graph_recorded_by_compiled_code_is_rejected():
    module = model()
    called = torch.compile(module, backend="aot_eager")
    optimizer = SophiaH(module.parameters(), update_every=None)
    with pytest.raises(hodiff.RouteError, match=r'SophiaH: .*with torch\.compiler\.set_stance\("force_eager"\):'):
        optimizer.update_curvature(mse_loss(called(data()[0]), data()[1]))
    with torch.compiler.set_stance("force_eager"):
        optimizer.update_curvature(mse_loss(called(data()[0]), data()[1]))
    factored = hodiff.optim.KFAC(module.parameters(), update_every=None)
    with pytest.raises(hodiff.InputError, match=r'KFAC: .*with torch\.compiler\.set_stance\("force_eager"\):'):
        factored.update_curvature(mse_loss(called(data()[0]), data()[1]))


def test_compiled_code_outside_hodiff_runs_compiled():
    counted: list[str] = []

    def count(graph: Any, inputs: Any) -> Any:
        counted.append(threading.current_thread().name)
        return graph.forward

    f = torch.compile(energy, backend=count)
    hodiff.hvp(f, X, V)
    assert not counted
    f(X)
    assert len(counted) == 1

    def meanwhile(x: Tensor) -> Tensor:
        # A call in another thread is not affected by this thread's derivative.
        thread = threading.Thread(target=f, args=(X[:2],), name="other")
        thread.start()
        thread.join()
        return f(x)

    hodiff.hvp(meanwhile, X, V)
    assert set(counted[1:]) == {"other"}
    with hodiff.corrected():
        f(torch.ones(4, dtype=D))
    assert counted[-1] == "MainThread"


def test_stance_of_the_user_is_kept():
    f = compiled(energy)
    with torch.compiler.set_stance("force_eager"):
        hodiff.hvp(f, X, V)
        f(X)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        f(X)
    with torch.compiler.set_stance("fail_on_recompile"):
        hodiff.hvp(f, X, V)
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            f(X)


@pytest.mark.parametrize("first", [True, False])
def test_one_call_of_compiled_code_has_one_answer(monkeypatch, first):
    """Observers may be garbage-collected while a call asks for them, and dynamo asks several times."""
    f = compiled(energy)
    hodiff.hvp(f, X, V)
    answers = itertools.chain([first], itertools.cycle([not first, first]))
    monkeypatch.setattr(dynamo, "_askers", [lambda: next(answers)])
    for _ in range(3):
        # The compiler of these tests fails, so a call that succeeds ran the original function.
        with contextlib.suppress(torch._dynamo.exc.BackendCompilerFailed):
            f(X)


def test_torch_cond_inside_a_compiled_function_matches():
    weight = torch.tensor(2.0, dtype=D)

    def f(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin() * weight, lambda x: x.cos() * weight, (x,)).pow(2).sum()

    torch.testing.assert_close(hodiff.jacobian(compiled(f))(X), 8 * X.sin() * X.cos())
    # Torch must compile the operator first, or it loses the gradient by tensors that a branch closes over.
    weight.requires_grad_()
    with compiled_code(runs=False):
        f(X).backward()
    torch.testing.assert_close(weight.grad, 4 * X.sin().square().sum())


@pytest.mark.slow
def test_compiled_function_inside_compiled_code_matches():
    inner = torch.compile(lambda x: nn.functional.layer_norm(x, (3,))[0], backend="aot_eager")
    plain = lambda x: nn.functional.layer_norm(x, (3,))[0]  # noqa: E731
    expected = hodiff.hvp(plain, X, V)
    outer = torch.compile(hodiff.corrected(inner), backend="aot_eager")
    torch.testing.assert_close(grad(lambda x: jvp(outer, (x,), (V,))[1])(X), expected)
    whole = torch.compile(lambda x: hodiff.hvp(inner, x, V), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(whole(X), expected)


def test_custom_rules_of_compiled_functions_are_used():
    ten = hodiff.custom_jvp(compiled(torch.Tensor.sin))

    @ten.defjvp
    def _rule(primals, tangents):
        return ten(*primals), 10 * tangents[0]

    twenty = hodiff.custom_vjp(compiled(torch.Tensor.sin))
    twenty.defvjp(lambda x: (twenty(x), ()), lambda _, cotangent: (20 * cotangent,))
    for function, slope in ((ten, 10), (twenty, 20)):
        leaf = X.clone().requires_grad_()
        whole = torch.compile(lambda x, function=function: function(x).sum(), backend="aot_eager")
        torch.testing.assert_close(torch.autograd.grad(whole(leaf), leaf)[0], torch.full_like(X, slope))


def test_deepcopies_and_implicit_functions_match():
    root = hodiff.implicit.root(compiled(lambda x, a: x**2 - a), lambda residual, x0, a: a.sqrt())
    a = torch.tensor([2.0, 3.0], dtype=D, requires_grad=True)
    (found,) = torch.autograd.grad(root(torch.ones(2, dtype=D), a).sum(), a)
    torch.testing.assert_close(found, 0.5 / a.detach().sqrt())
    tasks = [each.reshape(2, 4, -1) for each in (*data(), *data())]
    gradients = []
    for module in (compiled(model()), copy.deepcopy(model())):
        learner = hodiff.meta.MAML(module, mse_loss, 0.1, steps=2)
        learner(tuple(tasks)).mean().backward()
        gradients.append(torch.cat([each.grad.flatten() for each in learner.parameters()]))
    torch.testing.assert_close(*gradients)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_operators_of_compiled_functions_match():
    f = compiled(energy)
    torch.testing.assert_close(hodiff.HessianOperator(f, X, compile=True) @ V, hodiff.hvp(energy, X, V))
    torch.testing.assert_close(hodiff.compile_gradient(f)(X), grad(energy)(X))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("f", [lambda x: x.pow(3), torch.sin])
def test_check_with_inductor_passes(f):
    # Inductor's kernels read zeros that forward mode keeps without memory, which crashed the process.
    assert hodiff.check(f, X[:2], compile=True, vmap=False, scipy=False).ok
