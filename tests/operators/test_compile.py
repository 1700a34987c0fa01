"""Compiled products equal eager products, are captured once for each form, and fall back to eager on problems."""

import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import ravel
from operators.cases import MODELS, close, problem
from slow_cases import thinned_pairs
from torch import Tensor, fx, nn
from torch.func import functional_call

import hodiff
from hodiff.checks.torch_warnings import silence_torch_warnings
from hodiff.operators import EmpiricalFisherOperator, FisherOperator, GaussNewtonOperator, HessianOperator
from hodiff.operators.compiled import product_graphs as compiled_graphs

KINDS = {
    "hessian": lambda p, **o: HessianOperator(p.objective(), p.x, **o),
    "gauss-newton": lambda p, **o: GaussNewtonOperator(p.model, p.loss.function, p.x, **o),
    "fisher": lambda p, **o: FisherOperator(p.model, p.loss.function, p.x, samples=2, **o),
    "empirical": lambda p, **o: EmpiricalFisherOperator(p.model, p.loss.function, p.x, **o),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with silence_torch_warnings():
        yield


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """Run the graphs uncompiled, to test capture, partition and batching quickly."""
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, inputs: Any, **_: Any) -> fx.GraphModule:
        graphs.append(graph)
        # The compiler lowers a view to a reshape, so it accepts strides that the trace did not foresee.
        for node in graph.graph.nodes:
            if node.target is torch.ops.aten.view.default:
                node.target = torch.ops.aten.reshape.default
        graph.recompile()
        return graph

    monkeypatch.setattr(compiled_graphs, "compile_graph", keep)
    # Always run blocks as blocks, however slow.
    monkeypatch.setattr(compiled_graphs, "GAIN", 0.0)
    return graphs


def test_forward_mode_inside_the_function_matches(compilations: list[fx.GraphModule]) -> None:
    """The derivatives contain zeros without storage, which compiled code would read."""

    def f(x: Tensor) -> Tensor:
        return torch.func.jvp(torch.func.grad(lambda y: (y**4).sum()), (x,), (torch.ones_like(x),))[1].square().sum()

    x, v = torch.linspace(1, 2, 5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    torch.testing.assert_close(HessianOperator(f, x, compile=True) @ v, 1728 * x**2)
    assert compilations


# The model decides which operators are captured, and the kind what surrounds them: every model meets the Hessian and
# one other kind. The tests below capture every kind for one model.
PAIRS = [(name, "hessian") for name in MODELS] + thinned_pairs(MODELS, list(KINDS)[1:], by=3)


@pytest.mark.one_in(18)
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_captured_graphs_match_eager(kind: str, name: str, compilations: list[Any]) -> None:
    p = problem(name)
    A, B = (KINDS[kind](p, data=p.batches(2), compile=compile) for compile in (True, False))
    expected = B.to_dense()
    close(A.to_dense(), expected)
    for columns in (1, 8, 11):
        V = torch.randn(A.shape[0], columns).double()
        close(A @ V, expected @ V)
    close(ravel(A @ p.x), ravel(B @ p.x))
    assert (A @ torch.ones(A.shape[0], 0).double()).shape == (A.shape[0], 0)
    # One graph for a vector and one for a block, for each of the two batch lengths.
    assert len(compilations) == 4


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_serves_all_points(kind: str, compilations: list[Any]) -> None:
    p = problem("mlp")
    A = KINDS[kind](p, data=p.batches(), compile=True)
    A.to_dense()
    assert len(compilations) == 1
    for step in (0.5, -1.0):
        moved = {key: value + step for key, value in p.x.items()}
        other = A.at(moved)
        eager = KINDS[kind](p, data=p.batches()).at(moved)
        close(other.to_dense(), eager.to_dense())
        v = torch.randn(A.shape[0]).double()
        close(other @ v, eager @ v)
    # The graph for one vector is compiled on first use.
    assert len(compilations) == 2


def test_batches_of_one_shape_share_a_graph(compilations: list[Any]) -> None:
    p = problem("mlp")
    A = HessianOperator(p.objective(), p.x, data=p.batches(1, 2, 3, 4), compile=True, cache=False)
    v = torch.randn(A.shape[0]).double()
    for _ in range(2):
        close(A @ v, p.hessian() @ v)
    assert len(compilations) == 1


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_use_changed_closure_variables(kind: str, compilations: list[Any]) -> None:
    """Graphs see changes of a hyperparameter, a mode and tensors between points, as in a training loop."""
    p = problem("mlp")
    scale, shift, drop = 1.0, torch.zeros(3).double(), nn.Dropout(0.5).eval()
    model, loss = p.model, p.loss.function

    class Scaled(nn.Module):
        def forward(self, x: Any, inputs: Tensor) -> Tensor:
            outputs = functional_call(model, x, (inputs,))
            return (scale * outputs + shift) * (1 if self.training else 3)

    scaled = Scaled()

    def make(**options: Any) -> Any:
        if kind == "hessian":
            return HessianOperator(lambda x: loss(drop(scaled(x, p.inputs)), p.targets), p.x, **options)
        others = {"fisher": FisherOperator, "empirical": EmpiricalFisherOperator, "gauss-newton": GaussNewtonOperator}
        options |= {"samples": 2} if kind == "fisher" else {}
        return others[kind](lambda x, inputs: drop(scaled(x, inputs)), loss, p.x, p.inputs, p.targets, **options)

    A = make(compile=True)
    v = torch.randn(A.shape[0]).double()

    def agrees() -> None:
        close(A.at(p.x) @ v, make() @ v)

    agrees()
    made = len(compilations)
    shift = torch.tensor([0.5, -1.0, 2.0]).double()
    agrees()
    shift.data.mul_(2)
    agrees()
    assert len(compilations) == made
    scale = 2.0
    agrees()
    scaled.eval()
    agrees()
    assert len(compilations) == made + 2
    scale, _ = 1.0, scaled.train()
    agrees()
    assert len(compilations) == made + 2


def test_blocks_of_parameters_match(compilations: list[Any]) -> None:
    p = problem("mlp")
    H = p.hessian()
    block = HessianOperator(p.objective(), p.x, (p.inputs, p.targets), compile=True).block("2")
    close(block.to_dense(), H[12:, 12:])
    moved = {key: value + 0.1 for key, value in block.x.items()}
    whole = dict(p.x) | {key: p.x[key] + 0.1 for key in ("2.weight", "2.bias")}
    close(
        block.at(moved).to_dense(), HessianOperator(p.objective(), whole, (p.inputs, p.targets)).block("2").to_dense()
    )
    assert len(compilations) == 1


@pytest.mark.one_in(4)
@pytest.mark.parametrize("route", ["reverse-over-reverse", "forward-over-reverse", "reverse-over-forward"])
def test_routes_match(route: str, compilations: list[Any]) -> None:
    p = problem("mlp")
    A = HessianOperator(p.objective(), p.x, (p.inputs, p.targets), compile=True, route=route)
    close(A.to_dense(), p.hessian())
    assert compilations


@pytest.mark.slow
def test_buffers_are_left_unchanged(compilations: list[Any]) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()
    x = {name: parameter.detach() for name, parameter in module.named_parameters()}
    X = torch.randn(4, 2).double()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}

    def f(x: Any) -> Tensor:
        return functional_call(module, x, (X,)).pow(4).mean()

    close(HessianOperator(f, x, compile=True).to_dense(), HessianOperator(f, x).to_dense())
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, before[name])


@pytest.mark.parametrize(
    ("clearly", "columns", "widths"),
    [
        pytest.param(0.0, 8, [8], marks=pytest.mark.slow),
        pytest.param(math.inf, 8, [8, *[1] * 8], marks=pytest.mark.slow),
        # A block computed vector by vector takes no more products than it has vectors.
        (math.inf, 3, [8, 1, 1, 1]),
    ],
)
def test_blocks_run_in_the_faster_way(
    clearly: float, columns: int, widths: list[int], compilations: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_graphs, "GAIN", math.inf)
    monkeypatch.setattr(compiled_graphs, "CLEARLY", clearly)
    p = problem("mlp")
    A = HessianOperator(p.objective(), p.x, (p.inputs, p.targets), compile=True)
    V = torch.randn(A.shape[0], columns).double()
    close(A @ V, p.hessian() @ V)  # compiles, compares, chooses
    seen: list[int] = []
    run = compiled_graphs.Graphs.run

    def counted(self: Any, residuals: Any, group: Any, width: int) -> Any:
        seen.append(width)
        return run(self, residuals, group, width)

    monkeypatch.setattr(compiled_graphs.Graphs, "run", counted)
    close(A @ V, p.hessian() @ V)
    assert seen == widths


def test_disagreement_with_eager_falls_back_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first product detects wrong compiled code, and the operator does not compile again."""
    calls = []

    def wrong(graph: fx.GraphModule, inputs: Any, **_: Any) -> Any:
        calls.append(1)
        return lambda *inputs: [2 * each for each in graph(*inputs)]

    monkeypatch.setattr(compiled_graphs, "compile_graph", wrong)
    p = problem("mlp")
    A = HessianOperator(p.objective(), p.x, (p.inputs, p.targets), compile=True)
    v = torch.randn(A.shape[0]).double()
    with pytest.warns(hodiff.HodiffWarning, match="HessianOperator"):
        product = A @ v
    close(product, p.hessian() @ v)
    close(A.at(p.x) @ v, p.hessian() @ v)
    assert len(calls) == 1


def test_failing_compiler_falls_back_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(graph: fx.GraphModule, inputs: Any, **_: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(compiled_graphs, "compile_graph", failing)
    p = problem("mlp")
    A = GaussNewtonOperator(p.model, F.cross_entropy, p.x, p.inputs, p.targets, compile=True)
    with pytest.warns(hodiff.HodiffWarning, match="no compiler here"):
        close(A.to_dense(), p.gauss_newton())


def test_convolution_graphs_compile_without_relayout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product would recompute a convolution layout of the residuals, so graphs compile without relayout."""
    asked = []

    def keep(graph: fx.GraphModule, inputs: Any, *, relayout: bool = True, **_: Any) -> fx.GraphModule:
        asked.append(relayout)
        return graph

    monkeypatch.setattr(compiled_graphs, "compile_graph", keep)
    p = problem("mlp")
    A = HessianOperator(p.objective(), p.x, (p.inputs, p.targets), compile=True)
    A @ torch.ones(A.shape[0], 2, dtype=torch.float64)
    A @ torch.ones(A.shape[0], dtype=torch.float64)
    assert asked
    assert not any(asked)


def test_user_errors_are_not_taken_for_compiler_failures() -> None:
    with pytest.raises(hodiff.InputError, match="one real number"):
        HessianOperator(lambda x: 2 * x, torch.ones(2), compile=True) @ torch.ones(2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hessian", "gauss-newton"])
def test_inductor_products_match_eager(kind: str) -> None:
    p = problem("mlp")
    A, B = (KINDS[kind](p, data=p.batches(), compile=compile) for compile in (True, False))
    v, V = torch.randn(A.shape[0]).double(), torch.randn(A.shape[0], 11).double()
    expected = B.to_dense()
    close(A @ v, expected @ v)
    close(A @ V, expected @ V)


def test_tensor_changed_in_place_raises(compilations: list[fx.GraphModule]) -> None:
    """Mixing cached sines with changed weights would give a wrong product, so the operator raises."""
    x, v = torch.tensor([0.3, -0.5], dtype=torch.float64), torch.tensor([1.0, 2.0], dtype=torch.float64)
    w = torch.nn.Parameter(torch.tensor([2.0, 3.0], dtype=torch.float64))
    A = HessianOperator(lambda x: (w * x).sin().sum(), x, compile=True)
    torch.testing.assert_close(A @ v, (-w * w * (w * x).sin() * v).detach())
    w.grad = torch.ones_like(w)
    torch.optim.SGD([w], lr=0.5).step()
    for _ in range(2):
        with pytest.raises(hodiff.InputError, match=r"f: expected the tensors that it read .* changed in place"):
            A @ v
    torch.testing.assert_close(A.at(x) @ v, (-w * w * (w * x).sin() * v).detach())
    assert compilations


def test_sparse_constants_and_nan_products_are_supported(compilations: list[fx.GraphModule]) -> None:
    """Sparse constants have no storage to count, and NaN products never compare equal."""
    x, v = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([1.0, -1.0], dtype=torch.float64)
    weights = torch.tensor([[2.0, 0.0], [0.0, 3.0]], dtype=torch.float64).to_sparse()
    A = HessianOperator(lambda x: ((weights @ x[:, None]) ** 3).sum(), x, compile=True)
    torch.testing.assert_close(A @ v, torch.tensor([8.0, 27.0]).double() * 6 * x * v)
    with warnings.catch_warnings():
        warnings.simplefilter("error", hodiff.HodiffWarning)
        product = HessianOperator(lambda x: (x**1.5).sum(), torch.stack([-x[0], x[1]]), compile=True) @ v
    assert product.isnan().tolist() == [True, False]
    assert len(compilations) == 2


@pytest.mark.slow
def test_product_of_rounding_only_is_no_disagreement() -> None:
    """Ones shift both logits equally, so they are in the null space of the softmax Gauss-Newton matrix."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    point = {"2.weight": model[2].weight.detach().clone()}
    A = GaussNewtonOperator(
        model, F.cross_entropy, point, torch.randn(8, 3).double(), torch.arange(8) % 2, compile=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", hodiff.HodiffWarning)
        assert (A @ torch.ones(8).double()).abs().max() < 1e-15


def test_wrong_code_is_detected_on_a_null_vector() -> None:
    """Code that returns nearly zero agrees on a null vector, but is still detected."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    point = {"2.weight": model[2].weight.detach().clone()}
    A = GaussNewtonOperator(
        model, F.cross_entropy, point, torch.randn(8, 3).double(), torch.arange(8) % 2, compile=True
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_graphs, "compile_graph", _zeros)
        with pytest.warns(hodiff.HodiffWarning, match="disagreed with eager"):
            A @ torch.ones(8).double()


def _zeros(graph: fx.GraphModule, *_: Any, **__: Any) -> Any:
    return lambda *inputs: [1e-3 * each for each in graph(*inputs)]


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_tensors_of_scripted_modules_are_inputs(compilations: list[fx.GraphModule]) -> None:
    """Scripted code holds them where nothing can be replaced, and creates a tensor for its shape alone."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("factor", torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
            self.weight = nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            # Uninitialized numbers, as in the code of e3nn.
            count = torch.empty([]).expand(x.shape).shape[0]
            return (self.factor * x.sin() * self.weight * count).sum()

    scripted = torch.jit.script(Weighted())
    module = nn.Sequential(scripted)
    x = torch.linspace(0.5, 1, 3, dtype=torch.float64)
    A = HessianOperator(lambda x: module(x), x, compile=True)
    expected = -6 * torch.tensor([1.0, 2.0, 3.0]) * x.sin()
    close(A @ torch.ones_like(x), expected)
    assert len(compilations) == 1
    scripted.factor.mul_(10)
    close(A.at(x) @ torch.ones_like(x), 10 * expected)
    assert len(compilations) == 1
