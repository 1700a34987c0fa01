"""Write the table of Functions, with formula, saved bytes and worst error, into documentation and README.

python tests/functions/table.py
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE, README = ROOT / "docs" / "functions.md", ROOT / "README.md"
BEGIN, END = "<!-- table: python tests/functions/table.py -->", "<!-- end of table -->"
HEADING = [
    "| Function | formula | saved for backward | worst ulps, orders 0 / 1 / 2 / 3 |",
    "|---|---|---|---|",
]


def row(case) -> str:
    """One line of the table."""
    from functions.extremes import DIGITS, worst_ulps
    from mpmath import mp

    with mp.workdps(DIGITS):
        ulps = " / ".join(f"{error:.1f}" for error in worst_ulps(case)) if case.extremes else ""
    formula = f"${case.formula}$".replace("|", r"\vert ") if case.formula else ""
    return f"| `{case.name}` | {formula} | {case.saved} | {ulps} |"


def write(path: Path, lines: list[str]) -> None:
    """Put lines between the marks of a file."""
    text = path.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    replacement = "\n".join([BEGIN, "", *lines, END])
    path.write_text(pattern.sub(lambda _: replacement, text), encoding="utf-8")


def main() -> None:
    from functions.catalogue import CASES, FAMILIES, family_of
    from tqdm import tqdm

    sections = {family: [] for family in FAMILIES}
    short = {}
    for case in tqdm(CASES, unit=" Functions"):
        line = row(case)
        sections[family_of(case)].append(line)
        # One line a Function, without its settings.
        name = case.name.partition("-")[0]
        if case.formula:
            short.setdefault(name, line.replace(f"`{case.name}`", f"`{name}`"))
    lines = []
    for family, rows in sections.items():
        lines += [f"### `hodiff/functions/{family}.py`", "", *HEADING, *rows, ""]
    write(PAGE, lines)
    write(README, [*HEADING, *short.values(), ""])


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    main()
