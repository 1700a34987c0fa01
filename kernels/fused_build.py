"""Sources and flags of the compiled kernels, and the check of a built library; `setup.py` runs this file, too.

A truncated library kills the process, and a library of older sources reads its arguments wrongly. So the build writes a
record beside the library, which is compared with the files before anything is loaded.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

_FOLDER = Path(__file__).parent
# An installed package has no C++ any more, but still the signatures that its calls rely on.
SOURCES = (
    "fused.cpp",
    "fused_signatures.py",
    "attention/tiles.cpp",
    "attention/tiles.inc",
    "attention/problem.py",
    "coloring/greedy.cpp",
    "cross_entropy/rows.cpp",
)
# OpenMP is left unresolved, because torch provides it: a second copy would start threads of its own. Without debug
# symbols, a library is a quarter of the size, and read as quickly.
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
# clang's threads require LLVM's OpenMP, but torch brings GNU's on Linux, and Apple's clang has none. Kernels built by
# clang use one thread.
OF_CLANG = {"-fopenmp": "-fopenmp-simd"}


def flags_of(command: Sequence[str]) -> list[str]:
    """Return the flags for a compiler, given the words of its command, of which some may be flags."""
    compiler = itertools.takewhile(lambda word: not word.startswith("-"), command)
    try:
        said = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError:  # no compiler, which the build reports
        said = ""
    return [OF_CLANG.get(flag, flag) for flag in FLAGS] if "clang" in said else list(FLAGS)


def record_of(library: Path) -> Path:
    """Return the file beside a library that records its sources."""
    return library.with_name(f"{library.name}.json")


def write_record(library: Path) -> None:
    """Record the digests of a library that was just built and of its sources."""
    record_of(library).write_text(json.dumps({"library": _digest(library), **_sources()}, indent=1) + "\n")


def flaw(library: Path) -> str | None:
    """Return why a library must not be loaded, or None if it was built from these sources."""
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
