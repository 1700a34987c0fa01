"""Tests of compiled transforms of attention: correct values, and graphs without a tensor of attention weights."""

import pytest
import torch
from drawing import draw_each
from functions.cases.attention import by_primitives
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import hodiff
from hodiff.functions import attention
from hodiff.functions.attention.evaluation import in_graphs

D = torch.float64
LENGTH, KEYS, SIZE = 24, 40, 2


Q, K, V, U = draw_each((2, LENGTH, SIZE), (2, KEYS, SIZE), (2, KEYS, SIZE), (2, LENGTH, SIZE))
SEEN = torch.rand(LENGTH, KEYS, generator=torch.Generator().manual_seed(1)) < 0.7


def reverse_over_reverse(f):
    return lambda x: torch.func.grad(lambda x: (torch.func.grad(f)(x) * U).sum())(x)


def forward_over_reverse(f):
    return lambda x: torch.func.jvp(torch.func.grad(f), (x,), (U,))[1]


def reverse_over_forward(f):
    return lambda x: torch.func.grad(lambda x: torch.func.jvp(f, (x,), (U,))[1])(x)


def by_hvp(f):
    return lambda x: hodiff.hvp(f, x, U)


def dense(f):
    """Return the Hessian with respect to a scale and a shift of the queries."""
    return lambda x: torch.func.hessian(lambda s: f(s[0] * x + s[1]))(torch.tensor([0.7, 0.2], dtype=D))


def backward_of_tangent(f):
    """Apply forward mode inside and torch.autograd outside, like a training loss that contains a tangent."""
    return lambda x: torch.func.jvp(f, (x,), (U,))[1].square()


CALLS = {
    "plain": ({}, {}),
    "boolean mask": ({"mask": SEEN}, {"visible": SEEN}),
    "causal": ({"is_causal": True}, {"visible": torch.ones(LENGTH, KEYS).tril().bool()}),
}
COMPOSITIONS = [reverse_over_reverse, forward_over_reverse, reverse_over_forward, by_hvp, dense, backward_of_tangent]


def graphs_of():
    """Return a list of compiled forward and backward graphs, and the backend that fills it."""
    graphs = []

    def run(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph)

    return graphs, aot_autograd(fw_compiler=run, bw_compiler=run)


def objective(f, options):
    return lambda q: f(q, K, V, **options).sin().sum()


def gradient_around(function, x):
    x = x.clone().requires_grad_()
    y = function(x)
    return torch.autograd.grad(y, x)[0] if y.requires_grad else y


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("composition", COMPOSITIONS, ids=lambda f: f.__name__)
def test_compiled_transforms_match_without_tensors_of_weights(composition, name):
    options, by_hand = CALLS[name]
    around = gradient_around if composition is backward_of_tangent else lambda function, x: function(x)
    expected = around(composition(objective(by_primitives, by_hand)), Q)
    graphs, backend = graphs_of()
    torch.compiler.reset()
    compiled = torch.compile(composition(objective(attention, options)), fullgraph=True, backend=backend)
    torch.testing.assert_close(around(compiled, Q), expected, rtol=1e-11, atol=1e-12)
    assert_without_weights(graphs)


@pytest.mark.slow
def test_one_compiled_transform_matches_without_tensors_of_weights():
    test_compiled_transforms_match_without_tensors_of_weights(forward_over_reverse, "plain")


def assert_without_weights(graphs):
    nodes = [node for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert any(node.target is torch.ops.hodiff.attention.default for node in nodes)
    values = [node.meta.get("val") for node in nodes]
    # A mask appears as it was passed, and may be expanded.
    floats = [each for each in values if isinstance(each, torch.Tensor) and each.is_floating_point()]
    assert all(each.numel() < 2 * LENGTH * KEYS for each in floats)


@pytest.mark.slow
def test_primitives_have_tensors_of_weights_in_their_graph():
    """Attention by primitives has a tensor of weights in its graph, so `assert_without_weights` can fail."""
    graphs, backend = graphs_of()
    torch.compiler.reset()
    torch.compile(forward_over_reverse(objective(by_primitives, {})), fullgraph=True, backend=backend)(Q)
    nodes = [node for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert any(
        node.meta["val"].numel() == 2 * LENGTH * KEYS for node in nodes if hasattr(node.meta.get("val"), "numel")
    )


MASKS = {"no mask": None, "boolean": SEEN, "additive": draw_each((LENGTH, KEYS), seed=3)[0]}
G, Q_T, K_T, V_T = draw_each((2, LENGTH, SIZE), (2, LENGTH, SIZE), (2, KEYS, SIZE), (2, KEYS, SIZE), seed=4)
ALL = (True, True, True, False)
NONE = (False,) * 4
TANGENTS = (Q_T, None, V_T, None)
# For each kind: the arguments after (q, k, v, mask, seed), the wanted gradients, and whether to return the output.
KINDS = {
    "value": ((), NONE, True),
    "tangent": (TANGENTS, NONE, True),
    "gradient": ((G,), ALL, False),
    "gradient_tangent": ((G, *TANGENTS, G), ALL, True),
}


def call(kind, mask, dtype=D, **changed):
    rest, wanted, with_output = KINDS[kind]
    numbers = {"scale": 0.5, "low": None, "high": 3, "softcap": None, "dropout_p": 0.0, "batch": [2]} | changed
    tensors = [Q, K, V, mask, None, *rest]
    tensors = [each if each is None or each.dtype == torch.bool else each.to(dtype) for each in tensors]
    return kind, tensors, list(wanted), with_output, *numbers.values()


@pytest.mark.parametrize("dtype", [D, torch.bfloat16])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_operator_passes_opcheck(kind, mask, dtype):
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(in_graphs, call(kind, MASKS[mask], dtype), test_utils=tests)


def test_mask_gradient_passes_opcheck():
    kind, tensors, _, with_output, *numbers = call("gradient", MASKS["additive"])
    arguments = (kind, tensors, [False, False, False, True], with_output, *numbers)
    torch.library.opcheck(in_graphs, arguments, test_utils=("test_schema", "test_faketensor"))
    assert in_graphs(*arguments)[0].shape == (LENGTH, KEYS)


@pytest.mark.parametrize("kind", KINDS)
def test_vmapped_operator_matches_a_loop(kind):
    """The batched operator equals a loop when some tensors are batched."""
    kind, tensors, *rest = call(kind, SEEN[None])
    scales = torch.tensor([1.0, -0.5, 2.0], dtype=D)

    def of(scale):
        q = tensors[0] * scale
        last = [] if len(tensors) == 5 else [tensors[-1] if tensors[-1] is None else tensors[-1] * scale]
        return in_graphs(kind, [q, *tensors[1 : len(tensors) - len(last)], *last], *rest)

    found = torch.func.vmap(of)(scales)
    expected = [torch.stack(each) for each in zip(*map(of, scales), strict=True)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
