"""Launches of Triton's attention kernels without a GPU: a driver compiles the kernels and records what it would run."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

RECORD = """
import json, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from hodiff.kernels.attention import triton_attention as kernels, triton_blocks

launches, through_triton = [], []

def plain(value):
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.stride()
    return tuple(map(plain, value)) if isinstance(value, tuple) else str(value)

class Launcher:
    def __init__(self, source, metadata): self.name = metadata.name
    def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        launches.append((self.name, (x, y, z), arguments))

class Utilities:
    def load_binary(self, name, binary, shared, device): return 1, 1, 0, 0, 1024
    def get_device_properties(self, device): return {"max_shared_mem": LIMIT}

class Driver:
    launcher_cls, utils = Launcher, Utilities()
    def get_current_target(self): return GPUTarget("cuda", 80, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

class Options:
    scale, low, high, softcap, dropout_p, batch = 0.5, None, 0, None, 0.0, ()

run = JITFunction.run
JITFunction.run = lambda self, *args, **kwargs: (through_triton.append(self.__name__), run(self, *args, **kwargs))[1]
triton.runtime.driver.set_active(Driver())
triton_blocks.architecture = lambda device: 80
LIMIT = int(sys.argv[1])
q, k, v = torch.randn(3, 2, 3, 40, 16).bfloat16().unbind()

def calls(q, k, v):
    launches.clear(), through_triton.clear()
    saved = kernels.value_to_save(Options, q, k, v, None, None)
    kernels.gradient(Options, (True, True, True), q, k, v, None, None, v, saved)
    kernels.gradient_tangent(Options, (True, True, True), True, q, k, v, None, None, v, q, k, None, v)
    return [(name, grid, plain(arguments)) for name, grid, arguments in launches], list(through_triton)

def python_calls(function):
    count = 0
    def profile(frame, event, argument):
        nonlocal count
        count += event == "call"
    sys.setprofile(profile)
    function()
    sys.setprofile(None)
    return count
"""

LATER = (
    RECORD
    + """
first, by_triton = calls(q, k, v)
second, none = calls(q, k, v)
inputs = [arguments[:3] for _, _, arguments in launches]
same = all(argument[0] is given for each in inputs[:1] for argument, given in zip(each, (q, k, v)))
unaligned = torch.randn(1 + q.numel()).bfloat16()[1:].view(q.shape)
_, by_alignment = calls(unaligned, k, v)
_, by_length = calls(q[:, :2], k[:, :2], v[:, :2])
value = lambda: kernels.value_to_save(Options, q, k, v, None, None)
print(json.dumps([first == second, same, by_triton, none, by_alignment, by_length, python_calls(value)]))
"""
)


def recorded(script, limit):
    run = subprocess.run(
        [sys.executable, "-c", script, str(limit)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


@pytest.mark.slow
def test_later_calls_are_launched_directly_with_equal_arguments():
    equal, same, by_triton, none, by_alignment, by_shape, count = recorded(LATER, 99 * 1024)
    passes = ["output_pass", "row_products", "keys_pass", "queries_pass", "output_pass", "keys_pass", "queries_pass"]
    assert by_triton == passes
    assert none == []
    assert equal
    assert same
    # Compiled code for aligned tensors reads 16 bytes at once, which fails on other addresses.
    assert by_alignment == passes
    assert by_shape == passes
    assert count <= 60


SMALL_DEVICE = (
    RECORD
    + """
kernels.value(Options, q, k, v, None, None)
tried, (name, grid, arguments) = list(through_triton), launches[-1]
print(json.dumps([tried, len(launches)]))
"""
)


@pytest.mark.slow
def test_devices_with_little_shared_memory_get_smaller_tiles():
    tried, launched = recorded(SMALL_DEVICE, 8 * 1024)
    assert len(tried) > 1
    assert launched == 1


TUNED = (
    RECORD
    + """
from triton import testing
timed = []
def do_bench(run):
    # The later a tile is timed, the faster it seems.
    run()
    timed.append(launches[-1][2][-2:])
    return 100 - len(timed)
testing.do_bench = do_bench
kernels.value(Options, q, k, v, None, None)
first = launches[-1][2][-2:]
timings = len(timed)
kernels.value(Options, q, k, v, None, None)
print(json.dumps([timings, timed[-1] == first, launches[-1][2][-2:] == first, len(timed), len(launches)]))
"""
)


@pytest.mark.slow
def test_tiles_are_timed_only_on_request(monkeypatch):
    monkeypatch.setenv("HODIFF_TUNE_TILES", "1")
    timings, fastest, kept, in_all, launched = recorded(TUNED, 99 * 1024)
    assert timings > 2
    assert fastest
    assert kept
    assert in_all == timings
    assert launched == timings + 2
    monkeypatch.delenv("HODIFF_TUNE_TILES")
    assert recorded(TUNED.replace("timed[-1] == first", "None"), 99 * 1024) == [0, None, True, 0, 2]
