"""Attention inside `corrected()` has torch's values and errors, and derivatives by every route."""

import math
import types
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from corrections.against_torch import same_error
from torch import nn

import hodiff
from hodiff.corrections.mechanism.registry import CORRECTIONS
from hodiff.corrections.rules.programs.scripts import COMPOSITES
from hodiff.errors import RouteError

attend = F.scaled_dot_product_attention
D = torch.float64


def normal(*shape, dtype=D):
    return torch.randn(shape, dtype=dtype)


def random_call(*shapes, dtype=D, **options):
    """Return a call with random q, k and v."""
    return lambda: attend(*(normal(*shape, dtype=dtype) for shape in shapes), **options)


def masked(mask, *shapes, **options):
    return lambda: attend(*(normal(*shape) for shape in shapes), attn_mask=mask(), **options)


def hidden_row():
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1] = False
    return mask


def hidden_row_of_floats():
    return torch.zeros(3, 5, dtype=D).masked_fill(~hidden_row(), -torch.inf)


SHAPES = ((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 6))
IN_3D = tuple(shape[1:] for shape in SHAPES)
GROUPED = ((2, 4, 3, 4), (2, 2, 5, 4), (2, 2, 5, 6))
CALLS = {
    "four dimensions": random_call(*SHAPES),
    "three dimensions": random_call(*IN_3D),
    "two dimensions": random_call((3, 4), (5, 4), (5, 6)),
    "five dimensions": random_call(*((3, *shape) for shape in SHAPES)),
    "broadcast": random_call((2, 2, 3, 4), (5, 4), (1, 2, 5, 6)),
    "causal": random_call(*SHAPES, is_causal=True),
    "causal, more queries than keys": random_call((2, 2, 5, 4), (2, 2, 3, 4), (2, 2, 3, 4), is_causal=True),
    "scale": random_call(*SHAPES, scale=0.3),
    "scale of zero": random_call(*SHAPES, scale=0.0),
    "no keys": random_call((2, 2, 3, 4), (2, 2, 0, 4), (2, 2, 0, 6)),
    "no queries": random_call((2, 2, 0, 4), (2, 2, 5, 4), (2, 2, 5, 6)),
    "no features": random_call((2, 2, 3, 0), (2, 2, 5, 0), (2, 2, 5, 6)),
    "float32": random_call(*SHAPES, dtype=torch.float32),
    "bfloat16": random_call(*SHAPES, dtype=torch.bfloat16),
    "float16": random_call(*SHAPES, dtype=torch.float16),
    "shared heads": random_call(*GROUPED, enable_gqa=True),
    "shared heads, three dimensions": random_call(*(shape[1:] for shape in GROUPED), enable_gqa=True),
    "shared heads, unequally": random_call((2, 4, 3, 4), (2, 2, 5, 4), (2, 1, 5, 6), enable_gqa=True),
    "shared heads, masked": masked(lambda: normal(2, 4, 3, 5), *GROUPED, enable_gqa=True),
    "boolean mask": masked(hidden_row, *SHAPES),
    "boolean mask, three dimensions": masked(hidden_row, *IN_3D),
    "float mask": masked(lambda: normal(2, 1, 3, 5), *SHAPES),
    "float mask that hides a row": masked(hidden_row_of_floats, *SHAPES),
    "float32 mask for float64": masked(lambda: normal(3, 5, dtype=torch.float32), *SHAPES),
    "mask of keys": masked(lambda: normal(2, 1, 1, 5), *SHAPES),
    "mask of one dimension": masked(lambda: normal(5), *SHAPES),
    "mask of one dimension, three": masked(lambda: torch.tensor([True, False, True, True, True]), *IN_3D),
    "mask of one number": masked(lambda: normal(), *SHAPES),
    "masked, some dropped": masked(lambda: normal(2, 1, 3, 5), *SHAPES, dropout_p=0.4),
    "hidden row, some dropped": masked(hidden_row, *SHAPES, dropout_p=0.4),
    "hidden row of floats, shared heads, some dropped": masked(
        hidden_row_of_floats, *GROUPED, dropout_p=0.4, enable_gqa=True, scale=-0.3
    ),
    "everything dropped": random_call(*SHAPES, dropout_p=1.0),
    "dropout of True": random_call(*SHAPES, dropout_p=True),
}
WRONG = {
    "one dimension": random_call((4,), (5, 4), (5, 6)),
    "features": random_call((2, 2, 3, 4), (2, 2, 5, 3), (2, 2, 5, 6)),
    "lengths": random_call((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 4, 6)),
    "batches": random_call((2, 2, 3, 4), (3, 2, 5, 4), (3, 2, 5, 4)),
    "heads": random_call((2, 4, 3, 4), (2, 3, 5, 4), (2, 3, 5, 4), enable_gqa=True),
    "dtypes": lambda: attend(normal(2, 3, 4), normal(2, 5, 4, dtype=torch.float32), normal(2, 5, 4)),
    "integers": lambda: attend(*[torch.ones(2, 3, 4, dtype=torch.long)] * 3),
    "mask of integers": masked(lambda: torch.ones(3, 5, dtype=torch.long), *SHAPES),
    "mask of another dtype": masked(lambda: normal(3, 5, dtype=torch.float16), *SHAPES),
    "mask of another shape": masked(lambda: normal(3, 4), *SHAPES),
    "mask of too many batches": masked(lambda: normal(3, 3, 5), *IN_3D),
    "mask of a larger batch": masked(lambda: normal(2, 1, 3, 5), (1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 6)),
    "mask and causal": masked(lambda: normal(3, 5), *IN_3D, is_causal=True),
    "probability": random_call(*SHAPES, dropout_p=1.5),
    "scale": random_call(*SHAPES, scale="large"),
    "devices": lambda: attend(normal(2, 3, 4), normal(2, 5, 4).to("meta"), normal(2, 5, 4)),
    "causal in words": random_call(*IN_3D, is_causal="no"),
    "8 bits": lambda: attend(*(normal(2, 3, 4).to(torch.float8_e4m3fn) for _ in range(3))),
    "sparse": lambda: attend(*(normal(2, 3, 4).to_sparse() for _ in range(3))),
    "no tensor": lambda: attend([1.0], [1.0], [1.0]),
    "nothing": lambda: attend(),
}


def run(call, mode, recording=True):
    torch.manual_seed(0)
    with torch.set_grad_enabled(recording), mode:
        return call()


@pytest.fixture
def recording(monkeypatch):
    """Make all random tensors require a gradient; otherwise the rule leaves the call to torch."""
    plain = normal

    def recorded(*shape, dtype=D):
        return plain(*shape, dtype=dtype).requires_grad_()

    monkeypatch.setitem(globals(), "normal", recorded)


@pytest.mark.parametrize("name", CALLS)
def test_values_match_torch(name, recording):
    expected, got = (run(CALLS[name], mode) for mode in (nullcontext(), hodiff.corrected()))
    assert got.dtype == expected.dtype
    tolerance = {D: 1e-13, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[got.dtype]
    torch.testing.assert_close(got.detach(), expected.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", [name for name in CALLS if name not in {"no keys", "no queries"}])
def test_rule_handles_all_calls_without_dropout(name, recording):
    # On a CPU, dropout uses torch's own operators.
    assert ("AttentionBackward" in nodes(CALLS[name])) == ("drop" not in name)


def nodes(call):
    with hodiff.corrected():
        output = call()  # keep the output, because a Function's node is freed with it
        queue, found = [output.grad_fn], []
    while queue:
        node = queue.pop()
        if node is not None:
            found.append(node.name())
            queue += [parent for parent, _ in node.next_functions]
    return found


@pytest.mark.parametrize("name", WRONG)
def test_errors_match_torch(name, recording):
    same_error(lambda: run(WRONG[name], nullcontext()))


def test_rejects_mask_on_another_device(recording):
    """Torch alone reads uninitialized memory."""
    call = masked(lambda: torch.zeros(3, 5, device="meta"), *SHAPES)
    with pytest.raises(RouteError, match="attn_mask: expected a tensor on cpu as query is, got one on meta"):
        run(call, hodiff.corrected())


def test_no_heads_give_an_empty_output():
    call = masked(lambda: normal(3, 5), (2, 0, 3, 4), (2, 0, 5, 4), (2, 0, 5, 6), enable_gqa=True, dropout_p=0.4)
    assert run(call, hodiff.corrected()).shape == (2, 0, 3, 6)


@pytest.mark.parametrize("name", ["four dimensions", "causal", "float32", "boolean mask"])
def test_undifferentiated_calls_run_the_kernel_of_torch(name):
    assert torch.equal(run(CALLS[name], hodiff.corrected()), run(CALLS[name], nullcontext()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, D])
def test_autocast_dtypes_match_torch(dtype):
    q, k, v = (normal(2, 2, 3, 4, dtype=dtype).requires_grad_() for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        expected = attend(q, k, v)
        with hodiff.corrected():
            got = attend(q, k, v)
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


CHECKED = {
    "plain": lambda q, k, v: attend(q, k, v),
    "causal, scaled": lambda q, k, v: attend(q, k, v, is_causal=True, scale=1.3),
    "hidden row": lambda q, k, v: attend(q, k, v, hidden_row()[:, :4]),
    "dropout": lambda q, k, v: (torch.manual_seed(5), attend(q, k, v, dropout_p=0.4))[1],
    "dropout of a hidden row": lambda q, k, v: (torch.manual_seed(5), attend(q, k, v, hidden_row()[:, :4], 0.4))[1],
    "hidden rows of weights": lambda q, k, v: torch._safe_softmax(q @ k.mT + hidden_row_of_floats()[:, :4], -1) @ v,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKED)
def test_derivatives_by_all_routes_match_differences(name):
    """The tests of the Function compare third derivatives where no row is hidden."""
    f, inputs = hodiff.corrected()(CHECKED[name]), tuple(normal(1, 1, *s) for s in ((3, 2), (4, 2), (4, 1)))
    # vmap would draw other numbers for each element of its batch.
    drops = name.startswith("dropout")
    order = 3 if name.startswith("hidden") else 2
    hodiff.assert_differentiable(f, inputs, order=order, vmap=not drops, scipy=False)


@pytest.mark.slow
def test_derivatives_by_the_mask_match_differences():
    q, k, v = normal(1, 2, 3, 2), normal(1, 2, 4, 2), normal(1, 2, 4, 1)
    hodiff.assert_differentiable(hodiff.corrected()(lambda m: attend(q, k, v, m)), normal(2, 3, 4), scipy=False)


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_two_keys_match_the_closed_form_of_a_logistic_curve(route):
    """The weights of two keys are s(z) and s(-z), for the difference z of their scores; O = v0 + (v1 - v0) s(z)."""
    q, k, v = normal(1, 1, 1, 1), normal(1, 1, 2, 1), normal(1, 1, 2, 1)
    slope, height = (k[..., 1, :] - k[..., 0, :]).item(), (v[..., 1, :] - v[..., 0, :]).item()
    s = torch.sigmoid(q * slope)
    second = height * slope**2 * s * (1 - s) * (1 - 2 * s)
    product = hodiff.hvp(lambda q: attend(q, k, v).sum(), q, torch.ones_like(q), route=route)
    torch.testing.assert_close(product, second, rtol=1e-12, atol=0)


def test_seed_determines_dropout():
    q, k, v = (normal(1, 2, 6, 4).requires_grad_() for _ in range(3))

    def drawn(seed):
        torch.manual_seed(seed)
        with hodiff.corrected():
            return attend(q, k, v, dropout_p=0.5)

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    with torch.no_grad():
        assert torch.equal(drawn(1), drawn(1).detach())
    average = torch.stack([drawn(seed).detach() for seed in range(400)]).mean(0)
    torch.testing.assert_close(average, attend(q, k, v).detach(), rtol=0, atol=0.35)


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_dropout_mask_matches_torch_by_each_route(route):
    """The reference multiplies probabilities by the mask that torch draws."""
    q, k, v = normal(1, 3, 2), normal(1, 4, 2), torch.eye(4, dtype=D)[None]
    torch.manual_seed(3)
    kept = (attend(q, k, v, dropout_p=0.4) > 0) / 0.6  # the values are unit vectors

    def by_hand(q):
        return ((q @ k.mT / math.sqrt(2)).softmax(-1) * kept @ v).pow(3).sum()

    torch.manual_seed(3)
    product = hodiff.hvp(lambda q: attend(q, k, v, dropout_p=0.4).pow(3).sum(), q, torch.ones_like(q), route=route)
    torch.testing.assert_close(product, hodiff.hvp(by_hand, q, torch.ones_like(q), correct=False))


def test_every_composite_of_corrected_functions_has_a_rule():
    """Torch disables the mode inside its Python functions, so each that calls a function with a rule needs a rule."""
    table = {each for each, entry in CORRECTIONS.items() if entry.kind != "slow"}
    for module in (F, torch.functional, torch.Tensor):
        for name, function in vars(module).items():
            if not isinstance(function, types.FunctionType) or function in table:
                continue
            used = set(function.__code__.co_names) - {name, name.lstrip("_")}
            if not any("has_torch_function" in each for each in used):
                continue
            callees = (function.__globals__.get(each, getattr(torch, each, None)) for each in used)
            # These rules are for tensor exponents and bounds and for numbers, which no Python function passes.
            ruled = table - {torch.pow, torch.clamp_, torch.flip}
            hidden = [each for each in callees if callable(each) and each.__hash__ and each in ruled]
            assert not hidden, f"{name} calls {hidden}"
    assert table.issuperset(COMPOSITES)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_multi_head_attention_values_match_torch(weights, mask):
    model = nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True).double()
    x = normal(2, 3, 4)
    options = {"need_weights": weights, "attn_mask": torch.zeros(3, 3, dtype=D) if mask else None}
    expected = model(x, x, x, **options)
    with hodiff.corrected():
        got = model(x, x, x, **options)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


def test_encoder_layer_leaves_its_fused_path_inside_corrected():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).double().eval()
    x = normal(2, 3, 4)

    def fused(mode):
        with torch.no_grad(), mode, torch.profiler.profile(acc_events=True) as profile:
            layer(x)
        return any("_transformer_encoder_layer_fwd" in event.key for event in profile.key_averages())

    assert fused(nullcontext())
    assert not fused(hodiff.corrected())


@pytest.mark.slow
@pytest.mark.parametrize(
    "route",
    [hodiff.ROUTES[0], *(pytest.param(route, marks=pytest.mark.slow) for route in hodiff.ROUTES[1:3])],
)
def test_multi_head_attention_compiles(route):
    model = nn.MultiheadAttention(4, 2, batch_first=True).double().requires_grad_(False)
    x = normal(2, 3, 4)

    def product(x):
        return hodiff.hvp(lambda x: model(x, x, x, need_weights=False)[0].sin().sum(), x, x, route=route)

    torch.compiler.reset()
    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), product(x), rtol=1e-12, atol=1e-13)


@pytest.mark.slow
def test_compiled_inference_keeps_the_fused_kernel():
    found = []

    def backend(graph, _):
        found.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    def run(x):
        with hodiff.corrected():
            return attend(x, x, x)

    torch.compiler.reset()
    compiled, x = torch.compile(run, fullgraph=True, backend=backend), normal(1, 2, 3, 4)
    torch.testing.assert_close(compiled(x), attend(x, x, x), rtol=1e-12, atol=0)
    assert any("scaled_dot_product_attention" in name for name in found)
    found.clear()
    x.requires_grad_()
    torch.testing.assert_close(compiled(x), attend(x, x, x), rtol=1e-12, atol=0)
    assert found
    assert not any("scaled_dot_product_attention" in name for name in found)
