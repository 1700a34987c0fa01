"""Print the size and the shape of the library: lines, files, importers, names, docstrings.

python tests/library_statistics.py [-v]

With -v, the files behind each figure are listed.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SMALL, LONG = 80, 350
# Words with which a docstring begins that describes by allusion.
ALLUSIONS = ("Those", "That", "What", "Of", "By", "With")


def python_files(*folders: str) -> list[Path]:
    return [each for folder in folders for each in sorted((ROOT / folder).rglob("*.py"))]


def length(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts)


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the modules, and the names in modules, that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)


def main(*, listed: bool) -> None:
    library = {module_name(path): path for path in python_files("hodiff", "hodiff/kernels")}
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in library.items()}
    importers = defaultdict(set)
    for name, tree in trees.items():
        for target in set(imported(tree)) & library.keys() - {name}:
            importers[target].add(name)
    files = {name: path for name, path in library.items() if path.name != "__init__.py"}
    single = [
        str(path.relative_to(ROOT))
        for name, path in files.items()
        if length(path) < SMALL and len(importers[name]) == 1
    ]
    recurring = sorted(name for name, count in Counter(path.name for path in files.values()).items() if count > 1)
    allusive = [
        f"{name}: {text.splitlines()[0]}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and (text := ast.get_docstring(node))
        and text.split()[0] in ALLUSIONS
    ]
    long = [str(path.relative_to(ROOT)) for path in library.values() if length(path) > LONG]
    lines = sum(map(length, library.values()))
    show(lines, "lines of the library, with kernels")
    show(len(library), "files of the library")
    show(sum(map(length, python_files("tests"))), "lines of the tests")
    for names, label in (
        (long, f"files of more than {LONG} lines"),
        (single, f"modules below {SMALL} lines with one importer"),
        (recurring, "file names that occur more than once"),
        (allusive, f"docstrings that begin with {', '.join(ALLUSIONS)}"),
    ):
        show(len(names), label, names if listed else ())


def show(count: int, label: str, names: Sequence[str] = ()) -> None:
    sys.stdout.write("".join([f"{count:>8,}  {label}\n", *(f"{'':>10}{name}\n" for name in names)]))


if __name__ == "__main__":
    main(listed="-v" in sys.argv[1:])
