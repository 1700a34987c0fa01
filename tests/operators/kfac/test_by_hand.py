"""Tests of K-FAC and EKFAC, entry by entry, against loops over examples, columns and places in NumPy."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from operators.kfac.by_hand import CASES, corrected, dense, problem
from slow_cases import slow_except

import hodiff

SETTINGS = list(product(CASES, ["expand", "reduce"], ["joined", "separate"]))
# Every case and every setting occurs once.
QUICK = [
    ("mlp", "expand", "separate"),
    ("tokens", "reduce", "joined"),
    ("conv1d", "expand", "joined"),
    ("conv2d", "reduce", "separate"),
]
EACH = pytest.mark.parametrize("setting", slow_except(SETTINGS, QUICK, "-".join))


@EACH
def test_kfac_matches_numpy_loops(setting: tuple[str, str, str]) -> None:
    name, sharing, bias = setting
    p = problem(name)
    A = hodiff.KFACOperator(*p.arguments, sharing=sharing, bias=bias)
    expected = dense(p, sharing, bias == "joined")
    np.testing.assert_allclose(A.to_dense().numpy(), expected, rtol=0, atol=1e-13)
    # Split into batches of different sizes, a few columns at a time.
    data = [(p.inputs[:1], p.targets[:1]), (p.inputs[1:], p.targets[1:])]
    B = hodiff.KFACOperator(p.model, p.loss, p.x, data=data, sharing=sharing, bias=bias, chunk_size=2)
    np.testing.assert_allclose(B.to_dense().numpy(), expected, rtol=0, atol=1e-13)


@EACH
def test_ekfac_eigenvalues_match_numpy_loops(setting: tuple[str, str, str]) -> None:
    name, sharing, bias = setting
    p = problem(name)
    A = hodiff.EKFACOperator(*p.arguments, sharing=sharing, bias=bias)
    found = {(source.layer, source.parts[0]): block for source, block in zip(A._all_sources, A.blocks, strict=True)}

    def correct(layer: str, group: int, part: str, A: np.ndarray, B: np.ndarray, gradients: Any) -> np.ndarray:
        # Eigenvectors of equal eigenvalues are not unique, so use the operator's.
        block = found[layer, part]
        left = block.left[group].numpy()
        right = np.eye(len(A)) if block.right is None else block.right[group].numpy()
        for Q, factor in ((left, B), (right, A)):
            np.testing.assert_allclose(Q.T @ Q, np.eye(len(Q)), atol=1e-12)
            rotated = Q.T @ factor @ Q
            np.testing.assert_allclose(rotated, np.diag(np.diag(rotated)), atol=1e-12)
        return corrected(np.kron(left, right), gradients)

    expected = dense(p, sharing, bias == "joined", correct)
    np.testing.assert_allclose(A.to_dense().numpy(), expected, rtol=0, atol=1e-12)
    # Split into batches of different sizes, a few columns at a time. The eigenvectors may differ there.
    data = [(p.inputs[:1], p.targets[:1]), (p.inputs[1:], p.targets[1:])]
    A = hodiff.EKFACOperator(p.model, p.loss, p.x, data=data, sharing=sharing, bias=bias, chunk_size=2)
    found = {(source.layer, source.parts[0]): block for source, block in zip(A._all_sources, A.blocks, strict=True)}
    expected = dense(p, sharing, bias == "joined", correct)
    np.testing.assert_allclose(A.to_dense().numpy(), expected, rtol=0, atol=1e-12)


def test_ekfac_is_closer_to_exact_blocks_than_kfac() -> None:
    """EKFAC is closer than K-FAC to the exact blocks, in the Frobenius norm, in all settings."""
    for name, sharing in product(CASES, ["expand", "reduce"]):
        p = problem(name)
        exact = hodiff.GaussNewtonOperator(*p.arguments).to_dense()
        plain = hodiff.KFACOperator(*p.arguments, sharing=sharing)
        # Both are zero between the blocks of layers, and between groups of channels.
        apart = _pattern(plain)
        distance = [
            (A.to_dense() - exact * apart).norm() for A in (hodiff.EKFACOperator(*p.arguments, sharing=sharing), plain)
        ]
        assert distance[0] <= distance[1] * (1 + 1e-12), name
        assert distance[0] < 0.999 * distance[1] or distance[1] < 1e-12 * exact.norm(), name


def _pattern(A: hodiff.KFACOperator) -> torch.Tensor:
    """Return a mask of parameter pairs in the same block."""
    labels = torch.zeros(A.shape[0])
    number = 0
    leaves: list[Any] = [None] * len(A.domain.sizes)
    for block in A.blocks:
        groups, p, q = block.layout.shape
        marks = number + torch.arange(groups)[:, None, None].expand(1, groups, p, q)
        block.layout.scatter(marks, leaves)
        number += groups
    labels = torch.cat(leaves, dim=1)[0]
    return labels[:, None] == labels
