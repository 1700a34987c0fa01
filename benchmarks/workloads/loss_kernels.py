"""Registers, spills and shared memory of Triton's passes over rows of logits, compiled for GPUs without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.report import table
from benchmarks.workloads.attention_kernels import ARCHITECTURES, Driver, resources

TEXT = """\
Compiled by Triton {triton} and its ptxas for sm_{architecture}; nothing was run. `result` is the dtype of the
cotangents, `spilled` the local memory of a thread in bytes, `shared` the shared memory of a program in bytes."""


class Kernel(NamedTuple):
    """A compiled kernel.

    Attributes:
        call: The function whose pass it is.
        kernel: The pass.
        result: Dtype of the results.
        smoothed: Whether labels are smoothed.
        rows: Rows of a tile.
        columns: Columns of a tile.
        warps: Warps of a program.
        registers: Registers of a thread.
        spilled: Local memory of a thread in bytes.
        shared: Shared memory of a program in bytes.
    """

    call: str
    kernel: str
    result: str
    smoothed: bool
    rows: int
    columns: int
    warps: int
    registers: int
    spilled: int
    shared: int


def compiled_here(architecture: int) -> Iterator[Kernel]:
    """Compile every kernel of every call; this needs a process of its own, in which Triton's interpreter is off."""
    import triton

    from hodiff.kernels.cross_entropy import triton_launches
    from hodiff.kernels.cross_entropy.gpu import Target

    triton.runtime.driver.set_active(Driver(architecture))
    made: list[Any] = []

    class Compiling:
        """Stands for a kernel, and compiles instead of launching."""

        def __init__(self, kernel: Any):
            self.kernel, self.arg_names = kernel, kernel.arg_names

        def __getitem__(self, grid: Any) -> Any:
            return lambda **given: made.append((given, self.kernel.warmup(grid=(1,), **given)))

    for name in ("terms_pass", "cotangent_pass"):
        setattr(triton_launches, name, Compiling(getattr(triton_launches, name)))
    z, z_t = torch.zeros(2, 64, 4096)
    target = Target(torch.zeros(64, 1, dtype=torch.int64), -100, 0)
    for smoothed in (False, True):
        out = torch.zeros(64, 3 if smoothed else 2)
        lse, mean = out[:, :1], out[:, 1:2]
        calls: dict[str, Any] = {
            "value": lambda dtype, s=smoothed, out=out: triton_launches.terms(z, None, None, target, out, s),
            "tangent": lambda dtype, s=smoothed, out=out, lse=lse: triton_launches.terms(z, z_t, lse, target, out, s),
            "gradient": lambda dtype, s=smoothed, out=out, lse=lse: triton_launches.cotangent(
                (z, None), lse, (out, None), None, target, (z.to(dtype), None), s
            ),
            "second order": lambda dtype, s=smoothed, out=out, lse=lse, mean=mean: triton_launches.cotangent(
                (z, z_t), lse, (out, out), mean, target, (z.to(dtype), z.to(dtype)), s
            ),
        }
        for call, run in calls.items():
            for dtype in (torch.float32,) if call in ("value", "tangent") else (torch.float32, torch.bfloat16):
                made.clear()
                run(dtype)
                ((given, kernel),) = made
                tile = given["ROWS"], given["KEYS"], given["num_warps"]
                name = str(dtype).removeprefix("torch.")
                yield Kernel(call, kernel.metadata.name, name, smoothed, *tile, *resources(kernel)[:3])


def compiled(architecture: int) -> list[Kernel]:
    """Compile every kernel for one architecture, in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-m", __name__, str(architecture)],
        env={**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(f"sm_{architecture}: {run.stderr[-2000:]}")
    return [Kernel(*json.loads(line)) for line in run.stdout.splitlines()]


def sections(quick: bool) -> Iterator[tuple[str, str, Any]]:
    """Yield a table for each architecture."""
    import triton

    for architecture in ARCHITECTURES[: 1 if quick else None]:
        kernels = compiled(architecture)
        text = TEXT.format(triton=triton.__version__, architecture=architecture)
        yield f"sm_{architecture}", f"{text}\n\n{page(kernels)}", [each._asdict() for each in kernels]


def page(kernels: list[Kernel]) -> str:
    """Return a table of kernels."""
    header = ["call", "pass", "result", "smoothed", "tile", "warps", "registers", "spilled", "shared"]
    rows = [
        [
            *(each.call, each.kernel, each.result, "yes" if each.smoothed else "no", f"{each.rows} × {each.columns}"),
            *(str(number) for number in (each.warps, each.registers, each.spilled, each.shared)),
        ]
        for each in kernels
    ]
    return table(header, rows)


if __name__ == "__main__":
    for kernel in compiled_here(int(sys.argv[1])):
        print(json.dumps(kernel), flush=True)
