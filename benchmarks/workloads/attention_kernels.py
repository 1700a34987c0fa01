"""Registers, spills, shared memory and instructions of Triton's attention kernels, compiled for GPUs without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.report import table

ARCHITECTURES = (80, 90)
# Sizes of heads by dtype.
HEADS = {"bfloat16": (32, 64, 128, 256), "float16": (64, 128), "float32": (64,)}
TEXT = """\
Compiled by Triton {triton} and its ptxas for sm_{architecture}, {dtype}; nothing was run. `spilled` is the local memory
of a thread in bytes, `shared` the shared memory of a program in KiB, `stages` the depth of the pipeline asked for.
`wgmma` and `mma` count tensor-core instructions in the machine code. With all options there are a mask, a band, a cap
of scores and dropout."""


class Kernel(NamedTuple):
    """A compiled kernel.

    Attributes:
        head: Size of the heads.
        causal: Whether the mask is causal.
        call: The function whose pass it is.
        kernel: The pass.
        rows: Queries of a tile.
        keys: Keys of a tile.
        warps: Warps of a program.
        stages: Stages of the pipeline.
        registers: Registers of a thread.
        spilled: Local memory of a thread in bytes.
        shared: Shared memory of a program in bytes.
        wgmma: Number of tensor-core instructions of a group of warps.
        mma: Number of tensor-core instructions of a warp.
    """

    head: int
    causal: bool
    call: str
    kernel: str
    rows: int
    keys: int
    warps: int
    stages: int
    registers: int
    spilled: int
    shared: int
    wgmma: int
    mma: int


class Driver:
    """A driver of Triton that names a GPU, but runs nothing."""

    def __init__(self, architecture: int):
        self.architecture = architecture

    def get_current_target(self) -> Any:
        """Return the GPU to compile for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        """Return the number of the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0


class Options(NamedTuple):
    """The options of attention that kernels read."""

    high: int | None
    softcap: float | None = None
    dropout_p: float = 0.0
    scale: float = 0.125
    low: int | None = None
    batch: tuple[int, ...] = (2, 3)


def compiled_here(architecture: int, dtype: str, head: int) -> Iterator[Kernel]:
    """Compile every kernel of every call; this needs a process of its own, in which Triton's interpreter is off."""
    import triton

    from hodiff.kernels.attention import triton_attention as kernels
    from hodiff.kernels.attention import triton_blocks, triton_call

    triton.runtime.driver.set_active(Driver(architecture))
    made: list[Any] = []

    class Compiling:
        """Stands for a kernel, and compiles instead of launching."""

        def __init__(self, kernel: Any):
            self.kernel, self.arg_names = kernel, kernel.arg_names

        def __getitem__(self, grid: Any) -> Any:
            return lambda **given: made.append((given, self.kernel.warmup(grid=(1,), **given)))

    for name in ("output_pass", "keys_pass", "queries_pass", "row_products"):
        setattr(triton_call, name, Compiling(getattr(triton_call, name)))
    triton_blocks.architecture = lambda device: architecture
    q, k, v, g, q_t, k_t, v_t, g_t = torch.zeros(8, 2, 3, 256, head, dtype=getattr(torch, dtype)).unbind()
    seed = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    mask = torch.ones(256, 256, dtype=torch.bool)[None, None]
    wanted = (True, True, True)
    saved = kernels.Saved(v, g[..., 0].float(), g[..., 0].float())

    def second_order(options: Any, mask: Any, seed: Any) -> Any:
        return kernels.gradient_tangent(options, wanted, True, q, k, v, mask, seed, g, q_t, k_t, v_t, g_t)

    for causal in (False, True):
        options: Any = Options(0 if causal else None)
        calls: dict[str, Any] = {
            "value": partial(kernels.value_to_save, options, q, k, v, None, None),
            "gradient": partial(kernels.gradient, options, wanted, q, k, v, None, None, g, saved),
            "second order": partial(second_order, options, None, None),
        }
        if causal:
            calls["tangent"] = partial(kernels.tangent, options, q, k, v, None, None, q_t, k_t, v_t)
            extra = Options(9, softcap=30.0, dropout_p=0.1, low=-9)
            calls["second order, all options"] = partial(second_order, extra, mask, seed)
        for call, run in calls.items():
            made.clear()
            run()
            for given, kernel in made:
                tile = given["ROWS"], given["KEYS"], given["num_warps"], given["num_stages"]
                yield Kernel(head, causal, call, kernel.metadata.name, *tile, *resources(kernel))


def resources(kernel: Any) -> tuple[int, ...]:
    """Return registers, spilled bytes, shared bytes and numbers of tensor-core instructions of a compiled kernel."""
    import triton

    dump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([dump, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise ValueError(f"cuobjdump prints no registers: {usage}")
    count = [len(re.findall(rf"\b{name}\b", code)) for name in ("HGMMA", "HMMA")]
    return int(found[1]), int(found[2]), kernel.metadata.shared, *count


def compiled(architecture: int, dtype: str, head: int) -> list[Kernel]:
    """Compile every kernel for one architecture, dtype and head size, in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-m", __name__, str(architecture), dtype, str(head)],
        env={**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(f"sm_{architecture}, {dtype}, heads of {head}: {run.stderr[-2000:]}")
    return [Kernel(*json.loads(line)) for line in run.stdout.splitlines()]


def sections(quick: bool) -> Iterator[tuple[str, str, Any]]:
    """Yield a table for each architecture and dtype."""
    import triton

    with ThreadPoolExecutor(2) as pool:
        jobs = {
            (architecture, dtype): [
                pool.submit(compiled, architecture, dtype, head) for head in ((64,) if quick else HEADS[dtype])
            ]
            for architecture, dtype in product(ARCHITECTURES, ["bfloat16"] if quick else HEADS)
        }
        for (architecture, dtype), found in jobs.items():
            kernels = [kernel for job in found for kernel in job.result()]
            text = TEXT.format(triton=triton.__version__, architecture=architecture, dtype=dtype)
            yield f"sm_{architecture}, {dtype}", f"{text}\n\n{page(kernels)}", [each._asdict() for each in kernels]


def page(kernels: list[Kernel]) -> str:
    """Return a table of kernels."""
    header = ["heads", "causal", "call", "pass", "tile", "warps", "stages", "registers", "spilled", "shared"]
    rows = [
        [
            *(str(each.head), "yes" if each.causal else "no", each.call, each.kernel, f"{each.rows} × {each.keys}"),
            *(str(number) for number in (each.warps, each.stages, each.registers, each.spilled)),
            *(f"{each.shared / 1024:.0f}", str(each.wgmma), str(each.mma)),
        ]
        for each in kernels
    ]
    return table([*header, "wgmma", "mma"], rows)


if __name__ == "__main__":
    for kernel in compiled_here(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])):
        print(json.dumps(kernel), flush=True)
