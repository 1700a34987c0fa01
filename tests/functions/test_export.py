"""Tests of the export of a model of Functions: torch.export, ONNX and onnxruntime give the same outputs."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from hodiff import functions as hf

onnxruntime = pytest.importorskip("onnxruntime")


class Model(nn.Module):
    """A convolution, a normalized and gated layer, and attention over the features."""

    def __init__(self):
        super().__init__()
        self.filters = nn.Parameter(0.3 * torch.randn(4, 1, 3, 3))
        self.weight = nn.Parameter(0.3 * torch.randn(8, 64))
        self.bias = nn.Parameter(torch.zeros(8))
        self.scale = nn.Parameter(torch.ones(8))
        self.beta = nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = hf.clipped_relu(hf.conv2d(x, self.filters, padding=1), 2.0)
        x = hf.fused_linear(x.flatten(2), self.weight, self.bias, "gelu")
        x = hf.swish(hf.layer_norm(x, (8,), self.scale, self.bias), self.beta)
        x = hf.attention(x, x, x)
        return hf.log_softmax(hf.quantize_ste(x.mean(1), 8), -1)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture(scope="module")
def images():
    return torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def test_torch_export_matches(model, images):
    program = torch.export.export(model, (images,))
    torch.testing.assert_close(program.module()(images), model(images))


@pytest.mark.slow
def test_onnx_export_matches(model, images, tmp_path):
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecation warnings of the exporter
        torch.onnx.export(model, (images,), dynamo=True, verbose=False).save(path)
    runtime = onnxruntime.InferenceSession(path)
    (output,) = runtime.run(None, {runtime.get_inputs()[0].name: images.numpy()})
    np.testing.assert_allclose(output, model(images).detach().numpy(), rtol=1e-4, atol=1e-5)
