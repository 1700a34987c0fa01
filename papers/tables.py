"""Tables of results in the READMEs, written from `results.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

OURS = "ours"  # the verdict on a statement that is not in the paper
BEGIN, END = "<!-- results -->", "<!-- end of results -->"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def claims_table(results: dict[str, Any]) -> str:
    """Return a table of published and measured results, one claim per row."""
    columns = ["claim", "published", "measured", "verdict"]
    return markdown(columns, [[claim[column] for column in columns] for claim in results["claims"]])


def index_table(papers: Path) -> str:
    """Return a table of all claims of all papers, one claim per row; first rows count the reproduced claims.

    Args:
        papers: Folder of all papers.

    Returns:
        The table.
    """
    rows = []
    for name, results in saved(papers):
        claims = [claim for claim in results["claims"] if claim["verdict"] != OURS]
        reproduced = sum(claim["verdict"] == "reproduced" for claim in claims)
        paper = f"[{heading(papers / name / 'README.md')}]({name}/README.md), {reproduced} of {len(claims)}"
        for claim in claims:
            rows.append([paper, claim["claim"], claim["published"], claim["measured"], claim["verdict"]])
            paper = ""
    return markdown(["paper, claims reproduced", "claim", "published", "ours", "verdict"], rows)


def saved(papers: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield folder name and results of every paper that was run, by year."""
    by_year = {path.parent.name: path for path in papers.glob("*/results.json")}
    for name in sorted(by_year, key=lambda name: (re.findall(r"-(\d{4})\b", name), name)):
        yield name, json.loads(by_year[name].read_text(encoding="utf-8"))


def heading(page: Path) -> str:
    """Return the first heading of a page."""
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def update_readme(folder: Path) -> None:
    """Write a paper's results into its README."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    machine = results["machine"]
    where = f"{machine['cpu']}, {machine['threads']} of {machine['cores']} cores, torch {machine['torch']}"
    replace(folder / "README.md", f"{claims_table(results)}\n\nMeasured in {results['seconds']:.0f} s on {where}.")


def update_index(papers: Path) -> None:
    """Write the claims of all papers into the index."""
    replace(papers / "README.md", index_table(papers))


def replace(path: Path, table: str) -> None:
    """Replace the table between the two marks of a page."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")
