"""`python -m hodiff audit`: its page, its JSON and its exit status."""

import pytest

from hodiff.__main__ import main
from hodiff.audit import audit_command
from hodiff.checks import AuditTable, Verdict
from hodiff.checks.torch_verdicts import everywhere


@pytest.mark.parametrize(
    ("status", "code"), [("right", 0), ("random", 0), ("not smooth", 0), ("wrong", 1), ("raises", 1), ("timed out", 1)]
)
def test_exit_status_is_1_for_defects_and_0_otherwise(monkeypatch, tmp_path, capsys, status, code):
    entry = {"torch": everywhere(Verdict("wrong", 1.0)), "corrected": everywhere(Verdict(status))}
    monkeypatch.setattr(audit_command, "audit", lambda *_, **__: AuditTable("2.13.0", {"sin": entry}))
    written, page = tmp_path / "audit.json", tmp_path / "audit.md"
    assert main(["audit", "--json", str(written), "--markdown", str(page)]) == code
    assert AuditTable.from_json(written.read_text()).operators["sin"] == entry
    assert page.read_text().startswith("# ")
    assert not capsys.readouterr().out


@pytest.mark.slow
def test_audits_one_operator(capsys):
    assert (
        main(["audit", "--op", "native_layer_norm", "--uncorrected", "--quiet", "--jobs", "1", "--samples", "1"]) == 1
    )
    assert "| `native_layer_norm` | right | right | wrong" in capsys.readouterr().out


def test_rejects_wrong_options(capsys):
    assert main(["audit", "--samples", "0"]) == 2
    assert "samples: expected a positive number" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2


def test_on_file_prints_the_saved_page_without_an_audit(monkeypatch, capsys):
    monkeypatch.setattr(audit_command, "audit", None)
    assert main(["audit", "--on-file"]) == 0
    assert "## By version of torch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--op sin --on-file", "--op: expected no --op with --on-file"),
        ("--op sin --on-file --script", "with --on-file"),
        ("--mutate --on-file", "--mutate: expected no --mutate with --on-file"),
        ("--op sin --script --json a.json", "--json: expected no --json with --script"),
        ("--op sin --script --markdown a.md", "--markdown: expected no --markdown with --script"),
        ("--op sin --script --corrected", "--corrected: expected no --corrected with --script"),
        ("--mutate --samples 3", "--samples: expected no --samples with --mutate"),
        ("--jets --uncorrected", "--uncorrected: expected no --uncorrected with --jets"),
        ("--order 3", "--order: expected --jets with --order"),
        ("--jets --cases 3", "--cases: expected --mutate with --cases"),
    ],
)
def test_rejects_options_without_effect(monkeypatch, capsys, options, words):
    for name in ("audit", "mutated_audit", "jet_audit", "reproductions", "audit_on_file", "jets_on_file"):
        monkeypatch.setattr(audit_command, name, None)
    assert main(["audit", *options.split()]) == 2
    assert words in capsys.readouterr().err


def test_help_states_samples_names_and_exit_status(capsys):
    with pytest.raises(SystemExit):
        main(["audit", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for words in ("Samples are float64", "names are those of torch's operator database", "if a script was written"):
        assert words.lower() in text.lower()
