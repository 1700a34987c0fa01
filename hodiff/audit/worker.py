"""Worker process that audits operators one by one; if it hangs or crashes, the audit continues.

It reads requests and writes replies as lines of JSON. The first line lists the operators.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, TextIO

import torch

from hodiff.audit.audit_sample import audit_sample
from hodiff.audit.jets.jet_operator import audit_jets
from hodiff.audit.jets.verdict import JetVerdict
from hodiff.audit.mutated.mutated_operator import audit_changed
from hodiff.audit.reproduction import reproduction
from hodiff.audit.samples import ILL_POSED, database, name_of, samples
from hodiff.checks.torch_verdicts import Verdict, everywhere, worst
from hodiff.errors import HodiffError


def main() -> None:
    """Serve requests from the standard input until it ends."""
    replies = _own_output()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        operators = database()
    except HodiffError as error:
        _write(replies, {"error": str(error)})
        return
    _write(replies, {"operators": list(operators)})
    for line in sys.stdin:
        request = json.loads(line)
        name, kind = request.pop("operator"), request.pop("kind", "routes")
        _write(replies, _KINDS[kind](operators[name], **request))


def audit_operator(op: Any, *, correct: bool, count: int, seed: int) -> dict[str, Any]:
    """Return the verdict on an operator by each route, and whether any correction concerns it."""
    name = name_of(op)
    reason = ILL_POSED.get(name) or _undeclared(op)
    listed = [] if reason else samples(name, op, count)
    if not reason and not listed:
        reason = "no sample with a strided real floating-point tensor to differentiate"
    if reason:
        verdicts = everywhere(Verdict("not differentiable", None, reason))
    else:
        verdicts = worst([audit_sample(each, correct=correct, seed=seed) for each in listed])
    return {
        "verdicts": {route: verdict.to_json() for route, verdict in verdicts.items()},
        "is_corrected": any(each.is_corrected() for each in listed),
    }


def audit_invented(op: Any, *, correct: bool, count: int, seed: int) -> dict[str, Any]:
    """Return the counts of an operator's invented calls, and some findings."""
    name = name_of(op)
    if name in ILL_POSED or _undeclared(op):
        return {"judged": 0, "silent": 0, "raising": 0, "findings": []}
    return audit_changed(name, op, correct=correct, cases=count, seed=seed)


def audit_in_taylor_mode(op: Any, *, order: int, count: int, seed: int) -> dict[str, Any]:
    """Return the verdict on an operator in Taylor mode."""
    reason = ILL_POSED.get(name_of(op)) or _undeclared(op)
    verdict = (
        JetVerdict("not differentiable", reason) if reason else audit_jets(op, order=order, count=count, seed=seed)
    )
    return verdict.to_json()


_KINDS: dict[str, Callable[..., dict[str, Any]]] = {
    "routes": audit_operator,
    "invented": audit_invented,
    "jets": audit_in_taylor_mode,
    "script": reproduction,
}


def _undeclared(op: Any) -> str:
    if torch.float64 not in op.dtypes:
        return "takes no float64"
    return "" if op.supports_autograd else "torch declares no derivative"


def _own_output() -> TextIO:
    """Return the standard output as a new stream, and redirect what operators print to the standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _write(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
