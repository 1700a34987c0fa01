"""Examples of pages that need other programs, which the usual environment lacks."""

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"


def run_example(page: str, word: str, **known: Any) -> dict[str, Any]:
    """Run the one block of Python code of a page that contains a word, and return its names."""
    found = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    (code,) = [each for each in found if word in each and not each.startswith(">>>")]
    names: dict[str, Any] = {"__name__": page, **known}
    exec(compile(code, page, "exec"), names)
    return names
