"""Tests of graphs that torch's compiler gets wrong without hodiff's changes."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hodiff.checks.torch_warnings import silence_torch_warnings
from hodiff.torch_internals.compilers.tracing import compile_captured

INDEX = torch.tensor([1, 2, 0])


def expanded(source):
    """Return rows that share memory."""
    return (source[0] * 2 + 1).expand(source.shape)


def index_writes(source):
    yield expanded(source).index_add(1, INDEX, source)
    yield expanded(source).index_copy(1, INDEX, source)
    yield expanded(source).index_fill(0, INDEX[:1], 2.0)
    yield expanded(source).index_put((INDEX[:1],), source[0], accumulate=True)
    yield torch.ops.aten._unsafe_index_put(expanded(source), [INDEX[:1]], source[:1], True)
    yield (source.reshape(-1) * 1).unfold(0, 3, 1).index_add(0, INDEX[:1], source.reshape(-1)[None, :3])


@pytest.mark.slow
def test_in_place_writes_to_expanded_memory_match():
    source = torch.linspace(-1, 2, 24, dtype=torch.float64).reshape(4, 3, 2).sin()
    expected = [each.clone() for each in index_writes(source)]
    with silence_torch_warnings():
        graph = make_fx(lambda source: list(index_writes(source)))(source)
        found = compile_captured(graph, [source], None)(source)
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right)


def test_nothing_is_copied_without_shared_memory(monkeypatch):
    monkeypatch.setattr("torch._inductor.compile", lambda graph, inputs, options: graph)
    source = torch.rand(4, 3)
    graph = make_fx(lambda source: (source * 2).T.index_add(0, INDEX, source.T))(source)
    kept = compile_captured(graph, [source], None)
    assert not any("clone" in str(node.target) for node in kept.graph.nodes)
