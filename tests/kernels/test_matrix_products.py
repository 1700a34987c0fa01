"""Tests of the matrix products of compiled graphs: correct products, and a choice that is measured once and cached."""

import json
import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hodiff.kernels import matrix_products
from hodiff.kernels.matrix_products import exchange_products, matrix_product, onednn_wins
from hodiff.torch_internals.operators import has_onednn_products

pytestmark = pytest.mark.skipif(not has_onednn_products(), reason="torch without MKL or oneDNN")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache that is cleared afterwards."""
    monkeypatch.setenv("HODIFF_CACHE", str(tmp_path))
    matrix_products._remembered.cache_clear()
    yield tmp_path
    matrix_products._remembered.cache_clear()


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def operands():
    a, b = draw(128, 96), draw(96, 128, seed=1)
    for left in (a, draw(96, 128, seed=2).t(), draw(128, 192)[:, ::2]):
        for right in (b, draw(128, 96, seed=3).t(), draw(192, 128)[::2]):
            yield left, right


@pytest.mark.parametrize(("a", "b"), list(operands()))
def test_product_matches_float64(a, b):
    exact = a.double() @ b.double()
    assert (matrix_product()(a, b) - exact).abs().max() < 96 * 2**-24 * exact.abs().max()


def test_only_faster_products_are_replaced(folder, monkeypatch):
    ratios = {(128, 128, 128): 0.5, (256, 128, 128): 0.95}
    monkeypatch.setattr(matrix_products, "_ratio", lambda *form: ratios[form[:3]])

    def twice(a, b, c):
        return a @ b, c @ b, a[:2] @ b, a.double() @ b.double()

    inputs = draw(128, 128), draw(128, 128, seed=1), draw(256, 128, seed=2)
    graph = make_fx(twice, tracing_mode="fake")(*inputs)
    # The second product is not enough faster, the third is too small, the fourth has dtype float64.
    assert exchange_products(graph) == 1
    assert [node.target for node in graph.graph.nodes].count(matrix_product()) == 1
    for found, expected in zip(graph(*inputs), twice(*inputs), strict=True):
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_choice_is_measured_once(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(matrix_products, "_ratio", lambda *form: asked.append(form) or 0.5)
    for _ in range(2):
        assert onednn_wins(64, 64, 64, False, False)
    # Clear the cache, like a new process.
    matrix_products._remembered.cache_clear()
    assert onednn_wins(64, 64, 64, False, False)
    assert len(asked) == 1
    (file,) = folder.iterdir()
    assert json.loads(file.read_text(encoding="utf-8")) == {"64x64x64nn": 0.5}


@pytest.mark.parametrize("content", ["", "[1]", '{"64x64x64nn": "fast"}', "null"])
def test_broken_cache_file_is_measured_again(folder, monkeypatch, content):
    matrix_products._file().write_text(content, encoding="utf-8")
    monkeypatch.setattr(matrix_products, "_ratio", lambda *form: 2.0)
    assert not onednn_wins(64, 64, 64, False, False)


def test_unwritable_cache_is_ignored(folder, monkeypatch):
    (folder / "file").touch()
    monkeypatch.setenv("HODIFF_CACHE", str(folder / "file" / "below"))
    monkeypatch.setattr(matrix_products, "_ratio", lambda *form: 0.5)
    assert onednn_wins(64, 64, 64, False, False)


def test_measured_ratio_is_positive_and_finite():
    ratio = matrix_products._ratio(64, 64, 64, True, False)
    assert ratio > 0
    assert math.isfinite(ratio)
