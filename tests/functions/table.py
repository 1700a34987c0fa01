"""Write the table of Functions, with formula, saved bytes and worst error, into docs/guides/functions.md.

python tests/functions/table.py
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guides" / "functions.md"
BEGIN, END = "<!-- table: python tests/functions/table.py -->", "<!-- end of table -->"
HEADING = [
    "| Function | formula | saved for backward | worst ulps, orders 0 / 1 / 2 / 3 |",
    "|---|---|---|---|",
]

# These Functions reject forward mode by design, so the contract tests skip them, and their own test files test them.
REVERSE_ONLY = {
    "clip_gradient": (r"x, \text{ whose gradient is clipped}", "nothing"),
    "noise_gradient": (r"x, \text{ whose gradient has noise added}", "nothing"),
}


def row(case) -> str:
    from functions.extremes import DIGITS, worst_ulps
    from mpmath import mp

    with mp.workdps(DIGITS):
        ulps = " / ".join(f"{error:.1f}" for error in worst_ulps(case)) if case.extremes else ""
    formula = f"${case.formula}$".replace("|", r"\vert ") if case.formula else ""
    return f"| `{case.name}` | {formula} | {case.saved} | {ulps} |"


def source(case) -> str:
    """Return the path of the file that defines a Function, from the root of the repository."""
    import hodiff
    from hodiff import functions

    name = case.name.partition("-")[0]
    public = (getattr(room, name, None) for room in (functions, hodiff))
    # Modules can have the same name: `logistic` is a module.
    function = next((each for each in public if callable(each)), case.Function)
    return function.__module__.replace(".", "/") + ".py"


def write(path: Path, lines: list[str]) -> None:
    """Replace the lines between the markers of a file."""
    text = path.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    replacement = "\n".join([BEGIN, "", *lines, END])
    path.write_text(pattern.sub(lambda _: replacement, text), encoding="utf-8")


def main() -> None:
    from functions.catalogue import CASES
    from tqdm import tqdm

    from hodiff import functions

    sections: dict[str, list[str]] = {}
    for case in tqdm(CASES, unit=" Functions"):
        sections.setdefault(source(case), []).append(row(case))
    for name, (formula, saved) in REVERSE_ONLY.items():
        file = getattr(functions, name).__module__.replace(".", "/") + ".py"
        sections.setdefault(file, []).append(f"| `{name}` (reverse mode only) | ${formula}$ | {saved} |  |")
    lines = []
    for file, rows in sections.items():
        lines += [f"### `{file}`", "", *HEADING, *rows, ""]
    write(PAGE, lines)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    main()
