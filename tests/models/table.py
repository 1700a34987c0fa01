"""Write the table of hodiff's results on models into the documentation.

python tests/models/table.py [--captured]
"""

import argparse
import importlib.metadata
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.measures import Measure
    from models.specimen import Architecture

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "models.md"
FEATURES = ("products", "operator", "Gauss-Newton", "top eigenvalue")
INTRODUCTION = """\
# Models that people have

What `hodiff.check(model, inputs)` and `hodiff.preflight(model, *inputs)` say of architectures in tiny sizes
(`tests/models/architectures/`), and how far hodiff's products by the parameters are from differences: of torch's
gradients, for products by each route that is there (the worst counts), for a column of a block by `HessianOperator`,
and for the largest eigenvalue and its vector; of outputs, for `GaussNewtonOperator`. Errors are relative to the
largest number; seconds are of one thread, of a process that has just started, and no more than a hint. The page is
written by `python tests/models/table.py`; [hugging_face.md](hugging_face.md) has products for a hundred architectures
of Hugging Face's, beside those by torch alone.

Models that compute in float32 inside (Llama, T5, Mamba, Mixtral) have products as coarse as that. A Gaussian process
by gpytorch calls a Function of its own, which returns a gradient of another shape and keeps a derivative as a
constant: its second derivatives are wrong by 5 % under torch, and hodiff refuses them. The steps of `dopri5` are chosen
without gradients, which are as exact as the solver's tolerance; a Function of torchdiffeq's has no forward mode.

"""

CAPTURED = """\
## Compiled operators

Errors of products by `HessianOperator(..., compile=True)`, with the graphs that are captured, which torch is not asked
to compile here, and the time to capture them; or what the operator says when it stays eager.
`python tests/models/table.py --captured` writes this section alone.

"""
AFTER = "\nWith "


def cell(measure: "Measure | None") -> str:
    """Format an error or a text, and the seconds."""
    if measure is None:
        return "–"
    outcome = measure.outcome if isinstance(measure.outcome, str) else f"{measure.outcome:.0e}"
    return f"{outcome}; {measure.seconds:.1f} s"


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def captured(rows: Iterable[tuple["Architecture", "Measure"]]) -> str:
    """Format the section on compiled operators."""
    lines = [line(architecture.name, cell(measure)) for architecture, measure in rows]
    return CAPTURED + "\n".join([line("model", "compiled operator"), line("---", "---"), *lines, ""])


def page(rows: Iterable[tuple["Architecture", list["Measure"]]], section: str) -> str:
    """Format the page: the table of verdicts, the table of errors, and the section on compiled operators."""
    rows = list(rows)
    said = [line("model", "`check`", "`preflight`"), line("---", "---", "---")]
    measured = [line("model", *FEATURES), line("---", *["---"] * len(FEATURES))]
    for architecture, measures in rows:
        by_feature = {each.feature: each for each in measures}
        said.append(line(architecture.name, cell(by_feature["check"]), cell(by_feature["preflight"])))
        if architecture.measured:
            measured.append(line(architecture.name, *(cell(by_feature.get(each)) for each in FEATURES)))
    packages = sorted({architecture.needs for architecture, _ in rows if architecture.needs} | {"torch"})
    versions = ", ".join(f"{each} {importlib.metadata.version(each)}" for each in packages)
    return INTRODUCTION + "\n".join([
        *said,
        "",
        "## Errors against differences",
        "",
        *measured,
        "",
        section,
        f"With {versions}.",
        "",
    ])


def main() -> None:
    import torch
    from models.measures import measured_captured, measures
    from models.specimen import architectures
    from tqdm import tqdm

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--captured", action="store_true", help="write the section on compiled operators alone")
    alone = parser.parse_args().captured
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    every = architectures()
    section = captured((one, measured_captured(one)) for one in tqdm(every, unit=" models") if one.measured)
    if alone:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(CAPTURED.partition("\n")[0])
        text = before + section + AFTER + rest.rpartition(AFTER)[2]
    else:
        text = page([(one, list(measures(one))) for one in tqdm(every, unit=" models")], section)
    PAGE.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    main()
