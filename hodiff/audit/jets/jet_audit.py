"""`jet_audit`: compares Taylor mode with oracles on torch's operator database."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources

import torch

from hodiff.audit.jets.verdict import JetVerdict
from hodiff.audit.pool import DiedError, Reply, Request, TimedOutError, serve_operators
from hodiff.common.options import require_int, require_number
from hodiff.errors import InputError


@dataclass(frozen=True)
class JetAudit:
    """Result of `jet_audit`.

    Attributes:
        torch: The version of torch.
        order: The highest order.
        operators: The verdict of each operator, by name in torch's database.

    Example:
        >>> from hodiff.audit.jets.verdict import JetVerdict
        >>> table = JetAudit("2.13.0", 5, {"sin": JetVerdict("right", nested={"1": 0.0})})
        >>> JetAudit.from_json(table.to_json()) == table
        True
        >>> print(table)
        operators of torch 2.13.0 in Taylor mode to order 5: 1 right; nothing off
    """

    torch: str
    order: int
    operators: Mapping[str, JetVerdict]

    @property
    def counts(self) -> Counter[str]:
        """Number of operators with each status."""
        return Counter(verdict.status for verdict in self.operators.values())

    @property
    def defects(self) -> dict[str, JetVerdict]:
        """Operators that are off or timed out."""
        return {name: verdict for name, verdict in self.operators.items() if verdict.is_defect}

    def to_json(self) -> str:
        """Return the table as JSON, one operator per line."""
        lines = [f"{json.dumps(name)}: {json.dumps(each.to_json())}" for name, each in sorted(self.operators.items())]
        head = f'{{"torch": {json.dumps(self.torch)}, "order": {self.order}, "operators": {{\n'
        return head + ",\n".join(lines) + "\n}}\n"

    @staticmethod
    def from_json(text: str) -> JetAudit:
        """Read an audit that `to_json` wrote.

        Args:
            text: The JSON.

        Returns:
            The audit.

        Raises:
            InputError: If the text is no such JSON.
        """
        try:
            data = json.loads(text)
            operators = {name: JetVerdict.from_json(each) for name, each in data["operators"].items()}
            return JetAudit(data["torch"], data["order"], operators)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"JetAudit.from_json: text: expected JSON of such an audit, got {error}.") from error

    def __str__(self) -> str:
        """Return the counts, and a line for each operator that is off or timed out."""
        counts = ", ".join(f"{count} {status}" for status, count in self.counts.most_common())
        bad = [f"{name}: {each.status}: {each.detail}" for name, each in sorted(self.defects.items())]
        head = f"operators of torch {self.torch} in Taylor mode to order {self.order}: {counts}"
        return "\n".join([f"{head}; nothing off" if not bad else head, *bad])


def jet_audit(
    operators: str | Iterable[str] | None = None,
    *,
    order: int = 5,
    samples: int = 2,
    jobs: int = 2,
    time_limit: float = 120.0,
    seed: int = 0,
    progress: bool = False,
) -> JetAudit:
    r"""Measure whether Taylor mode is right, operator by operator, along curves in several directions.

    Samples of each operator of torch's own database are called in float64 along random polynomial curves
    $x_r(t) = x_0 + \sum_{k=1}^K x_{rk} t^k$ of all arguments. All coefficients of the outputs are compared with two
    oracles: nested forward mode in t, with hodiff's corrections, and interpolation of the values at Chebyshev points,
    which uses no derivative code. Collapsed jets of orders 2 and 4 are compared with the sum of plain jets over the
    directions.

    Args:
        operators: Names of operators, as in `hodiff.audit.audit`.
        order: The highest order K, 1 to 5.
        samples: Largest number of samples of an operator, of at most 1500 numbers each.
        jobs: Largest number of processes.
        time_limit: Seconds for each operator.
        seed: Seed of the curves.
        progress: Whether to show a progress bar.

    Returns:
        A table of verdicts; its ``str`` names the operators that are off or timed out.

    Raises:
        HodiffError: If this build of torch lacks the database.
        InputError: If an operator is unknown, or another argument is out of range.

    Example:
        >>> jet_audit("sin").operators["sin"].status  # doctest: +SKIP
        'right'

    Source:
        L. N. Trefethen, *Approximation Theory and Approximation Practice* (2013), for interpolation at these points.
    """
    for name, value in (("order", order), ("samples", samples), ("jobs", jobs)):
        require_int("jet_audit", name, value, 1)
    if order > 5:
        raise InputError(f"jet_audit: order: expected 1 to 5, because the cost of nesting is 2^K, got {order}.")
    require_int("jet_audit", "seed", seed, 0)
    require_number("jet_audit", "time_limit", time_limit, positive=True)
    found: dict[str, JetVerdict] = {}

    def done(request: Request, reply: Reply | TimedOutError | DiedError) -> list[Request]:
        found[request["operator"]] = _verdict(reply)
        return []

    request = {"kind": "jets", "order": order, "count": samples, "seed": seed}
    names = serve_operators(operators, [request], done, jobs=jobs, limit=time_limit, progress=progress)
    return JetAudit(torch.__version__.split("+")[0], order, {name: found[name] for name in names})


def _verdict(reply: Reply | TimedOutError | DiedError) -> JetVerdict:
    if isinstance(reply, TimedOutError):
        return JetVerdict("timed out", str(reply))
    if isinstance(reply, DiedError):
        return JetVerdict("refused", str(reply))
    return JetVerdict.from_json(reply)


def jets_on_file() -> JetAudit:
    """Return the stored audit of Taylor mode."""
    stored = resources.files("hodiff.audit") / "data" / "jets-2.13.json"
    return JetAudit.from_json(stored.read_text(encoding="utf-8"))
