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
# Results on common models

The first table lists the results of `hodiff.check(model, inputs)` and `hodiff.preflight(model, *inputs)` on common
architectures with small sizes (`tests/models/architectures/`). The second table lists errors of hodiff's
Hessian-vector products, relative to the largest element. The references are finite differences:

- differences of torch's gradients, for products with respect to the parameters (the largest error over the supported
  routes), for a column of a block of `HessianOperator`, and for the largest eigenvalue and its eigenvector;
- differences of outputs, for `GaussNewtonOperator`.

Times are of one thread in a new process, and only approximate. `python tests/models/table.py` writes this page.
[hugging_face.md](hugging_face.md) compares products by hodiff and by torch alone, for a hundred architectures of
Hugging Face.

Models that compute in float32 inside (Llama, T5, Mamba, Mixtral) have products with errors of float32. The Gaussian
process of gpytorch calls a Function that returns a gradient of the wrong shape and uses a derivative as a constant. Its
second derivatives are wrong by 5 % with torch, and hodiff raises an error. `dopri5` chooses its steps without
gradients, so derivatives are only as exact as the solver's tolerance. A Function of torchdiffeq has no forward mode.

"""

CAPTURED = """\
## Compiled operators

The table lists errors of products by `HessianOperator(..., compile=True)` and the time to capture the graphs, which run
here without being compiled. If an operator runs eagerly, the table has its reason.
`python tests/models/table.py --captured` writes only this section.

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
