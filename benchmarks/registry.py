"""Registry of workloads and tallies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import meta_memory, optimizers
from benchmarks.memory import TITLE, Peak, dense_peaks
from benchmarks.problems import Problem
from benchmarks.training import page
from benchmarks.workloads import (
    attention,
    attention_kernels,
    attention_precision,
    authoring,
    batched,
    bfloat16,
    checks,
    corrections,
    dense,
    footprints,
    functions,
    hvp,
    jacobian,
    linear_losses,
    loss_kernels,
    meta,
    minimize,
    operators,
    overhead,
    pointwise,
    sharded,
    sparse,
    standard_problems,
    taylor,
    taylor_memory,
    taylor_orders,
    taylor_sparse,
)


@dataclass(frozen=True)
class Workload:
    """A family of problems.

    Attributes:
        title: Description in one line.
        problems: Function that yields the problems; with True, only the quick problems.
        rounds: Default number of timed rounds.
        peaks: Function that measures the memory of contestants, where memory matters.
        peaks_title: Heading of the memory table.
        draw_peaks: Function that saves a figure of the peaks in a directory.
        unit: Unit of the column `gradients`.
        reference: Reference that answers are compared with.
        one_core: Whether to use one thread and measure processor seconds.
        published: Published results for the same problems, with their source.
    """

    title: str
    problems: Callable[[bool], Iterable[Problem]]
    rounds: int
    peaks: Callable[[bool], list[Peak]] | None = None
    peaks_title: str = TITLE
    draw_peaks: Callable[[Sequence[Peak], Path], None] | None = None
    unit: str = "one eager gradient of the same function"
    reference: str = "central differences of the float64 gradient, or with a closed form"
    one_core: bool = False
    published: str = ""


@dataclass(frozen=True)
class Tally:
    """Quantities that are counted rather than timed.

    Attributes:
        title: Description in one line.
        sections: Function that yields heading, text and data of every section; with True, of few problems only.
        draw: Function that saves figures of all data in a directory.
    """

    title: str
    sections: Callable[[bool], Iterator[tuple[str, str, Any]]]
    draw: Callable[[dict[str, Any], Path], None] | None = None


WORKLOADS = {
    "hvp": Workload("Hessian-vector products of three networks, float32", hvp.problems, rounds=30),
    "operators": Workload(
        "products with curvature operators of three networks, float32", operators.problems, rounds=30
    ),
    "pointwise": Workload(
        "products with Hessians where activations and normalizations count, float32", pointwise.problems, rounds=15
    ),
    "dense": Workload("dense Hessians of two classifiers, float32", dense.problems, rounds=10, peaks=dense_peaks),
    "jacobian": Workload(
        "Jacobians with more outputs than inputs, float64",
        jacobian.problems,
        rounds=10,
        unit="one evaluation of the function",
        reference="torch.func.jacrev",
        one_core=True,
    ),
    "overhead": Workload("what a product costs beyond its arithmetic", overhead.problems, rounds=100),
    "corrections": Workload("what corrections cost on three networks, float32", corrections.problems, rounds=30),
    "authoring": Workload(
        "what rules cost beyond a hand-written Function, 10 elements, float32", authoring.problems, rounds=100
    ),
    "functions": Workload(
        "Functions against the torch compositions they replace, float32",
        functions.problems,
        rounds=10,
        peaks=functions.saved,
        peaks_title=functions.SAVED,
    ),
    "attention": Workload(
        "attention against torch's own kernels, float32",
        attention.problems,
        rounds=5,
        peaks=attention.peaks,
        peaks_title=attention.PEAKS,
        unit="the first row",
        reference="the first head in float64, by primitives",
    ),
    "linear_losses": Workload(
        "cross-entropy of linear logits, of a vocabulary, float32",
        linear_losses.problems,
        rounds=5,
        peaks=linear_losses.peaks,
        peaks_title=linear_losses.PEAKS,
        reference="the composition in float64",
        one_core=True,
    ),
    "meta": Workload(
        "meta-gradients of MAML on two networks, float32",
        meta.problems,
        rounds=20,
        peaks=meta_memory.peaks,
        peaks_title=meta_memory.TITLE,
        draw_peaks=meta_memory.draw,
        unit="the first row, a loop over tasks in plain torch",
        reference="that loop's meta-gradient in float64, which the tests compare with differences of the meta-loss",
    ),
    "minimize": Workload(
        "whole runs of minimisers, float64",
        minimize.problems,
        rounds=10,
        unit="SciPy's run with derivatives by hand",
        reference="the value that SciPy reaches",
        one_core=True,
    ),
    "batched": Workload(
        "many small minimisations at once, float64",
        batched.problems,
        rounds=5,
        unit="the loop over a fiftieth of the problems, so that 1 is fifty times as fast",
        reference="the loop's minimisers",
    ),
    "taylor": Workload(
        "Laplacians and bilaplacians of networks",
        taylor.problems,
        rounds=10,
        unit="the first row: the propagator by hand, or nested differentiation by torch",
        reference="the same in float64",
        one_core=True,
        published=taylor.PUBLISHED,
    ),
    "taylor_sparse": Workload(
        "Laplacians of networks over particles, float32",
        taylor_sparse.problems,
        rounds=5,
        unit="the first row",
        reference="the Laplacian in float64 by another way, at a typical point",
        one_core=True,
    ),
    "checks": Workload("checks of Functions, and the defects that they see", checks.problems, rounds=10),
}
TALLIES = {
    "taylor_orders": Tally("derivatives of high order along a line", taylor_orders.sections, taylor_orders.draw),
    "taylor_memory": Tally("memory of Laplacians, and a step in very many dimensions", taylor_memory.sections),
    "attention_precision": Tally(
        "errors of attention in 16 and 32 bits, by length of the sequence", attention_precision.sections
    ),
    "attention_kernels": Tally(
        "registers and instructions of attention on a GPU, as compiled", attention_kernels.sections
    ),
    "loss_kernels": Tally("registers of passes over rows of logits on a GPU, as compiled", loss_kernels.sections),
    "sparse": Tally("sparse Hessians, their stages, and dense ones beside", sparse.sections, sparse.draw),
    "footprints": Tally("memory of products, memory and time of inner loops, float32", footprints.sections),
    "sharded": Tally("products of models that are sharded over ranks: bytes, memory, time", sharded.sections),
    "bfloat16": Tally("digits of products in bfloat16, against float64", bfloat16.sections),
    "standard_problems": Tally(
        "what minimisers and least squares evaluate on standard problems, and where they end",
        standard_problems.sections,
    ),
    "optimizers": Tally("what a step of each optimizer costs, in gradients and in steps of AdamW", optimizers.sections),
    "training": Tally(
        "optimizers of first and second order on small networks, by steps and by seconds", page.sections, page.draw
    ),
}
