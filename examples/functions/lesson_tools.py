"""Shared tools of the lessons: loading them, counting saved bytes, outcomes of calls, tables and bars."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).resolve().parent
LESSONS = {path.stem: path for path in sorted(FOLDER.glob("[0-9][0-9]_*.py"))}
SOLUTIONS = {path.stem: path for path in sorted((FOLDER / "solutions").glob("[0-9][0-9]_*.py"))}
PICTURES = FOLDER / "pictures"


def load(path: Path) -> ModuleType:
    """Run a file as a separate module, which can import its neighbours, such as this module."""
    name = f"{path.parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def lesson(number: int) -> ModuleType:
    """Load the lesson of that number."""
    return load(next(path for stem, path in LESSONS.items() if int(stem[:2]) == number))


def saved_bytes(f: Callable[..., Any], *inputs: Any, with_output: bool = False) -> int:
    """Count the bytes that autograd keeps between forward and backward, without inputs; with the output on request."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = f(*inputs)  # kept alive until the count, so that no two storages share an address
    if with_output:
        pack(output)
    for each in inputs:
        if isinstance(each, Tensor):
            kept.pop(each.untyped_storage().data_ptr(), None)
    del output
    return sum(kept.values())


def outcome(call: Callable[[], Any]) -> str:
    """Return the result of a call as text, or the kind of error it raises; torch's errors are RuntimeErrors."""
    try:
        result = call()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        return f"raises {type(error).__name__}"
    return f"{result.item():.4f}" if isinstance(result, Tensor) and result.numel() == 1 else str(result)


def print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print columns as wide as their widest cell."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[k]) for row in cells) for k in range(len(header))]
    for row in cells:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def draw_bars(axes: Any, values: dict[str, float], label: str, form: str = "{:,.0f}") -> None:
    """Draw one bar per name, labelled with its number."""
    bars = axes.barh(list(values), list(values.values()), color=[f"C{k}" for k in range(len(values))])
    axes.bar_label(bars, [form.format(value) for value in values.values()], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlabel(label)


def draw_matrix(axes: Any, matrix: Tensor, title: str, rows: Sequence[str], columns: Sequence[str]) -> None:
    """Draw a small matrix with its numbers, zero in white; for a Hessian with blocks see `hodiff.plot.hessian`."""
    values = matrix.detach().double()
    limit = values.abs().max().item() or 1.0
    axes.imshow(values.numpy(), cmap="bwr", vmin=-1.5 * limit, vmax=1.5 * limit)
    for i, row in enumerate(values.tolist()):
        for j, value in enumerate(row):
            axes.text(j, i, f"{value:.2g}" if value else "0", ha="center", va="center", fontsize="small")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    axes.set_title(title, fontsize="medium")
