r"""Lesson 41: export with `torch.export`, ONNX and TorchScript, which loses the backward rule.

$$ y = \operatorname{round}(x W^T + b), \qquad \text{with the derivatives of } x W^T + b $$

A model is exported from Python as a graph. `torch.export` records the operators of `forward`, with a symbol for the
size of the batch. ONNX uses that graph and runs anywhere. The value is the same. The `backward` of a Function is not
exported: differentiating the exported program differentiates `round`, whose slope is 0. Therefore train models before
exporting them.

TorchScript, which is deprecated, keeps the Function as a Python call, whether a model is traced or scripted. Values and
derivatives are right in this process, but the model cannot be stored. `main` tests each: whether it accepts the model,
whether other batch sizes are right, the gradient of a sum in x (by the rule it is the sum of the columns of W), and
whether it can be stored.

    python examples/functions/41_export.py

Exercise: write `export_rows(module)`, the `torch.export` program of a module of inputs (batch, length, 3), exported at
(2, 5, 3), that runs at any batch and length.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lesson_tools import print_table
from torch import Tensor, nn
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (torch.tensor([0.3, -1.2], dtype=torch.float64),)
EXAMPLE = (torch.tensor([[0.5, -1.2, 2.0], [0.3, -0.7, 1.1]]),)
OTHER = (torch.tensor([[0.1, 1.4, -0.6], [2.2, 0.9, 0.8], [-1.5, 0.2, 1.9]]),)  # a batch of another size


class Round(Function):
    """Rounding to the nearest integer, straight through. Saves nothing."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the value."""
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """$ȳ$."""
        return cotangent.clone()

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """$ẋ$."""
        return tangent.clone()


class Model(nn.Module):
    """Linear layer, rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        with torch.no_grad():
            self.linear.weight.copy_(torch.tensor([[1.0, -0.5, 0.25], [0.5, 2.0, -1.0]]))
            self.linear.bias.copy_(torch.tensor([0.1, -0.2]))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the value."""
        return Round.apply(self.linear(x))


def exported(model: nn.Module) -> torch.export.ExportedProgram:
    """Export the program for a batch of any size."""
    return torch.export.export(model, EXAMPLE, dynamic_shapes=({0: torch.export.Dim("batch")},))


class Onnx:
    """ONNX file, run by onnxruntime; it has no derivatives."""

    def __init__(self, model: nn.Module):
        import onnxruntime

        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        program: Any = torch.onnx.export(exported(model), dynamo=True, verbose=False)
        self.file = io.BytesIO()
        program.save(self.file)
        self._session = onnxruntime.InferenceSession(self.file.getvalue())

    def __call__(self, x: Tensor) -> Tensor:
        """Run the model."""
        name = self._session.get_inputs()[0].name
        return torch.from_numpy(self._session.run(None, {name: x.detach().numpy()})[0])


# Functions that export a model, and that store the result.
WAYS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any, io.BytesIO], Any]]] = {
    "torch.export": (
        lambda model: exported(model).module(),
        lambda _, file: torch.export.save(exported(Model()), file),
    ),
    "ONNX": (Onnx, lambda program, file: file.write(program.file.getvalue())),
    "torch.jit.trace": (lambda model: torch.jit.trace(model, EXAMPLE), torch.jit.save),
    "torch.jit.script": (torch.jit.script, torch.jit.save),
}


def tried(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or the name of the error."""
    try:
        return call()
    except Exception as error:
        return f"raises {type(error).__name__}"


def gradient_of(program: Callable[[Tensor], Tensor]) -> str:
    """Return the gradient of the sum of the first row of outputs, or "none"."""
    x = EXAMPLE[0].clone().requires_grad_()
    y = program(x)[0].sum()
    return str(torch.autograd.grad(y, x)[0][0].tolist()) if y.requires_grad else "none"


def row_of(way: str) -> tuple[str, ...]:
    """Return the table row of one way."""
    make, save = WAYS[way]
    model = Model().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript warns that it is deprecated.
        program = tried(lambda: make(model))
        if isinstance(program, str):
            return way, program, "", "", ""
        same = tried(lambda: bool(torch.equal(program(OTHER[0]), model(OTHER[0]))))
        gradient = tried(lambda: gradient_of(program))
        stored = tried(lambda: save(program, io.BytesIO()))
    return way, "yes", str(same), gradient, stored if isinstance(stored, str) else "yes"


def draw(figure: Any) -> None:
    """One Function and its exported program: equal values, and different slopes."""
    x = torch.linspace(-2, 2, 401)[:, None]
    program = torch.export.export(Rounding(), (x,)).module()
    leaf = x.clone().requires_grad_()
    functions: dict[str, Any] = {"Function": Round.apply, "exported": program}
    for k, (name, f) in enumerate(functions.items()):
        axes = figure.add_subplot(1, 2, k + 1)
        axes.plot(x, f(x), label="value")
        axes.plot(x, torch.autograd.grad(f(leaf).sum(), leaf)[0], "--", label="slope by autograd")
        axes.set_title(name, fontsize="medium")
        axes.set_xlabel("x")
        axes.legend()


class Rounding(nn.Module):
    """Module that applies the Function alone."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute the value."""
        return Round.apply(x)


def main() -> hodiff.Report:
    """Print the results of each way, and check the routes of Round against each other."""
    print(f"gradient by the rule: {gradient_of(Model())}")
    print_table(("way", "takes it", "another batch", "gradient", "can be stored"), [row_of(way) for way in WAYS])
    report = hodiff.check(Round, INPUTS, order=3, approximate=True)
    print(report)
    return report


if __name__ == "__main__":
    main()
