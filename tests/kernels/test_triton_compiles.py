"""Compile Triton's attention to GPU machine code, which needs no GPU."""

import os
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton")

# Compile the kernels of each kind of call in the smallest tile, with a driver that names a GPU but runs nothing.
COMPILE = """
import sys
import torch, triton
from triton.backends.compiler import GPUTarget
from hodiff.kernels.attention import triton_attention, triton_blocks

class Driver:
    def get_current_target(self): return GPUTarget("cuda", int(sys.argv[1]), 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

class Compiled:
    def __init__(self, kernel): self.kernel = kernel
    def __getitem__(self, grid):
        def launch(**arguments):
            (*_, chosen), function = triton_blocks.choices([], arguments), self.kernel.fn
            made = function.warmup(grid=(1,), **arguments, **chosen.all_kwargs())
            print(function.__name__, len(made.asm["cubin"]) > 0, made.metadata.shared)
        return launch

class Options:
    scale, low, high, softcap, dropout_p, batch = 0.5, None, 0, None, 0.0, ()

class AllOptions:
    scale, low, high, softcap, dropout_p, batch = 0.5, -7, 5, 30.0, 0.1, (2, 1)

triton.runtime.driver.set_active(Driver())
for name in ("output_pass", "keys_pass", "queries_pass"):
    setattr(triton_attention, name, Compiled(getattr(triton_attention, name)))
dtype = getattr(torch, sys.argv[2])
q, k, v = (torch.zeros(shape, dtype=dtype) for shape in ((2, 3, 40, 64), (2, 1, 50, 64), (2, 1, 50, 24)))
g, seed = v.new_zeros(2, 3, 40, 24), torch.zeros(1, 1, 1, 1, dtype=torch.int64)
wanted = (True, True, True)
triton_attention.gradient(Options, wanted, q, k, v, None, None, g)
triton_attention.gradient_tangent(Options, wanted, True, q, k, v, None, None, g, q, k, v, None)
mask = torch.ones(40, 50, dtype=torch.bool)[None, None]
triton_attention.gradient_tangent(AllOptions, wanted, True, q, k, v, mask, seed, g, q, None, v, g)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "dtype"), [(80, "bfloat16"), (90, "float16"), (90, "float32"), (80, "float64")], ids=str
)
def test_kernels_compile_for_gpus(capability, dtype, tmp_path):
    if dtype == "float64" and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
        pytest.skip("this Triton has no products of float64")
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    run = subprocess.run(
        [sys.executable, "-c", COMPILE, str(capability), dtype],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    passes = [line.split() for line in run.stdout.splitlines()]
    assert [name for name, *_ in passes] == ["output_pass", "keys_pass", "queries_pass"] * 3
    # The smallest tile must fit into the shared memory of any current GPU.
    assert all(made == "True" and int(shared) <= 99 * 1024 for _, made, shared in passes)
