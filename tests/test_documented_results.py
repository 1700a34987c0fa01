"""Numbers in the documents equal the saved results."""

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NETWORKS = ["mlp", "transformer", "cnn"]
PRODUCT = ["hodiff.hvp", "fastest torch", "torch func.jvp of func.grad"]


@cache
def on_file(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


@cache
def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def rows_of(workload: str, problem: str) -> dict[str, Any]:
    (found,) = (each for each in on_file(workload)["problems"] if each["problem"] == problem)
    return {row["name"]: row for row in found["rows"]}


def gradients(workload: str, problem: str, name: str) -> float:
    """Time in units of gradients; "fastest torch" is the fastest correct method in torch."""
    rows = rows_of(workload, problem)
    if name == "fastest torch":
        return min(row["gradients"] for row in rows.values() if row["group"] == "torch" and row["gradients"])
    return rows[name]["gradients"]


def milliseconds(workload: str, problem: str, name: str) -> float:
    return rows_of(workload, problem)[name]["milliseconds"]


def table_after(page: str, mark: str) -> list[list[str]]:
    """Cells of the first table after the mark in a page, without its header."""
    after = text_of(page).split(mark, 1)[1]
    lines = after[after.index("\n|") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def numbers(cells: list[str]) -> list[str]:
    """Numbers in the cells, in order: `1.65 / 1.40` and `94 (64)` contain two."""
    return re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", " ".join(cells))


def is_rounded_from(shown: str, measured: float) -> bool:
    """Whether the number shown is the measured number, rounded to the digits shown."""
    plain = shown.replace(",", "")
    mantissa, _, exponent = plain.partition("e")
    _, _, decimals = mantissa.partition(".")
    unit = 10.0 ** (int(exponent or 0) - len(decimals))
    if len(mantissa) > 3 and not decimals:
        unit = 10.0 ** (len(mantissa) - 3)  # thousands are rounded to three digits
    return abs(float(plain) - measured) <= 0.501 * unit


def of_products(page: str, mark: str) -> Iterator[tuple[str, list[str], list[float]]]:
    for row, network in zip(table_after(page, mark), NETWORKS, strict=True):
        yield network, row, [gradients("hvp", network, name) for name in PRODUCT]


def readme_products() -> Iterator[tuple[str, float]]:
    for network, row, products in of_products("README.md", "## Speed"):
        operator = [gradients("operators", network, f"hessian linearized{how}") for how in ("", ", compiled")]
        yield from zip(numbers(row[1:]), [*products, *operator], strict=True)


def readme_dense() -> Iterator[tuple[str, float]]:
    ours, theirs = re.findall(r"takes ([\d,]+) ms; the fastest way in torch takes ([\d,]+) ms", text_of("README.md"))[0]
    rows = rows_of("dense", "digits-64-32-10-1797")
    yield ours, rows["hodiff.hessian, dict"]["milliseconds"]
    yield theirs, min(row["milliseconds"] for row in rows.values() if row["group"] == "torch")


def readme_layer_norm() -> Iterator[tuple[str, float]]:
    (percent,) = re.findall(r"\(benchmarks/results/hvp\.md\) by ([\d.]+) %", text_of("README.md"))
    yield percent, 100 * rows_of("hvp", "transformer")["torch func.grad of func.jvp"]["relative_error"]


def speed_products() -> Iterator[tuple[str, float]]:
    for network, row, products in of_products("docs/benchmarks/speed.md", "## Products"):
        yield from zip(
            numbers(row[1:5]), [*products, gradients("hvp", network, "torch autograd.functional.hvp")], strict=True
        )


def speed_operators() -> Iterator[tuple[str, float]]:
    for row, network in zip(
        table_after("docs/benchmarks/speed.md", "of a block are per vector"), NETWORKS, strict=True
    ):
        (block,) = (
            each["problem"]
            for each in on_file("operators")["problems"]
            if network in each["problem"] and each["problem"] != network
        )
        yield from zip(
            numbers(row[1:6]),
            [
                gradients("operators", network, "hessian linearized"),
                gradients("operators", network, "hessian linearized, compiled"),
                gradients("operators", block, "hessian linearized, compiled"),
                gradients("operators", network, "gauss-newton linearized"),
                gradients("operators", network, "gauss-newton linearized, compiled"),
                gradients("operators", network, "torch, graph of the gradient kept"),
            ],
            strict=True,
        )


def checking_times() -> Iterator[tuple[str, float]]:
    (line,) = re.findall(r"^\| milliseconds, .*", text_of("docs/guides/checking.md"), re.MULTILINE)
    names = ["gradcheck and gradgradcheck", "the same, every switch on", "hodiff.check"]
    yield from zip(
        numbers(line.strip("|").split("|")[1:]),
        [milliseconds("checks", "elementwise", name) for name in names],
        strict=True,
    )


def zoo_counts() -> Iterator[tuple[str, float]]:
    """Counts in the README and the guide, against the page of the zoo."""
    line = re.findall(r"^\| \*\*all\*\* .*", text_of("docs/reference/zoo.md"), re.MULTILINE)[0]
    (plain, count), (switches, _), _, (ours, _) = [
        tuple(map(float, each)) for each in re.findall(r"(\d+) of (\d+)", line)
    ]
    (readme,) = re.findall(
        r"Of (\d+) small Functions.*? find (\d+),\s+with all their options", text_of("README.md"), re.DOTALL
    )
    yield from zip(readme, (count, switches), strict=True)
    (row,) = re.findall(r"^\| wrong Functions found .*", text_of("docs/guides/checking.md"), re.MULTILINE)
    yield from zip(re.findall(r"(\d+) of", row), (plain, switches, ours), strict=True)


def corrections_in_gradients() -> Iterator[tuple[str, float]]:
    (found,) = re.findall(
        r"gradient inside\s+took ([\d.]+)\s+\(MLP\), ([\d.]+)\s+\(CNN\)\s+and\s+([\d.]+)\s+\(transformer",
        text_of("docs/guides/corrections.md"),
    )
    problems = {each["title"]: each for each in on_file("corrections")["problems"]}
    for shown, network in zip(found, ("mlp", "cnn", "transformer"), strict=True):
        _, inside = problems[f"{network}: gradient"]["rows"]
        yield shown, inside["gradients"]


def costs_of_corrections() -> Iterator[tuple[str, float]]:
    page = text_of("docs/explanations/cost_of_wrong_derivatives.md")
    (found,) = re.findall(
        r"gradient took ([\d.]+) times.*?\(MLP\), ([\d.]+) \(CNN\)\s+and ([\d.]+).*?"
        r"reverse ([\d.]+), ([\d.]+) and ([\d.]+)",
        page,
        re.DOTALL,
    )
    problems = {each["title"]: each for each in on_file("corrections")["problems"]}
    networks = ("mlp", "cnn", "transformer")
    measured = [problems[f"{each}: gradient"]["rows"][1]["gradients"] for each in networks]
    measured += [
        problems[f"{each}: product by forward-over-reverse"]["rows"][1]["of_fastest_torch"] for each in networks
    ]
    yield from zip(found, measured, strict=True)


def counts_of_invented_calls() -> Iterator[tuple[str, float]]:
    page = text_of("docs/explanations/cost_of_wrong_derivatives.md")
    (found,) = re.findall(
        r"(\d+) of ([\d,]+) randomly changed calls are .*? none of ([\d,]+)\s+inside", page, re.DOTALL
    )
    counts = json.loads((ROOT / "hodiff" / "audit" / "data" / "mutated-2.13.json").read_text(encoding="utf-8"))[
        "counts"
    ]
    silent, corrected = (sum(each["silent"] for each in counts[run].values()) for run in ("torch", "corrected"))
    assert corrected == 0
    judged = [sum(each["judged"] for each in counts[run].values()) for run in ("torch", "corrected")]
    yield from zip(found, (silent, *judged), strict=True)


def batched_parts() -> Iterator[tuple[str, float]]:
    shown = re.findall(
        r"took a (\d+)th \(least squares\) to a (\d+)th \(`\"bfgs\"`\)", text_of("docs/guides/optimizers.md")
    )[0]
    for each, problem in zip(shown, ("peaks", "rosenbrock bfgs"), strict=True):
        # The loop solves a fiftieth of the problems only.
        yield each, float(f"{50 / gradients('batched', problem, 'all at once, batched=True'):.2g}")


def compiled_dense() -> Iterator[tuple[str, float]]:
    pattern = r"([\d.]+) ms against ([\d.]+) for 650 parameters and (\d+) against (\d+) for\s+2,410"
    shown = re.findall(pattern, text_of("docs/guides/operators.md"))[0]
    names = ["hodiff.HessianOperator, compiled, at a new point", "hodiff.HessianOperator, to_dense"]
    yield from zip(
        shown,
        [milliseconds("dense", f"digits-{network}-256", name) for network in ("64-10", "64-32-10") for name in names],
        strict=True,
    )


def footprints_of_products() -> Iterator[tuple[str, float]]:
    parts = on_file("footprints")["parts"]["Products"]
    for row, network in zip(
        table_after("docs/guides/operators.md", "peak memory in units of a gradient's peak"), NETWORKS, strict=True
    ):
        yield from zip(numbers(row[1:]), parts[network].values(), strict=True)


def footprints_of_inner_loops() -> Iterator[tuple[str, float]]:
    parts = on_file("footprints")["parts"]
    for name, shown in table_after("docs/guides/meta.md", "The peak memory for 200 steps"):
        yield shown, parts["Inner loops"][name]
    told = re.findall(
        r"([\d.]+) MiB without these arguments, ([\d.]+) with .*?, and ([\d.]+) with\s",
        text_of("docs/howto/meta_gradient_memory.md"),
    )
    yield from zip(told[0], parts["Inner loops"].values(), strict=False)
    pattern = (
        r"mixed route takes ([\d.]+) times.*?, ([\d.]+) for a CNN.*?, ([\d.]+) for an MLP 784-512-512-10 "
        r"and a transformer, ([\d.]+)\s+for"
    )
    shown = re.findall(pattern, text_of("docs/guides/meta.md"), re.DOTALL)[0]
    sines, digits, mlp, transformer, cnn = parts["Routes"].values()
    yield from zip((*shown[:3], *shown[2:]), (sines, digits, mlp, transformer, cnn), strict=True)


def attention_errors() -> Iterator[tuple[str, float]]:
    """Errors at 8,192 positions, in the order of the guide."""
    parts = on_file("attention_precision")["parts"]["8,192 queries and keys"]
    shown = re.findall(r"\d\.\de-\d", text_of("docs/guides/attention.md").split("## Precision")[1])
    ours, math, flash = (
        {dtype: list(parts[dtype][way].values()) for dtype in parts}
        for way in ("hodiff", "torch, math", "torch, flash")
    )
    first = [*ours["float32"], *math["float32"], *ours["bfloat16"][:2], *flash["bfloat16"]]
    products = [each[dtype][2] for each in (ours, math) for dtype in ("bfloat16", "float16")]
    yield from zip(shown, (*first, *products), strict=True)


def training_losses() -> Iterator[tuple[str, float]]:
    """Medians of the last losses; the cell is empty if an optimizer is not trained on a task."""
    parts = list(on_file("training")["parts"].values())
    for name, *cells in table_after("docs/guides/optimizers.md", "### Training losses"):
        full = f"{name} 0.9" if name.endswith("momentum") else name
        for shown, part in zip(cells, parts, strict=True):
            if shown:
                yield shown, median(course["losses"][-1] for course in part[full]["courses"])


def steps_of_optimizers() -> Iterator[tuple[str, float]]:
    # Text before each table, and its name in the results.
    tables = {
        'on steps that are "due"': "one step",
        "| `NewtonCG`, Gauss-Newton": "a step on average",
        "| on average, with the defaults": "a step on average, in steps of `torch.optim.AdamW`",
        "| on average, in steps of": "state",
    }
    for mark, part in tables.items():
        measured = on_file("optimizers")["parts"][part]
        section = text_of("docs/guides/optimizers.md").split(mark, 1)[1]
        lines = section[section.index("\n\n|") + 2 :].split("\n\n")[0].splitlines()
        for name, *shown in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]):
            yield from zip(shown, (network[name] for network in measured.values()), strict=True)


def standard_problems() -> Iterator[tuple[str, float]]:
    """Rows of the guide's table, against the summary of the results."""
    page = (RESULTS / "standard_problems.md").read_text(encoding="utf-8").split("\n## ")[1]
    summary = dict(re.findall(r"^\| ([\w-]+) +\| +(\d+ of 41 .*)\|$", page, re.MULTILINE))
    for name, *cells in table_after("docs/guides/optimizers.md", "## Results on standard problems"):
        methods = re.findall(r'"([\w-]+)"', name)
        for number, method in enumerate(methods):
            expected = [each.strip() for each in summary[method].split("|")]
            for cell, measured in zip(cells, (expected[0].split()[0], *expected[1:]), strict=True):
                parts = cell.split(", ")
                found = numbers(parts[number : number + 1] if len(parts) > 1 else parts)
                assert bool(found) == (measured not in ("", "0")), (name, cell, measured)
                yield from ((each, float(measured)) for each in found)


def bfloat16_digits() -> Iterator[tuple[str, float]]:
    found = on_file("bfloat16")["parts"]["Relative errors"]
    rows = table_after("docs/guides/large_models.md", "Relative errors for a GPT with two layers")
    for (_, *cells), errors in zip(rows, found.values(), strict=True):
        measured = errors["gradient"], errors["`hvp`"], errors["differences"]
        yield from zip(cells, measured, strict=True)


CLAIMS: dict[str, Callable[[], Iterator[tuple[str, float]]]] = {
    each.__name__: each
    for each in (
        readme_products,
        readme_dense,
        readme_layer_norm,
        speed_products,
        speed_operators,
        checking_times,
        zoo_counts,
        corrections_in_gradients,
        costs_of_corrections,
        counts_of_invented_calls,
        batched_parts,
        compiled_dense,
        footprints_of_products,
        footprints_of_inner_loops,
        bfloat16_digits,
        attention_errors,
        training_losses,
        steps_of_optimizers,
        standard_problems,
    )
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_figures_in_documents_match_saved_results(claim: str) -> None:
    compared = list(CLAIMS[claim]())
    assert compared
    assert [(shown, measured) for shown, measured in compared if not is_rounded_from(shown, measured)] == []


def test_costs_of_sharded_products_are_those_of_the_formulas() -> None:
    parts = on_file("sharded")["parts"]
    for name, row in parts["Bytes of collectives"].items():
        assert [row["gathered"], row["scattered"]] == pytest.approx(row["formula"], rel=0.01), name
    for name, row in parts["Peak memory of a rank"].items():
        for ranks in () if name == "gradient" else ("2", "4"):
            assert row[ranks] == pytest.approx(row[f"formula, {ranks}"], rel=0.05), (name, ranks)


@pytest.mark.parametrize(
    ("shown", "measured", "right"),
    [("2.71", 2.7139, True), ("2.71", 2.7161, False), ("4,270", 4274.0, True), ("4,270", 4277.0, False),
     ("653", 653.4, True), ("653", 654.0, False), ("1.2e-5", 1.24e-5, True), ("1.2e-5", 1.3e-5, False),
     ("0.26", 0.2649, True), ("41", 40.0, False)],
)  # fmt: skip
def test_rounded_numbers_are_told_from_stale_ones(shown: str, measured: float, right: bool) -> None:
    assert is_rounded_from(shown, measured) == right
