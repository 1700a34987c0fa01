"""Read the page of findings: each code has a section with a wrong and a fixed example."""

import ast
import linecache
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "findings.md"
INTRODUCTION, *SECTIONS = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
TEXTS = {section.partition(":")[0]: section for section in SECTIONS}

# A function, its inputs and further arguments of the check
Example = tuple[Any, Any, dict[str, Any]]


def blocks(text: str) -> list[str]:
    """Return the Python blocks of a Markdown text."""
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def wrong_example(code: str) -> Example:
    """Return the wrong example in the section of a code."""
    return example(blocks(TEXTS[code])[0])


def fixed_example(code: str) -> Example:
    """Return the fixed example in the section of a code."""
    return example(blocks(TEXTS[code])[1])


@cache
def example(source: str) -> Example:
    """Return the arguments of the call of `check` at the end of a block."""
    text = "\n".join([*blocks(INTRODUCTION), source])
    name = f"findings_page_{len(sys.modules)}"
    # `check` finds the source of a class by its module, so the example needs a module.
    module = ModuleType(name)
    module.__file__ = f"<{name}>"
    linecache.cache[module.__file__] = (len(text), None, text.splitlines(keepends=True), module.__file__)
    sys.modules[name] = module
    *body, last = ast.parse(text).body
    exec(compile(ast.Module(body, []), module.__file__, "exec"), vars(module))
    vars(module)["check"] = lambda function, inputs, **options: (function, inputs, options)
    return eval(compile(ast.Expression(last.value), module.__file__, "eval"), vars(module))
