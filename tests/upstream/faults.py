"""Faults of torch's derivatives: corrections with one reason and one rule, and where the audits show them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hodiff
from hodiff.checks.torch_verdicts import audit_on_file, versions_on_file


def faults() -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Corrections with one fault and one rule, and the functions that share them."""
    found: dict[Any, list[Any]] = {}
    for row in hodiff.corrections.table():
        derived = row.reference.startswith("the same code, with the rules of the functions")
        if row.kind != "slow" and not derived:
            found.setdefault((row.kind, row.routes, row.reason, row.reference, row.mended), []).append(row)
    for rows in found.values():
        yield rows[0], tuple(row.name for row in rows)


def row_names(name: str) -> list[str]:
    """Names that the table of corrections may have for an operator of torch's database."""
    stems = [name, name.rpartition(".")[0]] if "." in name else [name]
    prefixes = ("torch.", "torch.ops.aten.", "torch.functional.", "torch.nn.functional.")
    return [prefix + stem for stem in stems if stem for prefix in prefixes]


def audited_operators(functions: tuple[str, ...]) -> list[str]:
    """Operators of torch's database that call the functions and have a defect in an audited version."""
    defects = {name for version in versions_on_file() for name in audit_on_file(version).defects("torch")}
    return sorted(name for name in defects if set(row_names(name)) & set(functions))
