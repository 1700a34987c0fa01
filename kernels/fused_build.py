"""Sources and flags of the compiled kernels, and the check of a built library; `setup.py` runs this file, too.

A truncated library crashes the process, and a library built from older sources misreads its arguments. So the build
writes a record beside the library, and hodiff compares it with the library and the sources before loading.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

_FOLDER = Path(__file__).parent
# The record has a digest of each file. An installed package has no C++ sources, so only its Python files are compared.
SOURCES = (
    "fused.cpp",
    "fused_signatures.py",
    "attention/tiles.cpp",
    "attention/tiles.inc",
    "attention/problem.py",
    "coloring/greedy.cpp",
    "cross_entropy/rows.cpp",
)
# OpenMP's symbols stay unresolved, because torch provides them: a second copy would start its own threads. Without
# debug symbols, the library has a quarter of the size, and is read faster.
FLAGS = (
    "-O3",
    "-g0",
    "-std=c++17",
    "-fopenmp",
    "-fno-exceptions",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fvisibility=hidden",
)
# clang needs LLVM's OpenMP for threads, but torch brings GNU's on Linux, and Apple's clang has none. So kernels built
# by clang use a single thread.
OF_CLANG = {"-fopenmp": "-fopenmp-simd"}


def flags_of(command: Sequence[str]) -> list[str]:
    """Return the flags for a compiler, given the words of its command, which may include flags."""
    compiler = itertools.takewhile(lambda word: not word.startswith("-"), command)
    try:
        said = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError:  # no compiler; the build reports that
        said = ""
    return [OF_CLANG.get(flag, flag) for flag in FLAGS] if "clang" in said else list(FLAGS)


def record_of(library: Path) -> Path:
    """Return the path of the record of a library's sources."""
    return library.with_name(f"{library.name}.json")


def write_record(library: Path) -> None:
    """Record the digests of a new library and of its sources."""
    record_of(library).write_text(json.dumps({"library": _digest(library), **_sources()}, indent=1) + "\n")


def flaw(library: Path) -> str | None:
    """Return the reason not to load a library, or None if it was built from these sources."""
    try:
        record = dict(json.loads(record_of(library).read_text()))
        found = _digest(library)
    except (OSError, ValueError, TypeError):
        return "nothing says what it was built from"
    if record.get("library") != found:
        return "it is truncated, or is not the file that was built here"
    changed = [name for name, digest in _sources().items() if record.get(name) != digest]
    return f"it was built from another version of {' and '.join(changed)}" if changed else None


def _sources() -> dict[str, str]:
    present = {name: _digest(_FOLDER / name) for name in SOURCES if (_FOLDER / name).exists()}
    return present | {"flags": " ".join((*FLAGS, *OF_CLANG.values()))}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
