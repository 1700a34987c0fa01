"""What stands in the side bar, in which order."""

from __future__ import annotations

from site_builder.layout import SiteError, relative

FRONT = "index.md"

# What was measured of Taylor mode.
_TAYLOR = ("reference/audit_jets.md", "reference/taylor_accuracy.md")

# Captions of the side bar and the pages below them; a folder stands for the pages that its index lists below itself.
SIDE_BAR = {
    "Start": ("tutorial.md", "howto/index.md", "coming_from/index.md", "examples/index.md"),
    "Guides": (
        "guides/checking.md",
        "guides/corrections.md",
        "guides/functions.md",
        "guides/attention.md",
        "guides/writing_functions.md",
        "guides/operators.md",
        "guides/large_models.md",
        "guides/estimators.md",
        "guides/optimizers.md",
        "guides/training_loops.md",
        "guides/physics.md",
        "guides/laplace.md",
        "guides/gaussian_processes.md",
        "guides/influence.md",
        "guides/implicit.md",
        "guides/meta.md",
        "guides/taylor.md",
        "guides/sparse.md",
        "guides/atoms.md",
    ),
    "Explanations": (
        "explanations/routes.md",
        "explanations/transposition.md",
        "explanations/why_torch_is_wrong.md",
        "explanations/cost_of_wrong_derivatives.md",
        "explanations/implicit_differentiation.md",
        "explanations/choosing_a_trace_estimator.md",
        "explanations/cost_of_a_product.md",
        "explanations/coloring.md",
        "explanations/attention_second_order.md",
    ),
    "Is your torch wrong?": (
        "reference/is_your_torch_wrong.md",
        "reference/audit.md",
        "reference/upstream.md",
        "reference/versions.md",
    ),
    "Reference": (
        "reference/api/index.md",
        "reference/findings.md",
        "reference/errors.md",
        "reference/glossary.md",
    ),
    "Evidence": (
        "benchmarks/index.md",
        "papers/index.md",
        "reference/zoo.md",
        "reference/models.md",
        "reference/hugging_face.md",
        "reference/doors.md",
        *_TAYLOR,
    ),
    "Project": (
        "project/architecture.md",
        "project/decisions.md",
        "project/stability.md",
        "project/contributing.md",
        "project/changelog.md",
    ),
}

# Where a page of a folder stands that nobody entered above: at the end.
OTHERS = {
    "": "Guides",
    "guides": "Guides",
    "explanations": "Explanations",
    "reference": "Reference",
    "project": "Project",
}


def contents(pages: list[str], page: str, caption: str = "", depth: int = 1) -> str:
    """A hidden table of contents; scripts go by their names, as their titles are sentences."""
    lines = [":::{toctree}", ":hidden:", f":maxdepth: {depth}", *([f":caption: {caption}"] if caption else []), ""]
    return "\n".join([*lines, *(_line(each, page) for each in pages), ":::"])


def _line(each: str, page: str) -> str:
    document = relative(each, page).rsplit(".", 1)[0]
    is_script = each.startswith("examples/") and each.count("/") == 1 and not each.endswith("/index.md")
    return f"{document} <{document}>" if is_script else document


def side_bar(written: dict[str, None]) -> str:
    """The tables of contents of the front page."""
    listed = {page for pages in SIDE_BAR.values() for page in pages}
    if missing := listed - set(written):
        raise SiteError(f"The side bar names pages that are not there: {', '.join(sorted(missing))}.")
    tables = {caption: list(pages) for caption, pages in SIDE_BAR.items()}
    for page in written:
        room, _, name = page.rpartition("/")
        if room in OTHERS and name.endswith(".md") and page not in {*listed, FRONT}:
            tables[OTHERS[room]].append(page)
    return "\n\n".join(contents(pages, FRONT, caption, depth=2) for caption, pages in tables.items())
