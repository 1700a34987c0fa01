"""Audits stored in hodiff: of versions of torch, invented calls and Taylor mode."""

from __future__ import annotations

from functools import cache
from importlib import resources

import torch

from hodiff.checks.audit.jets.jet_audit import JetAudit
from hodiff.checks.audit.mutated.mutated_audit import MutatedAudit
from hodiff.checks.audit.verdicts import AuditTable

_FOLDER = resources.files("hodiff.checks.audit") / "data"
_INVENTED = "mutated-2.13.json"
_JETS = "jets-2.13.json"


def versions_on_file() -> list[str]:
    """Return the minor versions of torch with an audit, such as "2.13", oldest first."""
    names = [file.name for file in _FOLDER.iterdir() if file.name.startswith("torch-")]
    return sorted((name.removeprefix("torch-").removesuffix(".json") for name in names), key=_numbers)


def audit_on_file(version: str = torch.__version__) -> AuditTable:
    """Return the audit of torch's minor version, else of the nearest older version, else of the oldest."""
    audited = versions_on_file()
    older = [each for each in audited if _numbers(each) <= _numbers(version)]
    return _read(older[-1] if older else audited[0])


def mutated_on_file() -> MutatedAudit:
    """Return the audit of invented calls, by torch alone and with corrections."""
    return MutatedAudit.from_json((_FOLDER / _INVENTED).read_text(encoding="utf-8"))


def jets_on_file() -> JetAudit:
    """Return the audit of Taylor mode."""
    return JetAudit.from_json((_FOLDER / _JETS).read_text(encoding="utf-8"))


@cache
def _read(version: str) -> AuditTable:
    return AuditTable.from_json((_FOLDER / f"torch-{version}.json").read_text(encoding="utf-8"))


def _numbers(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)
