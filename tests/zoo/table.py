"""Write the table of tools and the wrong functions that they find; it takes minutes.

python tests/zoo/table.py

rewrites docs/reference/zoo.md in place: `git diff` then shows the changes.
"""

import argparse
import sys
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "zoo.md"
FINDS, MISSES, NOT_APPLICABLE = "finds it", "misses it", "n/a"
TOOLS = ("gradcheck + gradgradcheck", "both, every switch on", "torch.library.opcheck", "hodiff.check")
GROUPS = {
    "HD1": "wrong numbers",
    "HD2": "wrong shapes or counts of gradients",
    "HD3": "side effects of a rule",
    "HD4": "missing rules",
    "HD5": "unneeded work or memory",
    "HD9": "no defect of the function",
}
INTRODUCTION = """\
# The zoo of wrong functions

`tests/zoo/wrong/` has small functions with exactly one defect each, and `tests/zoo/right/` has right functions.
`python tests/zoo/table.py` runs each tool on each function, and writes this page.

*finds it* means that the tool reports any failure. For `hodiff.check`, it means that the findings have exactly the
expected codes. A right function is called wrong if a tool reports a failure, or if `hodiff.check` finds an error.

`gradcheck` and `gradgradcheck` run once with default options, and once with check_forward_ad, check_fwd_over_rev,
check_rev_over_rev, check_batched_grad, check_batched_forward_grad and check_undefined_grad. `opcheck` supports only
operators of `torch.library`. All tools get the same inputs; torch's tools need them in float64. The last row omits
functions that declare surrogate derivatives, such as straight-through estimators.

"""


def reports_failure(test):
    """Return whether a tool raises, or reports a failure."""
    try:
        return test() is False
    except Exception:
        return True


def tensors_of(specimen):
    """Return a function of the floating-point inputs of a specimen, and these inputs in float64."""
    import torch
    from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

    function = getattr(specimen.function, "apply", specimen.function)
    args = specimen.inputs if type(specimen.inputs) is tuple else (specimen.inputs,)
    leaves, structure = tree_flatten(args)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]

    def of_tensors(*tensors):
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        outputs = tree_leaves(function(*tree_unflatten(filled, structure)))
        return tuple(each for each in outputs if isinstance(each, torch.Tensor))

    return of_tensors, [leaves[i].detach().clone().double().requires_grad_() for i in places]


def gradcheck_complains(specimen, every_switch):
    from torch.autograd import gradcheck, gradgradcheck

    first, second = {}, {}
    if every_switch:
        shared = {"check_undefined_grad": True, "check_batched_grad": True}
        first = {"check_forward_ad": True, "check_batched_forward_grad": True, **shared}
        second = {"check_fwd_over_rev": True, "check_rev_over_rev": True, **shared}

    def run(check, switches):
        function, tensors = tensors_of(specimen)
        return reports_failure(lambda: check(function, tuple(tensors), **switches))

    return run(gradcheck, first) or run(gradgradcheck, second)


def opcheck_complains(specimen):
    import torch

    function, tensors = tensors_of(specimen)
    return reports_failure(lambda: torch.library.opcheck(specimen.function.default, tuple(tensors)) and function)


def verdicts(specimen):
    """Return the verdict of each tool."""
    import torch

    from hodiff.checks import check
    from hodiff.checks.torch_warnings import silence_torch_warnings

    with warnings.catch_warnings(), silence_torch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        plain, full = (gradcheck_complains(specimen, switches) for switches in (False, True))
        operator = isinstance(specimen.function, torch._ops.OpOverloadPacket)
        opcheck = opcheck_complains(specimen) if operator else None
        report = check(specimen.function, specimen.inputs, **specimen.options)
    found = {finding.code for finding in report.findings if finding.severity != "note"}
    answers = (plain, full, opcheck, found == set(specimen.codes))
    return [NOT_APPLICABLE if answer is None else (FINDS if answer else MISSES) for answer in answers]


def false_alarms(specimen):
    """Return the tools that call a right function wrong."""
    import torch

    from hodiff.checks import check
    from hodiff.checks.torch_warnings import silence_torch_warnings

    with warnings.catch_warnings(), silence_torch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        plain, full = (gradcheck_complains(specimen, switches) for switches in (False, True))
        return plain, full, None, not check(specimen.function, specimen.inputs, **specimen.options).ok


def counts(rows):
    """Return the counts of found defects for each tool."""
    cells = []
    for column in zip(*rows, strict=True):
        tally = Counter(column)
        judged = tally[FINDS] + tally[MISSES]
        cells.append(f"{tally[FINDS]} of {judged}" if judged else NOT_APPLICABLE)
    return cells


def line(*cells):
    return f"| {' | '.join(cells)} |"


def alarms_of(rows):
    """Return the number of right functions that each tool calls wrong."""
    columns = list(zip(*rows, strict=True))
    return [NOT_APPLICABLE if None in column else f"{sum(column)} of {len(column)}" for column in columns]


def page(rows, alarms):
    """Return the page: a summary by groups of codes, then a row for each function."""
    from hodiff.checks.findings.codes import CODES

    rule = line("---", "---", *["---"] * len(TOOLS))
    summary = [line("defects", "codes", *TOOLS), rule]
    for prefix, title in GROUPS.items():
        members = [row for specimen, row in rows if specimen.codes[0].startswith(prefix)]
        summary.append(line(title, f"{prefix}..", *counts(members)))
    total = line("**all**", "", *counts([row for _, row in rows]))
    summary += [total, line("right functions called wrong", "", *alarms_of(alarms))]
    table = [line("function", "defect", *TOOLS), rule]
    for specimen, row in sorted(rows, key=lambda each: each[0].codes):
        defects = ", ".join(f"{code}: {CODES[code].title}" for code in specimen.codes)
        table.append(line(f"`{specimen.name}`", defects, *row))
    return INTRODUCTION + "\n".join([*summary, "", "## Results for each function", "", *table, total, ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help="print the table of these alone, and write nothing")
    names = set(parser.parse_args().name)
    import torch
    from tqdm import tqdm
    from zoo.specimen import right_specimens, wrong_specimens

    torch.set_num_threads(1)
    wrong = [specimen for specimen in wrong_specimens() if not names or specimen.name in names]
    right = [specimen for specimen in right_specimens() if not names or specimen.name in names]
    if unknown := names - {specimen.name for specimen in (*wrong, *right)}:
        parser.error(f"the zoo has no {', '.join(sorted(unknown))}")
    rows = [(specimen, verdicts(specimen)) for specimen in tqdm(wrong, unit=" wrong")]
    exact = [specimen for specimen in right if not specimen.options.get("approximate")]
    text = page(rows, [false_alarms(specimen) for specimen in tqdm(exact, unit=" right")])
    if not names:
        PAGE.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    # Some specimens import the examples, as pytest's path allows.
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples" / "functions")]
    main()
