"""`audit`: measures the derivatives of torch's operator database by every route."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any

import torch

from hodiff.audit.pool import DiedError, Reply, Request, TimedOutError, serve_operators
from hodiff.checks.torch_verdicts import CORRECTED, RUNS, TORCH, AuditTable, Verdict, Verdicts, everywhere
from hodiff.common.options import require_number
from hodiff.errors import InputError


def audit(
    operators: str | Iterable[str] | None = None,
    *,
    correct: bool | str = False,
    samples: int = 6,
    jobs: int = 2,
    time_limit: float = 120.0,
    seed: int = 0,
    progress: bool = False,
) -> AuditTable:
    r"""Measure where torch's second and third derivatives are right, wrong or missing, operator by operator.

    For samples of each operator of torch's own database, in float64, the outputs y are contracted to

    .. math:: \phi(t) = \sum_i u_i y_i(x + V t) + \tfrac{1}{2} w_i y_i(x + V t)^2

    with random u, w and V. Its Hessian by all four routes and its third derivative in reverse mode are compared with
    extrapolated differences of the order below, which itself agreed with differences. Operators of symmetric or
    triangular matrices become functions of any matrix by symmetrizing inside. Complex outputs are split into real and
    imaginary parts, and complex inputs are skipped. Worker processes do the work, so that a crash or an endless loop
    costs one operator.

    Args:
        operators: Names of the database, with or without variant and module: ``"nn.functional.layer_norm"``,
            ``"layer_norm"``; all of them by default, which takes minutes.
        correct: Whether hodiff's corrections are on, or ``"both"`` for both runs side by side.
        samples: Largest number of samples of an operator.
        jobs: Largest number of processes.
        time_limit: Seconds for each operator and run.
        seed: Seed of the directions and cotangents.
        progress: Whether to show a progress bar.

    Returns:
        A table of verdicts; its ``str`` names the operators with a defect, and
        `hodiff.audit.page.markdown_page` writes it as a page.

    Raises:
        HodiffError: If this build of torch lacks the database.
        InputError: If an operator is unknown, or ``correct``, ``samples``, ``jobs`` or ``time_limit`` are out of range.

    Example:
        >>> table = audit("nn.functional.softsign")  # doctest: +SKIP
        >>> table.operators["nn.functional.softsign"]["torch"]["reverse-over-forward"].status  # doctest: +SKIP
        'right'

    Source:
        C. J. F. Ridders (1982) for the differences; torch.testing for the operators.
    """
    runs = runs_of("audit", correct)
    for name, value in (("samples", samples), ("jobs", jobs), ("time_limit", time_limit)):
        require_number("audit", name, value, positive=True)
    found: dict[str, dict[str, Verdicts]] = {}

    def done(request: Request, reply: Reply | TimedOutError | DiedError) -> list[Request]:
        """Record the verdicts; return the request of a second run if corrections may change them."""
        entry = found.setdefault(request["operator"], {})
        entry[CORRECTED if request["correct"] else TORCH] = _verdicts(reply)
        if request["correct"] or len(runs) == 1:
            return []
        if not isinstance(reply, dict) or reply["is_corrected"]:
            return [{**request, "correct": True}]
        entry[CORRECTED] = entry[TORCH]  # without a rule, a second run would repeat the first
        return []

    request = {"correct": runs[0] == CORRECTED, "count": int(samples), "seed": seed}
    names = serve_operators(operators, [request], done, jobs=jobs, limit=time_limit, progress=progress)
    today = datetime.now(tz=timezone.utc).date().isoformat()
    return AuditTable(torch.__version__.split("+")[0], {name: found[name] for name in names}, today)


def reproductions(
    operators: str | Iterable[str],
    *,
    samples: int = 6,
    jobs: int = 2,
    time_limit: float = 120.0,
    seed: int = 0,
    progress: bool = False,
) -> dict[str, str]:
    r"""Write scripts that reproduce wrong or missing derivatives of torch's operators, without hodiff.

    The first defect of an operator's samples, as `audit` judges them, becomes a function of one number,

    .. math:: f(t) = \sum_i u_i y_i(X + V t) + \tfrac{1}{2} w_i y_i(X + V t)^2,

    at the smallest call and the simplest weights u, w and direction V that show it. The script has the numbers as
    literals or draws them from a seed. It prints the derivatives of f at 0 by every route, with torch alone, and by
    extrapolated differences of the order below. It also has the output of a run with this version of torch.

    Args:
        operators: Names of the database, with or without variant and module.
        samples: Largest number of samples of an operator.
        jobs: Largest number of processes.
        time_limit: Seconds for each operator.
        seed: Seed of the directions and cotangents with which `audit` judges.
        progress: Whether to show a progress bar.

    Returns:
        Python code by operator. It consists of comments if all derivatives are right, or if no script shows the defect.

    Raises:
        HodiffError: If this build of torch lacks the database.
        InputError: If an operator is unknown, or ``samples``, ``jobs`` or ``time_limit`` are out of range.

    Example:
        >>> print(reproductions("linalg.det")["linalg.det"])  # doctest: +SKIP

    Source:
        L. F. Richardson (1911) for the extrapolation; torch.testing for the operators.
    """
    for name, value in (("samples", samples), ("jobs", jobs), ("time_limit", time_limit)):
        require_number("reproductions", name, value, positive=True)
    found: dict[str, str] = {}

    def done(request: Request, reply: Reply | TimedOutError | DiedError) -> list[Request]:
        """Record the script; ask for the call as it is if a smaller call crashed or took too long."""
        name = request["operator"]
        if not isinstance(reply, dict):
            if request["smaller"]:
                return [{**request, "smaller": False}]
            reply = {"script": f"# {name}: {reply}\n"}
        found[name] = reply["script"]
        return []

    request = {"kind": "script", "count": int(samples), "seed": seed, "smaller": True}
    names = serve_operators(operators, [request], done, jobs=jobs, limit=time_limit, progress=progress)
    return {name: found[name] for name in names}


def runs_of(caller: str, correct: bool | str) -> tuple[str, ...]:
    """Return the runs that `correct` requests."""
    choices = {False: (TORCH,), True: (CORRECTED,), "both": RUNS}
    if correct not in choices:
        raise InputError(f"{caller}: correct: expected True, False or 'both', got {correct!r}.")
    return choices[correct]


def _verdicts(reply: Any) -> Verdicts:
    if isinstance(reply, TimedOutError):
        return everywhere(Verdict("timed out", None, str(reply)))
    if isinstance(reply, DiedError):
        return everywhere(Verdict("raises", None, str(reply)))
    return {route: Verdict(**verdict) for route, verdict in reply["verdicts"].items()}
