"""Shapes of derivatives on the meta device and of fake tensors, as used to plan memory before a model is loaded."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import hodiff


def cubes(x):
    return (x**3).sum()


TRANSFORMS = {
    "hvp": (lambda x: hodiff.hvp(cubes, x, x), (3,)),
    "hessian": (lambda x: hodiff.hessian(cubes)(x), (3, 3)),
    "hessian_matrix": (lambda x: hodiff.hessian_matrix(cubes, x), (3, 3)),
    "hessian_diagonal": (lambda x: hodiff.hessian_diagonal(cubes)(x), (3,)),
    "jacobian": (lambda x: hodiff.jacobian(lambda x: x**3)(x), (3, 3)),
    "laplacian": (lambda x: hodiff.laplacian(cubes)(x), ()),
    "bilaplacian": (lambda x: hodiff.bilaplacian(cubes)(x), ()),
    "HessianOperator": (lambda x: hodiff.HessianOperator(cubes, x) @ x, (3,)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_fake_tensors_get_shapes(name):
    compute, shape = TRANSFORMS[name]
    with FakeTensorMode():
        found = compute(torch.randn(3))
    assert isinstance(found, FakeTensor)
    assert found.shape == shape


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_meta_device_gets_shapes(name):
    compute, shape = TRANSFORMS[name]
    found = compute(torch.randn(3, device="meta"))
    assert found.is_meta
    assert found.shape == shape
