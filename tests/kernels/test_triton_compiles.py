"""Compile Triton's attention to GPU machine code, which needs no GPU, and read what it needs of one."""

import json
import os

import pytest
import torch

triton = pytest.importorskip("triton")
ptxas = pytest.importorskip("triton.backends.nvidia", reason="triton without ptxas")

# These import triton, which may be missing.
from benchmarks.report import RESULTS  # noqa: E402
from benchmarks.workloads import loss_kernels  # noqa: E402
from benchmarks.workloads.attention_kernels import ARCHITECTURES, HEADS, compiled  # noqa: E402
from hodiff.kernels.attention.triton_blocks import chosen  # noqa: E402
from hodiff.kernels.cross_entropy import triton_launches  # noqa: E402

# Bytes of shared memory of a program. 80 stands for all GPUs but Hopper, and most of them have less than an A100.
SHARED = {80: 99 * 1024, 90: 227 * 1024}
PASSES = {"output_pass", "keys_pass", "queries_pass", "row_products"}


def kind_of(kernel):
    """Return the key of a compiled kernel in the table of tiles."""
    name = {"row_products": "rows"}.get(kernel["kernel"], kernel["kernel"].removesuffix("_pass"))
    return name + " tangent" * (name != "rows" and kernel["call"].startswith(("tangent", "second order")))


def most_spilled(kernel, dtype):
    """Return the bytes that a kernel may spill: none, but for kernels for which no tile was found that spills none."""
    if dtype == "float32" and kind_of(kernel).endswith("tangent"):  # parts of factors take twice the registers
        return 32
    return 64 if kernel["call"].endswith("all options") else 0


def require_room(kernel, architecture, dtype):
    assert kernel["spilled"] <= most_spilled(kernel, dtype), kernel
    assert kernel["shared"] <= SHARED[architecture], kernel


def test_committed_table_has_the_chosen_tiles_without_spills():
    parts = json.loads((RESULTS / "attention_kernels.json").read_text(encoding="utf-8"))["parts"]
    assert set(parts) == {f"sm_{architecture}, {dtype}" for architecture in ARCHITECTURES for dtype in HEADS}
    for title, kernels in parts.items():
        architecture, dtype = title.removeprefix("sm_").split(", ")
        assert {each["head"] for each in kernels} == set(HEADS[dtype])
        assert {each["kernel"] for each in kernels} == PASSES
        for each in kernels:
            require_room(each, int(architecture), dtype)
            options = each["call"].endswith("all options")
            tile = chosen(kind_of(each), getattr(torch, dtype), each["head"], int(architecture), options)
            assert tile == (each["rows"], each["keys"], each["warps"], each["stages"]), each


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "dtype", "head"),
    [(80, "bfloat16", 64), (90, "bfloat16", 64), (90, "bfloat16", 128), (90, "float16", 64), (80, "float64", 32)],
    ids=str,
)
def test_kernels_compile_without_spills(architecture, dtype, head, tmp_path, monkeypatch):
    if dtype == "float64" and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
        pytest.skip("this Triton has no products of float64")
    monkeypatch.setitem(os.environ, "TRITON_CACHE_DIR", str(tmp_path))
    kernels = compiled(architecture, dtype, head)
    assert {each.kernel for each in kernels} == PASSES
    for each in kernels:
        require_room(each._asdict(), architecture, dtype)
        # Products of 16-bit numbers on Hopper run on its tensor cores for groups of warps.
        plain = each.kernel != "row_products" and not each.call.endswith("all options")
        if architecture == 90 and dtype == "bfloat16" and plain:
            assert each.wgmma > 0, each


def require_rows(kernels):
    """Raise if a pass over rows of logits spills, has another tile than it is launched with, or is missing."""
    assert {each["kernel"] for each in kernels} == {"terms_pass", "cotangent_pass"}
    assert {each["call"] for each in kernels} == {"value", "tangent", "gradient", "second order"}
    for each in kernels:
        tile = triton_launches.TILES[each["kernel"].removesuffix("_pass")]
        assert (each["rows"], each["columns"], each["warps"]) == tile[:3]
        # With at most 96 registers, a multiprocessor holds 20 warps, enough to hide the latency of memory.
        assert each["spilled"] == 0
        assert each["registers"] <= 96


def test_committed_table_of_passes_over_logits_has_no_spills():
    parts = json.loads((RESULTS / "loss_kernels.json").read_text(encoding="utf-8"))["parts"]
    assert set(parts) == {f"sm_{architecture}" for architecture in ARCHITECTURES}
    for kernels in parts.values():
        require_rows(kernels)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_passes_over_logits_compile_without_spills(architecture, tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "TRITON_CACHE_DIR", str(tmp_path))
    require_rows([each._asdict() for each in loss_kernels.compiled(architecture)])
