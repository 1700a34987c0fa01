"""Products with curvature matrices of networks, Laplacians, cross-entropies of logits, and steps of optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import hodiff
from benchmarks.gpu.measure import DEVICE, compare, drawn, skipped
from benchmarks.language_model import LanguageModel
from benchmarks.optimizers import Run, loop
from benchmarks.torch_ways import double_backward, gradient
from benchmarks.workloads import linear_losses
from hodiff import functions, optim
from hodiff.corrections.mechanism.registry import CORRECTIONS, Correction
from hodiff.operators import GaussNewtonOperator, HessianOperator


def mlp(small: bool) -> None:
    """Measure products of a network of three layers."""
    width, batch = (64, 32) if small else (2048, 4096)
    sizes = (784, width, width, 10)
    layers = [each for a, b in pairwise(sizes) for each in (nn.Linear(a, b), nn.Tanh())][:-1]
    _products(f"MLP of width {width}, batch {batch}", nn.Sequential(*layers), drawn(batch, 784), 10, rules_too=True)


def resnet(small: bool) -> None:
    """Measure products of a ResNet-18."""
    if find_spec("torchvision") is None:
        return skipped("ResNet-18", "torchvision is not installed")
    from torchvision.models import resnet18

    batch = 2 if small else 512
    model = resnet18(num_classes=10).eval()
    _products(f"ResNet-18, {batch} x 32 x 32, eval", model, drawn(batch, 3, 32, 32), 10, rules_too=True)
    return None


def language(small: bool) -> None:
    """Measure products of GPT-2 of 124 million parameters, in TF32."""
    words, length, width, heads, layers = (64, 16, 32, 2, 2) if small else (50304, 1024, 768, 12, 12)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    batch = 2 if small else 4
    tokens = torch.randint(words, (batch, length), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    _products(
        f"GPT of {layers} layers, {batch} x {length}", LanguageModel(words, length, width, heads, layers), tokens, words
    )
    torch.set_float32_matmul_precision(precision)


@contextmanager
def rules_of_cpus() -> Iterator[None]:
    """Use rules that were measured to be faster on CPUs on every device, to measure them here."""
    everywhere, as_measured = _rules_by_device()
    CORRECTIONS.update(everywhere)
    try:
        yield
    finally:
        CORRECTIONS.update(as_measured)


@cache
def _rules_by_device() -> tuple[dict[Any, Correction], dict[Any, Correction]]:
    """Return rules that name devices, without and with the devices."""
    named = {function: each for function, each in CORRECTIONS.items() if each.devices}
    return {function: replace(each, devices=()) for function, each in named.items()}, named


def _products(title: str, model: nn.Module, inputs: Tensor, classes: int, *, rules_too: bool = False) -> None:
    """Compare products of hodiff with torch's and, if it is installed, curvlinops'; and rules that name devices."""
    model = model.to(DEVICE)
    with torch.no_grad():
        rows = model(inputs).shape[0]
    targets = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    x = {name: each.detach() for name, each in model.named_parameters()}
    v = {name: drawn(*each.shape, seed=2) for name, each in x.items()}

    def loss(x: dict[str, Tensor]) -> Tensor:
        return cross_entropy(functional_call(model, x, (inputs,)), targets)

    hessian = HessianOperator(loss, x)
    gauss_newton = GaussNewtonOperator(model, cross_entropy, x, inputs, targets)
    of_cpus = HessianOperator(loss, x)

    def one_product() -> Any:
        with rules_of_cpus():
            return hodiff.hvp(loss, x, v)

    def later_product() -> Any:
        with rules_of_cpus():
            return of_cpus @ v

    contestants: dict[str, Callable[[], Any]] = {
        "torch, gradient": lambda: gradient(loss, x),
        "torch, double backward": lambda: double_backward(loss, x, v),
        "hodiff.hvp": lambda: hodiff.hvp(loss, x, v),
        "HessianOperator, later products": lambda: hessian @ v,
        "GaussNewtonOperator, later products": lambda: gauss_newton @ v,
    }
    if rules_too:
        contestants["hodiff.hvp, rules that are faster on CPUs"] = one_product
        contestants["HessianOperator, later products, rules that are faster on CPUs"] = later_product
    if find_spec("curvlinops") is not None:
        from curvlinops import HessianLinearOperator

        data = [(inputs, targets)]
        peer = HessianLinearOperator(
            model, nn.CrossEntropyLoss(), list(model.parameters()), data, check_deterministic=False
        )
        flat = torch.cat([each.flatten() for each in v.values()])
        contestants["curvlinops"] = lambda: peer @ flat
    compare(title, contestants)


def linear_cross_entropy(small: bool) -> None:
    """Measure gradients and products of the cross-entropy of linear logits."""
    tokens, width, words = (32, 16, 128) if small else (4096, 768, 50304)
    ways = {"torch": linear_losses.LOSSES["composition"], "hodiff": functions.linear_cross_entropy}
    target = torch.randint(words, (tokens,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for dtype in (torch.float32, torch.bfloat16):
        inputs = drawn(tokens, width, dtype=dtype), drawn(words, width, dtype=dtype, seed=1) / width**0.5, target
        for kind, step in {"gradient": linear_losses.gradient, "product": linear_losses.product}.items():
            title = f"linear cross-entropy, {kind}, {tokens} x {width} x {words}, {str(dtype).removeprefix('torch.')}"
            compare(title, {name: partial(step, loss, *inputs) for name, loss in ways.items()})


def laplacian(small: bool) -> None:
    """Measure Laplacians of a network at many points."""
    points, width = (8, 16) if small else (2048, 256)
    layers = [nn.Linear(32, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)]
    for dtype in (torch.float32, torch.float64):
        net = nn.Sequential(*layers).to(DEVICE, dtype).requires_grad_(False)
        x = drawn(points, 32, dtype=dtype)

        def value(x: Tensor, net: nn.Module = net) -> Tensor:
            return net(x).squeeze(-1)

        compare(
            f"Laplacian, {points} points, {str(dtype).removeprefix('torch.')}",
            {
                "torch, trace of the Hessian": partial(_traces, value, x),
                "hodiff.laplacian": partial(_laplacians, value, x),
            },
            partial(_exact_laplacians, net, x),
            ["torch, trace of the Hessian", "hodiff.laplacian"],
        )


def _traces(value: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, ...]:
    return (torch.func.vmap(lambda x: torch.func.hessian(value)(x).trace())(x),)


def _laplacians(value: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, ...]:
    return (hodiff.laplacian(value, batched=True)(x),)


def _exact_laplacians(net: nn.Sequential, x: Tensor) -> tuple[Tensor, ...]:
    """Compute the Laplacian in float64 by pushing first and second derivatives through the layers by hand."""
    x = x.double()
    first, second = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand(len(x), -1, -1), torch.zeros_like(x)
    for layer in net:
        if isinstance(layer, nn.Linear):
            weight = layer.weight.double()
            x, first, second = x @ weight.T + layer.bias.double(), first @ weight.T, second @ weight.T
        else:
            y = x.tanh()
            slope = 1 - y * y
            second = slope * second - 2 * y * slope * first.square().sum(1)
            x, first = y, slope[:, None] * first
    return (second.squeeze(-1),)


def optimizers(small: bool) -> None:
    """Measure steps of optimizers with their default intervals."""
    layers, length, width, heads = (1, 8, 16, 2) if small else (6, 256, 512, 8)
    tokens = torch.randint(256, (4 if small else 32, length), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    labels = tokens.flatten().roll(1)
    kinds = {"AdamW": torch.optim.AdamW} | {
        name: getattr(optim, name) for name in ("SophiaG", "SophiaH", "AdaHessian", "Shampoo", "SOAP", "KFAC")
    }

    def steps(kind: Any) -> Run:
        model = LanguageModel(256, length, width, heads, layers).to(DEVICE)
        return loop(kind, (model, tokens, labels), layers_of if kind is optim.KFAC else nn.Module.parameters)

    # Ten steps contain one refresh of most optimizers.
    def ten(run: Run) -> None:
        with run.turn():
            for _ in range(10):
                run.step()

    contestants: dict[str, Callable[[], Any]] = {name: partial(ten, steps(kind)) for name, kind in kinds.items()}
    compare(f"ten steps, GPT of {layers} layers, {tuple(tokens.shape)} tokens", contestants, rounds=3)


def layers_of(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of linear layers, which K-FAC supports."""
    return [each for layer in model.modules() if isinstance(layer, nn.Linear) for each in layer.parameters()]
