"""Write the table of Functions, with formula, saved bytes and worst error, into the documentation.

python tests/functions/table.py
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "functions.md"
BEGIN, END = "<!-- table: python tests/functions/table.py -->", "<!-- end of table -->"


def main() -> None:
    from functions.catalogue import CASES, FAMILIES, family_of
    from functions.extremes import DIGITS, worst_ulps
    from mpmath import mp
    from tqdm import tqdm

    sections = {family: [] for family in FAMILIES}
    for case in tqdm(CASES, unit=" Functions"):
        with mp.workdps(DIGITS):
            ulps = " / ".join(f"{error:.1f}" for error in worst_ulps(case)) if case.extremes else ""
        formula = f"${case.formula}$".replace("|", r"\vert ") if case.formula else ""
        sections[family_of(case)].append(f"| `{case.name}` | {formula} | {case.saved} | {ulps} |")
    lines = []
    for family, rows in sections.items():
        heading = [
            "| Function | formula | saved for backward | worst ulps, orders 0 / 1 / 2 / 3 |",
            "|---|---|---|---|",
        ]
        lines += [f"### `hodiff/functions/{family}.py`", "", *heading, *rows, ""]
    text = PAGE.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    replacement = "\n".join([BEGIN, "", *lines, END])
    PAGE.write_text(pattern.sub(lambda _: replacement, text), encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    main()
