"""Write the table of corrections into the documentation.

python tests/corrections/write_table.py
"""

import re
from pathlib import Path

import hodiff

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "corrections.md"
BEGIN, END = "<!-- table: python tests/corrections/write_table.py -->", "<!-- end of table -->"
SHORT = dict(zip(hodiff.ROUTES, ("rr", "fr", "rf", "ff"), strict=True))
HEADING = (
    "| torch function | torch is | by routes | reason | rule of hodiff | fixed in torch |\n|---|---|---|---|---|---|"
)


def line(row) -> str:
    """One row of the table."""
    routes = " ".join(SHORT[route] for route in row.routes)
    cells = (f"`{row.name}`", row.kind, routes, row.reason, row.reference, row.mended)
    return "| " + " | ".join(cell.replace("|", r"\vert ") for cell in cells) + " |"


def main() -> None:
    lines = [line(row) for row in hodiff.corrections.table()]
    text = PAGE.read_text(encoding="utf-8")
    table = "\n".join([BEGIN, "", HEADING, *lines, "", END])
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    PAGE.write_text(pattern.sub(lambda _: table, text), encoding="utf-8")


if __name__ == "__main__":
    main()
