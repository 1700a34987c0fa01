"""hodiff on nn.Modules: parameter dicts, frozen and tied parameters, dropout, batch norm, recurrent cells."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import ravel, unravel
from derivatives.oracles import assert_same_structure, difference_hessian
from drawing import draw
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff import ROUTES, HodiffError, RouteError, hessian, hessian_diagonal, hessian_matrix, hvp, jacobian

EVERY_ROUTE = pytest.mark.parametrize("route", ["auto", *ROUTES])
OTHER_ROUTES = pytest.mark.parametrize("route", ROUTES[1:])


def classifier(**inner: nn.Module) -> nn.Module:
    layers = {"first": nn.Linear(3, 4), **inner, "activation": nn.Tanh(), "last": nn.Linear(4, 2)}
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model.double()


INPUTS, TARGETS = draw(6, 3), torch.tensor([0, 1, 1, 0, 1, 0])


def loss_of(model: nn.Module) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda parameters: F.cross_entropy(functional_call(model, parameters, (INPUTS,)), TARGETS)


def detached(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def direction(tree: Any, seed: int = 3) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return tree_map(lambda leaf: torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype), tree)


def exact(f: Callable[[Any], Tensor], x: Any) -> Tensor:
    """The Hessian of a function of a pytree by differences of its values."""
    with torch.no_grad():
        hessian, error = difference_hessian(lambda flat: f(unravel(flat, x)), ravel(x))
    assert error < 1e-6
    return hessian


@EVERY_ROUTE
def test_parameters_that_require_grad_are_accepted(route: str) -> None:
    """`dict(model.named_parameters())` is accepted unchanged, with leaves that require gradients."""
    model = classifier()
    parameters = dict(model.named_parameters())
    v = direction(detached(model))
    product = hvp(loss_of(model), parameters, v, route=route)
    assert_same_structure(product, detached(model))
    assert all(type(leaf) is Tensor for leaf in product.values())
    expected = exact(loss_of(model), detached(model)) @ ravel(v)
    torch.testing.assert_close(ravel(product), expected, rtol=0, atol=1e-7)
    assert all(parameter.grad is None for parameter in model.parameters())


@EVERY_ROUTE
def test_frozen_parameters_are_differentiated(route: str) -> None:
    """requires_grad=False affects optimizers, but not derivatives with respect to the parameter."""
    model = classifier()
    model.first.requires_grad_(False)
    live = dict(model.named_parameters())
    v = direction(detached(model))
    everything = hvp(loss_of(model), live, v, route=route)
    torch.testing.assert_close(everything, hvp(loss_of(model), detached(model), v, route=route))
    trainable = {name: leaf for name, leaf in live.items() if leaf.requires_grad}
    assert list(trainable) == ["last.weight", "last.bias"]
    v = {name: v[name] for name in trainable}
    product = hvp(loss_of(model), trainable, v, route=route)
    expected = exact(loss_of(model), detached(model))[16:, 16:] @ ravel(v)
    torch.testing.assert_close(ravel(product), expected, rtol=0, atol=1e-7)


@EVERY_ROUTE
def test_gradients_reach_closed_over_parameters(route: str) -> None:
    """Gradients of a Hessian in the data reach the parameters that the function closes over."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x, v = draw(3), draw(3, seed=1)
    product = hvp(lambda point: model(point).sum(), x, v, route=route)
    assert product.requires_grad
    (product @ v).backward()
    weight, step = model[0].weight, 1e-5
    actual = weight.grad.clone()

    def curvature() -> Tensor:
        return hvp(lambda point: model(point).sum(), x, v, route=route) @ v

    with torch.no_grad():
        for index in [(0, 0), (2, 1), (3, 2)]:
            weight[index] += step
            above = curvature()
            weight[index] -= 2 * step
            below = curvature()
            weight[index] += step
            torch.testing.assert_close(actual[index], (above - below) / (2 * step), rtol=1e-6, atol=1e-8)


def tied_model() -> nn.Module:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Tanh(), nn.Linear(3, 4, bias=False)).double()
    model[2].weight = model[0].weight
    return model


@EVERY_ROUTE
def test_tied_parameters_have_one_block(route: str) -> None:
    """A leaf with two uses has one diagonal block, with all four terms."""
    model = tied_model()
    tokens, labels = torch.tensor([0, 1, 3, 3]), torch.tensor([1, 2, 0, 3])

    def f(parameters: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (tokens,)), labels)

    x = detached(model)
    assert list(x) == ["0.weight"]
    torch.testing.assert_close(hessian_matrix(f, x, route=route), exact(f, x), rtol=0, atol=1e-7)


def fixed_dropout(mask: Tensor) -> nn.Module:
    class Masked(nn.Module):
        def forward(self, features: Tensor) -> Tensor:
            return features * mask

    return Masked()


def draw_mask(seed: int) -> Tensor:
    torch.manual_seed(seed)
    return F.dropout(torch.ones(6, 4, dtype=torch.float64), 0.5)


@pytest.mark.parametrize("route", ["auto", "reverse-over-reverse"])
def test_dropout_is_drawn_once(route: str) -> None:
    """Every transform differentiates the function with the mask that the seed determines."""
    model = classifier(drop=nn.Dropout(0.5))
    mask = draw_mask(7)
    assert 0 < mask.count_nonzero() < mask.numel()
    masked = classifier(drop=fixed_dropout(mask))
    x = detached(model)
    truth = exact(loss_of(masked), x)
    transforms: dict[str, tuple[Callable[[], Any], Tensor]] = {
        "matrix": (lambda: hessian_matrix(loss_of(model), x, route=route), truth),
        "matrix in groups": (lambda: hessian_matrix(loss_of(model), x, route=route, chunk_size=3), truth),
        "diagonal": (lambda: ravel(hessian_diagonal(loss_of(model), route=route)(x)), truth.diagonal()),
    }
    for name, (transform, expected) in transforms.items():
        torch.manual_seed(7)
        actual = transform()
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")
    v = direction(x)
    torch.manual_seed(7)
    product = hvp(loss_of(model), x, v, route=route)
    torch.testing.assert_close(ravel(product), truth @ ravel(v), rtol=0, atol=1e-7)


@OTHER_ROUTES
def test_several_dropout_draws_raise(route: str) -> None:
    """All rows of a matrix must belong to the same random draw."""
    f, x = loss_of(model := classifier(drop=nn.Dropout(0.5))), detached(model)
    for transform in (
        lambda: hessian_matrix(f, x, route=route),
        lambda: hessian(f, route=route)(x),
        lambda: hessian_diagonal(f, route=route)(x),
    ):
        with pytest.raises(HodiffError, match="randomness"):
            transform()


@pytest.mark.one_in(3)
@OTHER_ROUTES
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_randomness_same_shares_one_draw(chunk_size: int | None, route: str) -> None:
    f, x = loss_of(model := classifier(drop=nn.Dropout(0.5))), detached(model)
    truth = exact(loss_of(classifier(drop=fixed_dropout(draw_mask(7)))), x)
    torch.manual_seed(7)
    actual = hessian_matrix(f, x, route=route, randomness="same", chunk_size=chunk_size)
    torch.testing.assert_close(actual, truth, rtol=0, atol=1e-7)


@EVERY_ROUTE
def test_hvp_with_dropout_uses_one_draw(route: str) -> None:
    f, x = loss_of(model := classifier(drop=nn.Dropout(0.5))), detached(model)
    v = direction(x)
    truth = exact(loss_of(classifier(drop=fixed_dropout(draw_mask(7)))), x)
    torch.manual_seed(7)
    torch.testing.assert_close(ravel(hvp(f, x, v, route=route)), truth @ ravel(v), rtol=0, atol=1e-7)


def kept_cubes(x: Tensor) -> tuple[Tensor, Tensor]:
    kept = F.dropout(x, 0.5)
    return (kept**3).sum(), kept


@EVERY_ROUTE
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_aux_of_second_derivatives_has_the_same_draw(chunk_size: int | None, route: str) -> None:
    """Aux shows which draw was differentiated: with y = m ⊙ x the Hessian of Σy³ is diag(6 y m²)."""
    x = draw(20)
    options = {"route": route, "chunk_size": chunk_size, "randomness": "same", "has_aux": True}
    product, kept = hvp(kept_cubes, x, torch.ones_like(x), route=route, has_aux=True)
    matrix, kept_by_matrix = hessian_matrix(kept_cubes, x, **options)
    diagonal, kept_by_diagonal = hessian_diagonal(kept_cubes, **options)(x)
    assert 0 < kept.count_nonzero() < 20
    torch.testing.assert_close(product, 6 * kept * (kept / x) ** 2)
    torch.testing.assert_close(matrix, torch.diag(6 * kept_by_matrix * (kept_by_matrix / x) ** 2))
    torch.testing.assert_close(diagonal, 6 * kept_by_diagonal * (kept_by_diagonal / x) ** 2)


@pytest.mark.parametrize("mode", ["auto", "forward", "reverse"])
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_aux_of_jacobian_has_the_same_draw(chunk_size: int | None, mode: str) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        kept = F.dropout(x, 0.5)
        return kept**2, kept

    x = draw(20)
    block, kept = jacobian(f, mode=mode, chunk_size=chunk_size, randomness="same", has_aux=True)(x)
    assert 0 < kept.count_nonzero() < 20
    torch.testing.assert_close(block, torch.diag(2 * kept * kept / x))


def test_forward_jacobian_with_several_draws_raises() -> None:
    with pytest.raises(HodiffError, match="randomness"):
        jacobian(lambda x: F.dropout(x, 0.5), mode="forward")(draw(5))


def test_dropout_in_eval_mode_matches_by_every_route() -> None:
    f, x = loss_of(model := classifier(drop=nn.Dropout(0.5)).eval()), detached(model)
    for route in ROUTES:
        torch.testing.assert_close(hessian_matrix(f, x, route=route), exact(f, x), rtol=0, atol=1e-7)


@pytest.mark.parametrize("route", ["auto", "reverse-over-reverse"])
def test_batch_norm_in_training_updates_statistics_once(route: str) -> None:
    """Batch statistics are differentiated; running statistics are updated once, as by one forward pass."""
    model, twin = classifier(norm=nn.BatchNorm1d(4)), classifier(norm=nn.BatchNorm1d(4))
    twin.load_state_dict(model.state_dict())
    # Differences evaluate a stateless copy, whose buffers functional_call discards.
    stateless = classifier(norm=nn.BatchNorm1d(4, track_running_stats=False))
    x = detached(model)
    v = direction(x)
    product = hvp(loss_of(model), x, v, route=route)
    torch.testing.assert_close(ravel(product), exact(loss_of(stateless), x) @ ravel(v), rtol=0, atol=1e-7)
    twin(INPUTS)
    torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
    assert not any(buffer.requires_grad for buffer in model.buffers())


def test_dense_hessian_with_batch_norm_in_training_matches() -> None:
    model, stateless = (classifier(norm=nn.BatchNorm1d(4, track_running_stats=tracked)) for tracked in (True, False))
    x = detached(model)
    truth = exact(loss_of(stateless), x)
    # The bias before the norm has a zero block, whose rounding noise gives no warning of asymmetry.
    torch.testing.assert_close(hessian_matrix(loss_of(model), x), truth, rtol=0, atol=1e-7)
    diagonal = hessian_diagonal(loss_of(model))(x)
    torch.testing.assert_close(ravel(diagonal), truth.diagonal(), rtol=0, atol=1e-7)


def test_batch_norm_in_eval_mode_matches_by_every_route() -> None:
    model = classifier(norm=nn.BatchNorm1d(4)).eval()
    f, x = loss_of(model), detached(model)
    for route in ROUTES:
        torch.testing.assert_close(hessian_matrix(f, x, route=route), exact(f, x), rtol=0, atol=1e-7)


@pytest.mark.parametrize("cell", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_match(cell: type[nn.Module]) -> None:
    layer = cell(2, 2, batch_first=True).double()
    sequence = draw(3, 4, 2)

    def f(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(layer, parameters, (sequence,))[0].square().mean()

    x = detached(layer)
    v = direction(x)

    def along(t: Tensor) -> Tensor:
        return f(tree_map(lambda a, b: a + t * b, x, v))

    h = 1e-3
    zero = torch.zeros((), dtype=torch.float64)
    values = [along(zero + step * h) for step in (-2, -1, 0, 1, 2)]
    curvature = sum(w * y for w, y in zip((-1, 16, -30, 16, -1), values, strict=True)) / (12 * h * h)
    torch.testing.assert_close(ravel(hvp(f, x, v)) @ ravel(v), curvature, rtol=1e-6, atol=1e-7)


def test_attention_matches() -> None:
    """torch's default kernel has no second derivative; its math backend and hodiff have one."""
    key, value, x, v = (draw(1, 2, 4, 3, seed=seed) for seed in range(4))

    def f(query: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value).square().sum()

    def primitive(query: Tensor) -> Tensor:
        return ((query @ key.mT / 3**0.5).softmax(-1) @ value).square().sum()

    expected = exact(primitive, x) @ ravel(v)
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(ravel(hvp(f, x, v)), expected, rtol=0, atol=1e-7)
    for route in ROUTES:
        torch.testing.assert_close(hvp(f, x, v, route=route), hvp(primitive, x, v), rtol=0, atol=1e-12)
    with pytest.raises(RouteError) as caught:
        hvp(f, x, v, correct=False)
    assert [route for route in ROUTES if route not in str(caught.value)] == []


def test_checkpointed_layers_match() -> None:
    model = classifier()

    def f(parameters: dict[str, Tensor]) -> Tensor:
        logits = checkpoint(lambda x: functional_call(model, parameters, (x,)), INPUTS, use_reentrant=False)
        return F.cross_entropy(logits, TARGETS)

    x = detached(model)
    v = direction(x)
    torch.testing.assert_close(hvp(f, x, v), hvp(loss_of(model), x, v))
    torch.testing.assert_close(hessian_matrix(f, x), hessian_matrix(loss_of(model), x))


def test_unused_embedding_rows_have_zero_second_derivatives() -> None:
    table = nn.Embedding(5, 2, padding_idx=0).double()
    tokens = torch.tensor([0, 2, 2, 4])

    def f(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(table, parameters, (tokens,)).pow(3).sum()

    x = detached(table)
    diagonal = hessian_diagonal(f)(x)["weight"]
    uses = torch.tensor([0, 0, 2, 0, 1], dtype=torch.float64)[:, None]
    torch.testing.assert_close(diagonal, 6 * uses * x["weight"])


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x).tanh() * self.scale).pow(2).sum()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(2, 3).double())])
def test_scripted_modules_with_buffers_match(make, training):
    torch.manual_seed(0)
    module = _Scaled().double().train(training)
    x, v = torch.randn(2, 3).double(), torch.randn(2, 3).double()
    script = make(module)
    for route in hodiff.ROUTES:
        torch.testing.assert_close(hodiff.hvp(script, x, v, route=route), hodiff.hvp(module, x, v, route=route))
    assert torch.equal(script.scale, module.scale)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_checkpoint_of_a_frozen_script_matches():
    torch.manual_seed(0)
    module = _Scaled().double().eval()
    frozen = torch.jit.freeze(torch.jit.script(module))
    x, v = torch.randn(2, 3).double(), torch.randn(2, 3).double()
    found = hodiff.hvp(lambda x: hodiff.functions.checkpoint(frozen, x), x, v)
    torch.testing.assert_close(found, hodiff.hvp(module, x, v))


def _restores(x: Tensor) -> Tensor:
    """Compute forces as atomistic models do, and restore requires_grad afterwards."""
    before = x.requires_grad
    x.requires_grad_(True)
    (forces,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
    x.requires_grad_(before)
    return forces.pow(2).sum()


def _of_a_constant(x: Tensor) -> Tensor:
    return (torch.ones(3, dtype=x.dtype).requires_grad_(False) * 9 * x.pow(4)).sum()


def _of_a_copy(x: Tensor) -> Tensor:
    return (x.detach().clone().requires_grad_(False) * 0 + 9 * x.pow(4)).sum()


@pytest.mark.parametrize("f", [_restores, _of_a_constant, _of_a_copy])
def test_requires_grad_switched_off_and_on_by_the_function_matches(f):
    x, v = torch.tensor([0.3, -0.8, 1.2]).double(), torch.tensor([1.0, 2.0, -1.0]).double()
    for route in hodiff.ROUTES:
        torch.testing.assert_close(hodiff.hvp(f, x, v, route=route), 108 * x.square() * v)
    torch.testing.assert_close(hodiff.jacobian(f, mode="forward")(x), 36 * x.pow(3))


def test_parameters_frozen_and_unfrozen_by_the_function_match():
    torch.manual_seed(0)
    layer = nn.Linear(3, 1).double()

    def f(x: Tensor) -> Tensor:
        layer.requires_grad_(False)
        y = layer(x).tanh().sum()
        layer.requires_grad_(True)
        return y

    x, v = torch.randn(3).double(), torch.randn(3).double()
    expected = hodiff.hvp(lambda x: layer(x).tanh().sum(), x, v)
    for route in hodiff.ROUTES:
        torch.testing.assert_close(hodiff.hvp(f, x, v, route=route), expected)
        assert all(each.requires_grad for each in layer.parameters())


def _by_method(x: Tensor) -> None:
    x.requires_grad_(False)


def _by_attribute(x: Tensor) -> None:
    x.requires_grad = False


@pytest.mark.parametrize("switch", [_by_method, _by_attribute])
@pytest.mark.parametrize("route", hodiff.ROUTES[:2])
def test_argument_frozen_by_the_function_is_rejected(switch, route):
    def f(p: dict[str, Tensor]) -> Tensor:
        switch(p["a"])
        return p["a"].pow(3).sum() + p["b"].pow(3).sum()

    p = {"a": torch.ones(2), "b": torch.ones(2)}
    with pytest.raises(hodiff.RouteError, match=r"requires_grad_: .* pass tensor\.detach\(\)"):
        hodiff.hvp(f, p, p, route=route)
