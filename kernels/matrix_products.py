"""Matrix products by whichever of torch's two CPU libraries is faster on this processor, as a pass over a graph.

Torch multiplies float32 matrices by MKL, which on some AMD processors uses vectors of half the width; oneDNN, also
inside torch, does not. A graph that is already differentiated needs no further derivatives of its products, so they may
be exchanged. The faster library is measured once for each class of sizes, and cached in a file for the processor.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from hodiff.torch_internals.compilers.dynamic_shapes import are_open
from hodiff.torch_internals.operators import has_onednn_products, onednn_product

aten = torch.ops.aten
# Operators live as long as the library that defines them.
_LIBRARY = torch.library.Library("hodiff", "FRAGMENT")

# Fraction of MKL's time below which oneDNN is used, because the call of an operator costs time.
MARGIN = 0.9
# Multiplications below which the call costs more than the product.
LEAST = 2**20
REPEATS = 30


@cache
def matrix_product() -> Any:
    """Return the operator that computes `a @ b` for float32 matrices on a CPU by oneDNN.

    The operator is opaque to compilers, whose own form of oneDNN's product requires a constant factor.

    Returns:
        `torch.ops.hodiff.matrix_product.default`.
    """
    # A second definition, if this file is loaded under another name, would free the first.
    if not hasattr(torch.ops.hodiff, "matrix_product"):
        # Avoid `custom_op`, whose layers take 10 us per call for features that no differentiated graph needs.
        _LIBRARY.define("matrix_product(Tensor a, Tensor b) -> Tensor")
        _LIBRARY.impl("matrix_product", onednn_product, "CPU")
        _LIBRARY.impl("matrix_product", lambda a, b: a.new_empty(a.shape[0], b.shape[1]), "Meta")
    return torch.ops.hodiff.matrix_product.default


def exchange_products(graph: fx.GraphModule) -> int:
    """Exchange the matrix products of a differentiated graph for oneDNN's where they are faster.

    Args:
        graph: A graph whose nodes carry example values, as `make_fx` leaves them; it is changed in place.

    Returns:
        Number of exchanged products.
    """
    if not has_onednn_products():
        return 0
    exchanged = 0
    for node in graph.graph.nodes:
        if node.op != "call_function" or node.target is not aten.mm.default:
            continue
        a, b = (each.meta.get("val") for each in node.args)
        if a is None or b is None:  # added by another pass
            continue
        if are_open(a) or are_open(b):  # the faster library is unknown
            continue
        if a.dtype is torch.float32 and a.device.type == "cpu" and _size(a, b) >= LEAST and onednn_wins(*_class(a, b)):
            node.target = matrix_product()
            exchanged += 1
    if exchanged:
        graph.recompile()
    return exchanged


def onednn_wins(rows: int, inner: int, columns: int, a_transposed: bool, b_transposed: bool) -> bool:
    """Whether oneDNN is faster for a class of sizes on this processor, measured or cached."""
    known = _remembered()
    key = f"{rows}x{inner}x{columns}{'t' if a_transposed else 'n'}{'t' if b_transposed else 'n'}"
    if key not in known:
        known[key] = _ratio(rows, inner, columns, a_transposed, b_transposed)
        _remember(known)
    return known[key] < MARGIN


def _ratio(rows: int, inner: int, columns: int, a_transposed: bool, b_transposed: bool) -> float:
    """Measure the time by oneDNN over the time by MKL, in turns."""
    a = torch.ones(inner, rows).t() if a_transposed else torch.ones(rows, inner)
    b = torch.ones(columns, inner).t() if b_transposed else torch.ones(inner, columns)
    ways = (torch.mm, matrix_product())
    # Take the least time: other work of the machine makes a call longer, never shorter.
    least = [math.inf, math.inf]
    with torch.no_grad():
        for _ in range(REPEATS):
            for i, multiply in enumerate(ways):
                multiply(a, b)
                start = time.perf_counter()
                multiply(a, b)
                least[i] = min(least[i], time.perf_counter() - start)
    return least[1] / least[0]


def _class(a: Tensor, b: Tensor) -> tuple[int, int, int, bool, bool]:
    """Round sizes to the nearest power of two, and return the memory orders of the factors."""
    rows, inner, columns = (2 ** round(math.log2(size)) for size in (*a.shape, b.shape[1]))
    return rows, inner, columns, _lies_in_columns(a), _lies_in_columns(b)


def _lies_in_columns(matrix: Tensor) -> bool:
    return matrix.stride(0) == 1 and matrix.shape[0] > 1


def _size(a: Tensor, b: Tensor) -> int:
    return a.shape[0] * a.shape[1] * b.shape[1]


@cache
def _remembered() -> dict[str, float]:
    """Load the measurements on this processor, by class of sizes."""
    try:
        found = json.loads(_file().read_text(encoding="utf-8"))
        return {str(key): float(ratio) for key, ratio in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _remember(known: dict[str, float]) -> None:
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        # Write another file and move it, so that no process reads half a file.
        beside = _file().with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(known, indent=1), encoding="utf-8")
        beside.replace(_file())
    except OSError:
        # A read-only home costs one measurement per process.
        return


def _file() -> Path:
    """File of this processor's measurements; `HODIFF_CACHE` names another folder."""
    folder = Path(os.environ.get("HODIFF_CACHE") or Path.home() / ".cache" / "hodiff")
    words = (_processor(), f"torch-{torch.__version__}", f"{torch.get_num_threads()}-threads")
    name = "_".join("".join(c if c.isalnum() or c in ".-+" else "-" for c in word) for word in words)
    return folder / f"matrix-products_{name}.json"


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    # The model number distinguishes processors that share a name.
    wanted = ("model name", "cpu family", "model", "stepping")
    told = dict(line.partition(":")[::2] for line in lines if ":" in line)
    return "-".join(value.strip() for key, value in told.items() if key.strip() in wanted) or platform.machine()
