"""Tests of Functions and modules with symbolic sizes: exported, compiled and trained once for all sizes."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from functions.case import FunctionCase
from functions.catalogue import CASES
from torch import Tensor, nn
from torch.export import Dim, export

import hodiff.nn as hn
from hodiff import InputError
from hodiff.functions import swish, weighted_sum

D = torch.float64
# For each input, the dimensions with symbolic sizes and their symbols. The default is the first dimension of all inputs
# with the rank and number of rows of the first input.
Symbols = Sequence[dict[int, str]]
ROWS, COLUMNS, NONE = {0: "batch"}, {1: "batch"}, {}
SYMBOLS: dict[str, Symbols] = {
    "weighted_sum": ({}, ROWS, ROWS, {}),
    "attention": ({0: "queries"}, {0: "keys"}, {0: "keys"}),
    "attention-additive-mask": ({0: "queries"}, {0: "keys"}, {0: "keys"}, {0: "queries", 1: "keys"}),
    "attention-boolean-mask-batch": (ROWS, {}, ROWS),
    "attention-window-capped": ({0: "queries"}, {0: "keys"}, {0: "keys"}),
    "attention-causal": ({0: "queries"}, {0: "keys"}, {0: "keys"}),
    "bias_act-identity": ({0: "batch", 2: "length"}, {}),
    "bias_act-gelu": ({0: "batch", 2: "length"}, {}),
    "conv1d": ({0: "batch", 2: "length"}, {}, {}),
    "conv1d-strided": ({0: "batch", 2: "length"}, {}, {}),
    "conv2d": ({0: "batch", 2: "height", 3: "width"}, {}, {}),
    "conv2d-groups": ({0: "batch", 2: "height", 3: "width"}, {}, {}),
    "conv3d": ({0: "batch", 2: "depth"}, {}, {}),
    "fused_linear-tanh": ({0: "batch", 1: "length"}, {}, {}),
    "fused_linear-gelu": (ROWS, {}, {}),
    "cross_entropy": (ROWS, ROWS),
    "cross_entropy-smoothed": ({0: "batch", 2: "length"}, {0: "batch", 1: "length"}),
    "cross_entropy-weighted": (ROWS, ROWS, {}),
    "linear_cross_entropy": (ROWS, {}, ROWS),
    "linear_cross_entropy-options": (ROWS, {}, {}, ROWS),
    "layer_norm-plain-two-dimensions": (ROWS,),
    "group_norm": ({0: "batch", 2: "length"}, {}, {}),
    "instance_norm": ({0: "batch", 2: "length"}, {}, {}),
    "batch_norm-training": ({0: "batch", 2: "length"}, {}, {}),
    "batch_norm-evaluation": ({0: "batch", 2: "length"}, {}, {}),
    "project_simplex-columns": (COLUMNS,),
    "soft_rank-columns": (COLUMNS,),
    "soft_sort-columns": (COLUMNS,),
}
# These cases cannot be exported: NumPy code, eigenvalues whose gaps select a formula, a node that is used only for its
# derivatives. The rest have no batch: a single vector, or a target, a draw or lengths of fixed size.
WITHOUT = {
    "numpy_function-elementwise",
    "numpy_function-rules",
    "hvp_function",
    "spectral_function",
    "fused_linear-silu",
    "cross_entropy-gradient",
    "linear_cross_entropy-gradient",
    "attention-dropout",
    "packed_attention",
}
QUICK = {"swish", "softplus", "attention", "layer_norm", "cross_entropy-probabilities"}
# Compile and train the first case of each Function. The quick cases are also traced for the default backend.
COMPILED = QUICK | set({case.Function: case.name for case in reversed(CASES) if case.name not in WITHOUT}.values())
# A convolution needs at least the width of its filter.
LONG = 8
SIZES = (3, 5, 2, 7, 4, 11, 6, 8, 9, 10)


def selected(names: Any) -> list[Any]:
    return [pytest.param(each, id=each.name, marks=[] if each.name in QUICK else pytest.mark.slow) for each in names]


def symbols_of(case: FunctionCase, inputs: Sequence[Any]) -> Symbols:
    """Return the symbols from the table, or the first dimension by default."""
    if case.name in SYMBOLS:
        return SYMBOLS[case.name]
    rank, rows = inputs[0].dim(), inputs[0].shape[0]
    return [
        ROWS if isinstance(each, Tensor) and each.dim() == rank and each.shape[0] == rows else {} for each in inputs
    ]


def resized(inputs: Sequence[Any], symbols: Symbols, size: int) -> tuple[Any, ...]:
    """Return the inputs at other sizes, with repeated numbers; each symbol has a different size."""
    names = sorted({name for each in symbols for name in each.values()})
    found = []
    for each, dims in zip(inputs, symbols, strict=True):
        for dim, name in dims.items():
            wanted = size + names.index(name)
            wanted += LONG if name in {"length", "height", "width", "depth"} else 0
            each = each.index_select(dim, torch.arange(wanted) % each.shape[dim])
        found.append(each)
    return tuple(found)


class Wrapped(nn.Module):
    def __init__(self, function: Any):
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def exported_for_all_sizes(function: Any, inputs: Sequence[Any], symbols: Symbols) -> None:
    dims = {
        name: Dim(name, min=2 if name in {"batch", "queries", "keys"} else LONG, max=4096)
        for each in symbols
        for name in each.values()
    }
    shapes = (tuple({dim: dims[name] for dim, name in each.items()} for each in symbols),)
    program = export(Wrapped(function), resized(inputs, symbols, 3), dynamic_shapes=shapes).module()
    for size in (3, 8):
        values = resized(inputs, symbols, size)
        torch.testing.assert_close(program(*values), function(*values))


def differentiated(inputs: Sequence[Any]) -> list[Any]:
    """Return the inputs, with floating-point tensors as leaves that require a gradient."""
    return [
        each.detach().requires_grad_() if isinstance(each, Tensor) and each.is_floating_point() else each
        for each in inputs
    ]


def with_gradients(function: Any, inputs: Sequence[Any], parameters: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the value and the gradient of its sum of squares."""
    value = function(*inputs)
    parts = value if isinstance(value, (tuple, list)) else [value]
    parts = [each.square().sum() for each in parts if each.requires_grad]
    by = [each for each in (*inputs, *parameters) if isinstance(each, Tensor) and each.requires_grad]
    return value, torch.autograd.grad(parts, by, allow_unused=True) if parts else ()


def compiled_for_all_sizes(
    function: Any, inputs: Sequence[Any], symbols: Symbols, parameters: Sequence[Tensor] = (), backend: str = "eager"
) -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda *inputs: function(*inputs), backend=backend, fullgraph=True)
    for count, size in enumerate(SIZES):
        values = differentiated(resized(inputs, symbols, size))
        # The first size compiles one graph, and the second compiles a graph for all sizes.
        with torch.compiler.set_stance("default" if count < 2 else "fail_on_recompile"):
            found = with_gradients(compiled, values, parameters)
        torch.testing.assert_close(found, with_gradients(function, values, parameters))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", selected(case for case in CASES if case.name not in WITHOUT))
def test_functions_compile_and_export_once_for_all_sizes(case: FunctionCase) -> None:
    if case.name in {"AttentionGradient", "group_norm"} and torch.__version__ < "2.13":
        pytest.skip("torch's compiler or its guards fail")
    inputs = case.draw(D)
    symbols = symbols_of(case, inputs)
    exported_for_all_sizes(case.function, inputs, symbols)
    if case.compile and case.name in COMPILED:
        backend = "aot_eager" if case.name in QUICK else "eager"
        compiled_for_all_sizes(case.function, inputs, symbols, backend=backend)


TEXT, IMAGES = (2, 4, 6), (2, 4, 6, 6)
SEQUENCE, PIXELS = {0: "batch", 1: "length"}, {0: "batch", 2: "height", 3: "width"}
MODULES: dict[str, tuple[nn.Module, tuple[int, ...], dict[int, str]]] = {
    "GELU": (hn.GELU(), TEXT, SEQUENCE),
    "ClippedReLU": (hn.ClippedReLU(2.0), TEXT, SEQUENCE),
    "LogSigmoid": (hn.LogSigmoid(), TEXT, SEQUENCE),
    "Mish": (hn.Mish(), TEXT, SEQUENCE),
    "ReLU": (hn.ReLU(), TEXT, SEQUENCE),
    "ScaledSigmoid": (hn.ScaledSigmoid(), TEXT, SEQUENCE),
    "SiLU": (hn.SiLU(), TEXT, SEQUENCE),
    "Softplus": (hn.Softplus(), TEXT, SEQUENCE),
    "Swish": (hn.Swish(), TEXT, SEQUENCE),
    "Conv1d": (hn.Conv1d(4, 3, 3), TEXT, {0: "batch", 2: "length"}),
    "Conv2d": (hn.Conv2d(4, 3, 3, padding=1), IMAGES, PIXELS),
    "Conv3d": (hn.Conv3d(4, 3, 2), (2, 4, 4, 4, 4), {0: "batch", 2: "depth"}),
    "GradientReversal": (hn.GradientReversal(), TEXT, SEQUENCE),
    "ScaleGradient": (hn.ScaleGradient(0.5), TEXT, SEQUENCE),
    "FusedLinear": (hn.FusedLinear(6, 3, activation="gelu"), TEXT, SEQUENCE),
    "BatchNorm1d": (hn.BatchNorm1d(4), TEXT, {0: "batch", 2: "length"}),
    "BatchNorm2d": (hn.BatchNorm2d(4), IMAGES, PIXELS),
    "BatchNorm3d": (hn.BatchNorm3d(4), (2, 4, 4, 4, 4), {0: "batch", 2: "depth"}),
    "GroupNorm": (hn.GroupNorm(2, 4), IMAGES, PIXELS),
    "InstanceNorm1d": (hn.InstanceNorm1d(4), TEXT, {0: "batch", 2: "length"}),
    "InstanceNorm2d": (hn.InstanceNorm2d(4), IMAGES, PIXELS),
    "InstanceNorm3d": (hn.InstanceNorm3d(4), (2, 4, 4, 4, 4), {0: "batch", 2: "depth"}),
    "LayerNorm": (hn.LayerNorm(6), TEXT, SEQUENCE),
    "RMSNorm": (hn.RMSNorm(6), TEXT, SEQUENCE),
    "FakeQuantize": (hn.FakeQuantize(8), TEXT, SEQUENCE),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_modules_compile_and_export_once_for_all_sizes(name: str) -> None:
    module, shape, symbols = MODULES[name]
    module = module.to(D)
    inputs = (torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=D),)
    exported_for_all_sizes(module.eval(), inputs, (symbols,))
    compiled_for_all_sizes(module.train(), inputs, (symbols,), tuple(module.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CrossEntropyLoss", "HuberLoss", "HingeLoss"])
def test_losses_compile_and_export_once_for_all_sizes(name: str) -> None:
    loss, generator = getattr(hn, name)(), torch.Generator().manual_seed(0)
    outputs = torch.randn(2, 5, generator=generator, dtype=D)
    target = {"CrossEntropyLoss": torch.tensor([1, 4]), "HuberLoss": outputs + 0.3, "HingeLoss": outputs.sign()}
    inputs = (outputs, target[name])
    exported_for_all_sizes(loss, inputs, (ROWS, ROWS))
    compiled_for_all_sizes(loss, inputs, (ROWS, ROWS))


def test_every_module_is_tested() -> None:
    public = {name for name, each in vars(hn).items() if isinstance(each, type) and issubclass(each, nn.Module)}
    assert public - set(MODULES) == {"CrossEntropyLoss", "HuberLoss", "HingeLoss", "GumbelSoftmax"}


def test_wrong_shapes_raise_named_errors_when_compiled() -> None:
    """Compiled and exported code names the arguments in its errors, like eager code."""
    rows, five = torch.ones(3, 4), torch.ones(5)
    message = r"swish: expected shapes that broadcast, got x \(3, 4\), beta \(5,\)"
    with pytest.raises(InputError, match=message):
        export(Wrapped(swish), (rows, five))
    with pytest.raises(InputError, match=r"got x \(s\d+, 4\), beta \(5,\)"):
        export(Wrapped(swish), (rows, five), dynamic_shapes=(({0: Dim.DYNAMIC}, {}),))
    with pytest.raises(InputError, match=message):
        torch.compile(swish, backend="eager")(rows, five)
    # Dynamo wraps the message and quotes the original error.
    with pytest.raises(Exception, match=message):
        torch.compile(swish, backend="eager", fullgraph=True)(rows, five)


def test_weighted_sum_compiles_without_gradients() -> None:
    """A Function of a variable number of tensors compiles without gradients."""
    xs, weights = (torch.ones(3), torch.full((3,), 2.0)), torch.tensor([1.0, 3.0])
    compiled = torch.compile(weighted_sum, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(xs, weights), torch.full((3,), 7.0))


def test_fake_quantize_step_size_gradient_in_float16_is_finite() -> None:
    gradients = []
    for function in (module := hn.FakeQuantize(8).half(), torch.compile(module, backend="eager", dynamic=True)):
        function(torch.full((70_000,), 1.3, dtype=torch.float16)).sum().backward()
        gradients.append(module.scale.grad)
        module.scale.grad = None
    assert gradients[0] != 0
    torch.testing.assert_close(gradients[1], gradients[0])
