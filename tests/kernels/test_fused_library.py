"""Tests of the compiled library: it is built if there is a compiler, refused if changed, and called as C declares it.

Loading a refused library would kill the process, so the cases run in a subprocess.
"""

import ctypes
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch
from compilers import compiler_works

from hodiff.kernels import fused, fused_library
from hodiff.kernels.fused_build import FLAGS, SOURCES, flags_of, flaw, record_of
from hodiff.kernels.fused_signatures import SIGNATURES

FOLDER = Path(fused_library.__file__).parent
LIBRARY = next((p for suffix in EXTENSION_SUFFIXES if (p := FOLDER / f"_fused{suffix}").exists()), None)
built = pytest.mark.skipif(not fused_library.available(), reason="no compiled kernels")

# For each folder, compute a softmax by the library or by torch's operators, and its product; the results must agree.
PROGRAM = """
import json, sys, warnings
from pathlib import Path
import torch
import hodiff
from hodiff.kernels import fused_library
x = torch.linspace(-1, 1, 12).reshape(3, 4)
v = torch.ones_like(x).cumsum(1)
exact = hodiff.hvp(lambda y: (torch.softmax(y, -1) ** 3).sum(), x.double(), v.double()).float()
for folder in map(Path, sys.argv[1:]):
    fused_library._FOLDER = folder
    for cached in (fused_library._load, fused_library.formulas, fused_library.pullbacks):
        cached.cache_clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        value = hodiff.functions.softmax(x, -1)
        hodiff.functions.softmax(2 * x, -1)
        product = hodiff.hvp(lambda y: (hodiff.functions.softmax(y, -1) ** 3).sum(), x, v)
    torch.testing.assert_close(value, torch.softmax(x, -1))
    torch.testing.assert_close(product, exact)
    said = [f"{each.category.__name__}: {each.message}" for each in seen]
    print(json.dumps([folder.name, {"available": fused_library.available(), "warnings": said}]), flush=True)
"""


def test_kernels_are_built_if_a_compiler_works(tmp_path):
    if not compiler_works(tmp_path):
        pytest.skip("no C++ compiler with OpenMP")
    assert fused_library.available(), (
        f"there is a C++ compiler, but no library in {FOLDER} that hodiff.kernels takes "
        f"({flaw(LIBRARY) if LIBRARY else 'none was built'}); build it by `pip install --editable .`"
    )


def truncate(library: Path) -> None:
    library.write_bytes(library.read_bytes()[:20_000])


def empty(library: Path) -> None:
    library.write_bytes(b"")


def flip_a_byte(library: Path) -> None:
    code = bytearray(library.read_bytes())
    code[len(code) // 2] ^= 1
    library.write_bytes(code)


def replace_by_another(library: Path) -> None:
    library.write_bytes(Path(torch._C.__file__).read_bytes())


def delete_record(library: Path) -> None:
    record_of(library).unlink()


def truncate_record(library: Path) -> None:
    record_of(library).write_text("[1, 2")


def change_record(library: Path, **changes: str) -> None:
    record = json.loads(record_of(library).read_text())
    record_of(library).write_text(json.dumps(record | changes))


def build_from_older_code(library: Path) -> None:
    change_record(library, **{"fused.cpp": "0" * 64})


def build_for_older_calls(library: Path) -> None:
    change_record(library, **{"fused_signatures.py": "0" * 64})


def build_from_an_older_inclusion(library: Path) -> None:
    change_record(library, **{"attention/tiles.inc": "0" * 64})


def build_with_other_flags(library: Path) -> None:
    change_record(library, flags="-Ofast")


REFUSED = [
    (truncate, "truncated"),
    (empty, "truncated"),
    (flip_a_byte, "not the file that was built"),
    (replace_by_another, "not the file that was built"),
    (delete_record, "nothing says what it was built from"),
    (truncate_record, "nothing says what it was built from"),
    (build_from_older_code, "another version of fused.cpp"),
    (build_for_older_calls, "another version of fused_signatures.py"),
    (build_from_an_older_inclusion, "another version of attention/tiles.inc"),
    (build_with_other_flags, "another version of flags"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the output of one process for each case, up to its end or crash."""
    folders = [tmp_path_factory.mktemp("without", numbered=False)]
    for spoil in [None, *(spoil for spoil, _ in REFUSED)] if LIBRARY else []:
        folders.append(tmp_path_factory.mktemp(spoil.__name__ if spoil else "as_built", numbered=False))
        for path in [LIBRARY, record_of(LIBRARY), *(FOLDER / name for name in SOURCES)]:
            copy = folders[-1] / path.relative_to(FOLDER)
            copy.parent.mkdir(exist_ok=True)
            shutil.copy2(path, copy)
        if spoil:
            spoil(folders[-1] / LIBRARY.name)
    command = [sys.executable, "-c", PROGRAM, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return dict(map(json.loads, done.stdout.splitlines())), f"the process ended with {done.returncode}\n{done.stderr}"


@pytest.mark.slow
@built
@pytest.mark.parametrize(("spoil", "reason"), REFUSED)
def test_foreign_library_is_rejected_with_one_warning(run, spoil: Callable[[Path], None], reason: str):
    """One warning names the library and the remedy, and torch's operators compute the same results."""
    found, end = run
    assert spoil.__name__ in found, end
    assert found[spoil.__name__]["available"] is False
    (warning,) = found[spoil.__name__]["warnings"]
    assert re.match(rf"HodiffWarning: hodiff.kernels: \S+/{spoil.__name__}/_fused\S+ is not used, for ", warning)
    assert reason in warning
    assert "pip install" in warning


@pytest.mark.slow
@built
def test_built_library_is_loaded(run):
    found, end = run
    assert found.get("as_built") == {"available": True, "warnings": []}, end


def test_missing_library_does_not_warn(run):
    """Without a compiler there is no warning: only speed is lost."""
    found, end = run
    assert found.get("without") == {"available": False, "warnings": []}, end


C_TYPES = {"long": ctypes.c_long, "float": ctypes.c_float, "double": ctypes.c_double, "void": None}


def declared_types() -> dict[str, tuple]:
    """Return the ctypes of the result and the arguments of each exported C++ function."""
    code = "\n".join((FOLDER / name).read_text() for name in SOURCES if name.endswith(".cpp"))
    found = re.findall(r"^EXPORT ([^(]+?)(\w+)\(([^)]*)\)", code, re.MULTILINE)
    return {
        name: (in_ctypes(result), tuple(in_ctypes(each) for each in arguments.split(",") if each.strip()))
        for result, name, arguments in found
    }


def in_ctypes(declaration: str):
    if "*" in declaration:
        return ctypes.c_char_p if "char" in declaration else ctypes.c_void_p
    return C_TYPES[declaration.split()[0]]


def test_signatures_match_the_source():
    assert len(SIGNATURES) > 15
    assert declared_types() == SIGNATURES


@built
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((1.5, None, None, 1, 1, 1.0), ctypes.ArgumentError),
        ((None, None, None, 1.0, 1, 1.0), ctypes.ArgumentError),
        ((None, None, None), TypeError),
    ],
)
def test_call_with_wrong_arguments_raises(arguments, error):
    with pytest.raises(error):
        fused_library.run("hodiff_softmax", *arguments)


@built
def test_unknown_kernel_raises():
    with pytest.raises(AttributeError, match="hodiff_softmin"):
        fused_library.run("hodiff_softmin", 1)


@built
def test_formulas_are_named():
    assert {"sigmoid"} <= set(fused.formulas())
    assert set(fused.pullbacks())


@pytest.mark.parametrize(
    ("said", "flag"),
    [
        ("g++ (Debian 12.2.0-14) 12.2.0", "-fopenmp"),
        ("Debian clang version 14.0.6", "-fopenmp-simd"),
        ("Apple clang version 16.0.0 (clang-1600.0.26.6)", "-fopenmp-simd"),
    ],
)
def test_openmp_flag_depends_on_the_compiler(tmp_path, said, flag):
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\necho '{said}'\n")
    compiler.chmod(0o755)
    flags = flags_of([str(compiler), "-Wall", "-O2"])
    assert [each for each in flags if "openmp" in each] == [flag]
    assert len(flags) == len(FLAGS) == len(flags_of(()))


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("clang++"), reason="no clang")
def test_library_built_by_clang_loads(tmp_path):
    library = tmp_path / "fused.so"
    sources = [str(FOLDER / name) for name in SOURCES if name.endswith(".cpp")]
    command = ["clang++", "-shared", "-fPIC", "-w", *flags_of(["clang++"]), *sources, "-o", str(library)]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(library))
    assert all(hasattr(loaded, name) for name in SIGNATURES)
