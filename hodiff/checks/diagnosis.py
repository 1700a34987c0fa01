"""From failed comparisons to findings: which belong together, and what to do about them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hodiff.checks.report import Entry, Finding


@dataclass(frozen=True)
class Rule:
    """A remedy and the patterns, matched at the start, of the entries that it cures."""

    remedy: str
    kind: str = ""
    route: str = ""
    order: str = ""
    quantity: str = ""
    detail: str = ""

    def cures(self, entry: Entry) -> bool:
        """Whether all patterns match."""
        return (
            re.match(self.kind, entry.status) is not None
            and re.match(self.route, entry.route) is not None
            and re.match(self.order, str(entry.order)) is not None
            and re.match(self.quantity, entry.quantity) is not None
            and re.search(self.detail, entry.detail) is not None
        )


# Here no number came out, only a message.
_STOPPED = {"raises", "fails"}

# The first rule that matches gives the remedy, so the special ones come first.
RULES: tuple[Rule, ...] = (
    Rule(
        "The function computes in lower precision whatever its inputs. Make what it holds float64 "
        "(module.double()) or pass it as inputs; until then every comparison is coarse.",
        kind="float64",
    ),
    Rule(
        "Remove @once_differentiable and write backward with torch operations or other Functions.",
        detail="once_differentiable",
    ),
    Rule(
        "Split forward(ctx, ...) into forward(...) without ctx and setup_context(ctx, inputs, output); "
        "torch.func transforms need both. An operator from torch.library.custom_op has to be wrapped in such a "
        "Function.",
        detail="setup_context",
    ),
    Rule(
        "A rule calls NumPy, Triton or C++ code, which torch.func cannot see into, and of which plain autograd loses "
        "the second derivative silently: make that call a Function of its own, with backward and jvp.",
        detail="Cannot access data pointer|doesn't have storage",
    ),
    Rule(
        "A torch operator has no such derivative: write it in elementary operators, or stay with the routes that "
        "have one.",
        detail="Trying to use forward AD with|derivative for .* is not implemented",
    ),
    Rule(
        "Add a jvp staticmethod that computes the tangent from saved inputs (save_for_forward) with torch operations.",
        detail=r"jvp|forward[- ](mode )?(AD|differentiation)|forward AD",
    ),
    Rule(
        "Set generate_vmap_rule = True if all staticmethods are torch operations, else write a vmap staticmethod.",
        detail="generate_vmap_rule|vmap staticmethod",
    ),
    Rule(
        "The function has Python control flow or an in-place write that depends on batched data; use torch.where "
        "and out-of-place operations.",
        route="vmap",
        kind="raises",
    ),
    Rule(
        "The batching rule is wrong, or the function mixes samples. Honour each entry of in_dims (None and "
        "negative ones too) in vmap, or set generate_vmap_rule = True and delete it.",
        route="vmap",
    ),
    Rule(
        "A rule fails under vmap; the rows of vmap say which.",
        quantity="batched",
    ),
    Rule(
        "Compiled code differs from eager. Compile only what agrees here, or keep the function out of the graph "
        "with torch.compiler.disable; a custom jvp is not seen by torch.compile.",
        route="compile",
    ),
    Rule(
        "The point is not smooth: a kink, a jump or the edge of the domain, where derivatives depend on the side. "
        "Check at another point, or state which derivative is meant.",
        kind="non-smooth",
    ),
    Rule(
        "A derivative is infinite or NaN. Often 0 * inf in a branch that torch.where discards: make the argument "
        "safe before the operation.",
        kind="non-finite",
    ),
    Rule(
        "Right in float64, but it loses more than half of its digits here: rearrange the formula against "
        "cancellation or compute it in float32 or float64 inside.",
        kind="imprecise",
    ),
    Rule(
        "The jvp staticmethod gives a wrong tangent: compare it with backward. If the tangent is zero, it may be "
        "missing: torch.library.custom_op has none.",
        kind="zero|wrong",
        route="forward$",
        order="1",
    ),
    Rule(
        "backward gives a wrong gradient; if it is zero the graph is cut: look for detach, .data, .item() and NumPy.",
        kind="zero|wrong",
        route="reverse$",
        order="1",
    ),
    Rule(
        "jvp uses values that do not depend on the inputs in the graph. Recompute them in jvp from inputs saved by "
        "save_for_forward; do not save derivatives on ctx. If f calls no Function of its own, a torch operator is at "
        "fault: write it in elementary ones.",
        kind="zero|wrong",
        route="reverse-over-forward$",
    ),
    Rule(
        "If reverse-over-forward is right, the cause is that torch runs the jvp of a custom Function with forward "
        "mode off, so an outer forward pass sees constants in it: put @hodiff.functions.nestable_jvp under "
        "@staticmethod. If reverse-over-forward is wrong too, mend that first.",
        kind="zero|wrong",
        route="(.*forward.*){2}$",
    ),
    Rule(
        "backward uses values that do not depend on the inputs in the graph: an intermediate of forward, "
        "once_differentiable, a NumPy or Triton call. Recompute from saved inputs, or return the intermediate as an "
        "output and add its incoming gradient.",
        kind="zero|wrong",
        route="(reverse|forward)-over-reverse$",
    ),
    Rule(
        "A rule inside is right to a lower order only: write every rule with torch operations that are themselves "
        "differentiable to this order.",
        kind="zero|wrong",
    ),
    Rule("See the message of torch.autograd; the routes above say which rule is at fault.", kind="fails"),
    Rule("This route is not available; use one that is, or add the missing rule.", kind="raises"),
)


def diagnose(entries: Iterable[Entry]) -> tuple[Finding, ...]:
    """Group failed entries into findings, in the order in which they were found.

    The entries of one route at one order are one symptom, and the first of them names its kind. Symptoms with
    one kind and one remedy at one order are one finding, as are all that stopped with the same message.

    Returns:
        The findings; empty if no entry failed.
    """
    symptoms: dict[tuple[object, ...], list[Entry]] = {}
    for entry in filter(lambda entry: entry.failed, entries):
        key = (entry.detail,) if entry.status in _STOPPED else (entry.order, entry.route)
        symptoms.setdefault(key, []).append(entry)
    groups: dict[tuple[object, ...], list[Entry]] = {}
    for symptom in symptoms.values():
        first = symptom[0]
        remedy = next(rule.remedy for rule in RULES if rule.cures(first))
        groups.setdefault((first.status, first.order, remedy, first.detail), []).extend(symptom)
    return tuple(_finding(group, remedy) for (_, _, remedy, _), group in groups.items())


def _finding(group: list[Entry], remedy: object) -> Finding:
    return Finding(
        route=", ".join(dict.fromkeys(entry.route for entry in group)),
        order=min(entry.order for entry in group),
        kind=group[0].status,
        message=_message(group),
        remedy=str(remedy),
    )


def _message(group: list[Entry]) -> str:
    first = group[0]
    quantities = ", ".join(dict.fromkeys(entry.quantity for entry in group))
    if first.detail:
        return f"{first.detail} ({quantities})"
    worst = max((entry for entry in group if entry.error is not None), key=lambda entry: entry.error or 0.0)
    return f"relative error {worst.error:.1e}, tolerance {worst.tolerance:.1e} ({quantities})"
