"""Energies whose forward, backward and double backward are operators of a library, as fused kernels of potentials."""

from typing import Any

import pytest
import torch
from atoms.crystals import cluster
from torch import Tensor

import hodiff

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # no batching rules


@torch.library.custom_op("hodiff_tests::gaussian", mutates_args=())
def gaussian(r: Tensor) -> Tensor:
    return torch.exp(-r * r)


@torch.library.custom_op("hodiff_tests::gaussian_backward", mutates_args=())
def gaussian_backward(g: Tensor, r: Tensor) -> Tensor:
    return -2 * r * torch.exp(-r * r) * g


@torch.library.custom_op("hodiff_tests::gaussian_double_backward", mutates_args=())
def gaussian_double_backward(u: Tensor, g: Tensor, r: Tensor) -> Tensor:
    return (4 * r * r - 2) * torch.exp(-r * r) * g * u


for _operator in (gaussian, gaussian_backward, gaussian_double_backward):
    _operator.register_fake(lambda *tensors: torch.empty_like(tensors[-1]))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, g: Tensor) -> Tensor:
    return gaussian_backward(g, *ctx.saved_tensors)


def _double_backward(ctx: Any, u: Tensor) -> tuple[Tensor, Tensor]:
    g, r = ctx.saved_tensors
    return gaussian_backward(u, r), gaussian_double_backward(u, g, r)


gaussian.register_autograd(_backward, setup_context=_save)
gaussian_backward.register_autograd(_double_backward, setup_context=_save)


def energy(x: Tensor, well: Any = gaussian) -> Tensor:
    i, j = torch.triu_indices(x.shape[-2], x.shape[-2], 1)
    return well((x[..., i, :] - x[..., j, :]).norm(dim=-1)).sum(-1)


def plain(x: Tensor) -> Tensor:
    return energy(x, lambda r: torch.exp(-r * r))


@pytest.mark.parametrize(
    "options",
    [{}, {"batched": True}, {"free": [1, 2]}, {"rows": [3]}, pytest.param({"compile": True}, marks=pytest.mark.slow)],
)
def test_hessian(options: dict[str, Any]) -> None:
    x = cluster(5)
    found, expected = hodiff.atoms.hessian(energy, x, **options), hodiff.atoms.hessian(plain, x, **options)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-15)


@pytest.mark.slow
def test_compiled_model() -> None:
    x = cluster(5)
    found = hodiff.atoms.hessian(torch.compile(energy), x)
    torch.testing.assert_close(found, hodiff.atoms.hessian(plain, x), rtol=1e-13, atol=1e-15)
