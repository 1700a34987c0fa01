"""Tests of the CPU attention kernels against torch primitives, and against the same formulas in torch operators."""

import ctypes
import math
import subprocess
import sys
import threading

import pytest
import torch
from functions.attention.oracle import ROUTES, assert_close, by_primitives, derivatives, normal
from hypothesis import given, settings
from hypothesis import strategies as st

from hodiff.functions import attention
from hodiff.kernels import fused
from hodiff.kernels.attention import cpu, problem
from hodiff.kernels.fused_library import run

built = pytest.mark.skipif(not fused.available(), reason="the kernels were not built")
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (3, 2)},
    "window before": {"window": (2, None), "is_causal": True, "corner": "lower-right"},
    "nothing in reach": {"window": (0, 0), "corner": "lower-right"},
    "soft-cap": {"softcap": 1.5},
    "soft-cap, causal": {"softcap": 0.7, "is_causal": True},
}
SHAPES = {
    "one panel": ((2, 3, 7, 5), (2, 3, 9, 5), (2, 3, 9, 4)),
    "shared keys": ((2, 2, 40, 3), (1, 1, 70, 3), (2, 1, 70, 3)),
    "more queries than keys": ((33, 8), (20, 8), (20, 24)),
}


def assert_kernels_match(shapes, options, mask=None, dtype=torch.float64, tolerance=1e-12):
    options = {**options}
    ours = {**options, "causal_corner": options.get("corner", "upper-left")}
    ours.pop("corner", None)
    inputs = tuple(normal(*shape, seed=i) for i, shape in enumerate(shapes))
    directions = tuple(normal(*shape, seed=10 + i) for i, shape in enumerate(shapes))
    batch = torch.broadcast_shapes(*(shape[:-2] for shape in shapes))
    cotangent = normal(*batch, shapes[0][-2], shapes[2][-1], seed=20)
    expected = derivatives(lambda q, k, v: by_primitives(q, k, v, mask, **options), inputs, directions, cotangent)
    given = [tuple(x.to(dtype) for x in each) for each in (inputs, directions)]
    mask = mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
    found = derivatives(lambda q, k, v: attention(q, k, v, mask, **ours), *given, cotangent.to(dtype))
    assert_close(found, expected, tolerance)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("by", ["kernels", "operators"])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_derivatives_match_primitives_by_every_route(options, shapes, by, calls, monkeypatch):
    if by == "operators":
        monkeypatch.setattr(cpu, "takes", lambda inputs: False)
    assert_kernels_match(shapes, options)
    assert bool(calls) == (by == "kernels" and fused.available())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", [(7, 9), (1, 9), (3, 1, 9), (2, 1, 7, 9)], ids=str)
@pytest.mark.parametrize("kind", ["boolean", "additive", "with rows that see nothing"])
def test_masks_match_primitives(kind, shape, calls):
    mask = normal(*shape)
    mask = mask if kind == "additive" else mask > (0.2 if kind == "boolean" else 1.5)
    assert_kernels_match(SHAPES["one panel"], {}, mask)
    assert_kernels_match(SHAPES["one panel"], {"is_causal": True, "softcap": 2.0}, mask)
    assert bool(calls) == fused.available()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_float32_matches_primitives(options, calls):
    assert_kernels_match(SHAPES["shared keys"], options, dtype=torch.float32, tolerance=2e-5)
    assert bool(calls) == fused.available()


@pytest.mark.slow
@built
@settings(max_examples=10)
@given(
    st.tuples(*[st.integers(1, 3)] * 2, *[st.integers(1, 70)] * 2, *[st.integers(1, 40)] * 2),
    st.sampled_from(sorted(OPTIONS)),
    st.integers(1, 5),
)
def test_any_size_and_number_of_chunks_matches(sizes, name, chunks):
    batch, heads, rows, keys, e, f = sizes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_chunks", lambda heads, panels, threads: min(chunks, panels))
        assert_kernels_match(((batch, heads, rows, e), (1, heads, keys, e), (batch, heads, keys, f)), OPTIONS[name])


@built
@pytest.mark.parametrize("e", [256, 130])
def test_large_heads_match(e):
    assert_kernels_match(((3, e), (5, e), (5, e)), {})


@built
def test_any_strides_match(calls):
    q, k, v = (normal(6, 5, 4, 2, seed=i).permute(2, 3, 0, 1)[..., ::2, :] for i in range(3))
    k, v = k.mT.contiguous().mT, v.expand(4, 2, 3, 5)
    mask = (normal(8, 6) > 0).T[::2, :3][:3]
    expected = by_primitives(*(x.contiguous() for x in (q, k, v)), mask.contiguous())
    torch.testing.assert_close(attention(q, k, v, mask), expected, rtol=0, atol=1e-14)
    assert calls


@built
def test_only_requested_gradients_are_computed(calls):
    q, k, v = (normal(5, 3, seed=i) for i in range(3))
    k.requires_grad_()
    torch.autograd.grad(attention(q, k, v).sum(), k)
    assert calls == [("out",), ("k",)]


@built
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_non_finite_inputs_propagate(poison, name):
    inputs = {each: normal(2, 70, 4, seed=i) for i, each in enumerate("qkv")}
    inputs[name][1, 68, 2] = poison
    y = attention(*inputs.values())
    expected = by_primitives(*inputs.values())
    assert torch.equal(y.isfinite(), expected.isfinite())
    assert bool(y[0].isfinite().all())
    assert not bool(y.isfinite().all())


@built
def test_uninitialized_memory_does_not_affect_results(monkeypatch):
    """Uninitialized memory does not change results: the kernels do not rely on zeros."""
    inputs, directions, cotangent = (
        [normal(1, 37, 5, seed=i) for i in range(3)],
        [normal(1, 37, 5)] * 3,
        normal(1, 37, 5),
    )
    clean = derivatives(attention, tuple(inputs), tuple(directions), cotangent)
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *size, **kw: empty(self, *size, **kw).fill_(math.nan))
    poisoned = derivatives(attention, tuple(inputs), tuple(directions), cotangent)
    for name in ROUTES:
        for a, b in zip(clean[name], poisoned[name], strict=True):
            assert torch.equal(a, b), name


@built
def test_repeated_and_threaded_runs_are_bitwise_equal():
    inputs = tuple(normal(3, 100, 16, dtype=torch.float32, seed=i) for i in range(3))
    first = torch.func.grad(lambda *x: attention(*x).square().sum(), (0, 1, 2))(*inputs)
    found = []

    def again():
        found.append(torch.func.grad(lambda *x: attention(*x).square().sum(), (0, 1, 2))(*inputs))

    threads = [threading.Thread(target=again) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == 4
    assert all(torch.equal(a, b) for each in found for a, b in zip(each, first, strict=True))


@built
def test_problem_struct_has_the_size_of_the_c_struct():
    assert ctypes.sizeof(problem.Problem) == run("hodiff_attention_problem")


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "softcap": 1.5, "window": (4, 0)}], ids=str)
def test_third_derivatives_match_primitives(options):
    q, k, v = (normal(2, 5, 3, seed=i) for i in range(3))
    w = normal(2, 5, 3, seed=7)
    reference = {name: each for name, each in options.items() if name != "causal_corner"}

    def third(f):
        def slope(q):
            return (torch.func.grad(lambda q: (f(q) * w).sum())(q) * w).sum()

        return torch.func.grad(lambda q: (torch.func.grad(slope)(q) * w).sum())(q)

    found = third(lambda q: attention(q, k, v, **options))
    torch.testing.assert_close(found, third(lambda q: by_primitives(q, k, v, **reference)), rtol=0, atol=1e-12)


MEMORY = """
import resource, sys, torch
from hodiff.functions import attention
torch.set_num_threads(1)
def product(length):
    inputs = [torch.randn(4, length, 32).requires_grad_() for _ in range(3)]
    first = torch.autograd.grad(attention(*inputs).square().sum(), inputs, create_graph=True)
    torch.autograd.grad(first, inputs, [x.detach() for x in inputs])
product(64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
product(int(sys.argv[1]))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@built
@pytest.mark.slow
@pytest.mark.parametrize("length", [1024, 2048, 4096])
def test_process_memory_is_linear_in_the_length(length):
    """The resident memory for a product with all inputs is two dozen tensors of input size plus a constant."""
    done = subprocess.run([sys.executable, "-c", MEMORY, str(length)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 24 * 4 * 4 * length * 32 + 2**24


@pytest.mark.slow
def test_compiled_graph_has_one_operator():
    """Dynamo sees one operator instead of a loop over blocks."""
    q, k, v = (normal(2, 40, 4, seed=i).requires_grad_() for i in range(3))
    graphs = []

    def backend(graph, inputs):
        graphs.append(str(graph.graph))
        return graph.forward

    compiled = torch.compile(lambda *x: attention(*x, is_causal=True).square().sum(), backend=backend, fullgraph=True)
    found = torch.autograd.grad(compiled(q, k, v), (q, k, v))
    expected = torch.autograd.grad(attention(q, k, v, is_causal=True).square().sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(graphs) == 1


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["value", "tangent", "gradient", "gradient_tangent"])
def test_operator_passes_opcheck(kind, dtype):
    q, k, v, t = (normal(2, 3, 6, 4, dtype=dtype, seed=i) for i in range(4))
    given = {"value": [], "tangent": [t, None, t, None], "gradient": [t], "gradient_tangent": [t, None, t, t, None, t]}
    with_output = kind != "gradient"
    wanted = [kind.startswith("gradient")] * 3 + [False]
    numbers = (0.3, -2, 3, 2.0, 0.0, [2, 3])
    found = torch.library.opcheck(
        torch.ops.hodiff.attention, (kind, [q, k, v, None, None, *given[kind]], wanted, with_output, *numbers)
    )
    assert set(found.values()) == {"SUCCESS"}
