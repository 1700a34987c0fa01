"""The page of findings: a section a code, with a wrong example and a mended one."""

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
    """The Python of a text in Markdown."""
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def wrong_example(code: str) -> Example:
    """What the section of a code checks and finds wrong."""
    return example(blocks(TEXTS[code])[0])


def mended_example(code: str) -> Example:
    """What the section of a code checks in the end."""
    return example(blocks(TEXTS[code])[1])


@cache
def example(source: str) -> Example:
    """The arguments of the check that ends a block."""
    text = "\n".join([*blocks(INTRODUCTION), source])
    name = f"findings_page_{len(sys.modules)}"
    # A check reads the source of what it checks, by the module of its class.
    module = ModuleType(name)
    module.__file__ = f"<{name}>"
    linecache.cache[module.__file__] = (len(text), None, text.splitlines(keepends=True), module.__file__)
    sys.modules[name] = module
    *body, last = ast.parse(text).body
    exec(compile(ast.Module(body, []), module.__file__, "exec"), vars(module))
    vars(module)["check"] = lambda function, inputs, **options: (function, inputs, options)
    return eval(compile(ast.Expression(last.value), module.__file__, "eval"), vars(module))
