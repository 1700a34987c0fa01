"""Source lines of the rules of a Function."""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from hodiff.authoring.custom_rule import CustomRule

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(_HERE)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))


@lru_cache(maxsize=4096)
def place(filename: str, line: int) -> str:
    """Name a line as "file.py:123", relative to the working directory; empty for torch, contextlib and the checks."""
    if filename.startswith((_HERE, _TORCH)) or os.path.basename(filename) in {"contextlib.py", "functools.py"}:
        return ""
    path = Path(filename)
    try:
        return f"{path.relative_to(Path.cwd()).as_posix()}:{line}"
    except ValueError:
        return f"{path.name}:{line}"


def is_own(filename: str) -> bool:
    """Whether the file belongs to hodiff."""
    return filename.startswith(_PACKAGE)


def rule_location(function: Any, *names: str) -> str:
    """Return the line ("file.py:123") of the first named rule that the class defines, else of the class."""
    for name in names:
        code = getattr(inspect.unwrap(getattr(function, name, None) or _nothing), "__code__", None)
        if code is not None and (where := place(code.co_filename, code.co_firstlineno)):
            return where
    return class_location(function)


def class_location(function: Any) -> str:
    """Return the line, such as "file.py:123", on which a class or function begins; empty without a source."""
    # In custom_jvp, custom_vjp and elementwise, the rule is what may be wrong.
    if isinstance(function, CustomRule):
        function = getattr(function, "rule", None) or getattr(function, "backward", function)
    formulas = getattr(getattr(function, "Function", None), "formulas", None)
    if formulas:
        function = next(each for each in formulas if each is not None)
    try:
        function = inspect.unwrap(function)
        filename, (_, line) = inspect.getsourcefile(function), inspect.getsourcelines(function)
    except (OSError, TypeError):
        return ""
    return place(filename, line) if filename else ""


def mentions(rule: Callable[..., Any], *names: str) -> str:
    """Return the first line of a rule's source that uses any of the names or attributes; empty if there is none."""
    rule = inspect.unwrap(rule)
    code = getattr(rule, "__code__", None)
    try:
        lines, first = inspect.getsourcelines(rule)
        tree = ast.parse(inspect.cleandoc("\n" + "".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return ""
    for node in ast.walk(tree):
        if (isinstance(node, ast.Attribute) and node.attr in names) or (
            isinstance(node, ast.Name) and node.id in names
        ):
            return place(code.co_filename, first + node.lineno - 1) if code is not None else ""
    return ""


def _nothing() -> None:
    """Placeholder for a rule that is missing."""
