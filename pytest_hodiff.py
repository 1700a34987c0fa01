"""The pytest plugin of hodiff: the fixture ``hodiff_check``, its options, and a summary of warnings.

It stands outside of the package because pytest imports it at every start, and importing from hodiff imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from hodiff import Report


def _boolean(text: str) -> bool:
    values = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}
    return values[text.strip().lower()]


def _boolean_or_name(text: str) -> bool | str:
    try:
        return _boolean(text)
    except KeyError:
        return text.strip()


# What the ini file may say for all tests, as hodiff_NAME: how it is read, what is expected, what it is.
_OPTIONS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "order": (int, "an integer", "highest order of derivative"),
    "vmap": (_boolean, "true or false", "whether to check batching"),
    "compile": (_boolean_or_name, "true, false or a backend", "whether to check torch.compile"),
    "scipy": (_boolean, "true or false", "whether to run SciPy's oracle"),
    "seed": (int, "an integer", "seed of directions and batches"),
    "method": (str.strip, "a method", "which derivatives are compared: auto, directions or matrices"),
}

_WARNING = "hodiff_warning"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options of the ini file."""
    for name, (_, expected, meaning) in _OPTIONS.items():
        parser.addini(f"hodiff_{name}", f"hodiff_check: {meaning} ({expected})", type="string", default="")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", "hodiff(**options): options of hodiff.check for the fixture hodiff_check.")


@pytest.fixture
def hodiff_check(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """`hodiff.assert_differentiable` with the options of the ini file and of ``@pytest.mark.hodiff(...)``.

    An option of the call comes before one of the marker, that before one of the ini file. Warnings of the report do
    not fail the test; they are listed in the summary of the run.

    Returns:
        The function, which returns the report.
    """
    defaults = {**_ini_options(request.config), **_marker_options(request.node)}

    def run(f: Any, inputs: Any, **options: Any) -> Report:
        __tracebackhide__ = True
        from hodiff.checks.check import assert_differentiable

        report = assert_differentiable(f, inputs, **{**defaults, **options})
        for finding in report.warnings:
            where = f" ({finding.location})" if finding.location else ""
            line = f"{report.title}: {finding.code} {finding.title}{where}: {finding.remedy}"
            # Properties are what travels from the processes of pytest-xdist.
            request.node.user_properties.append((_WARNING, line))
        return report

    return run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the warnings of all checks."""
    lines = list(dict.fromkeys(_warnings(terminalreporter)))
    if lines:
        terminalreporter.section("warnings of hodiff")
        for line in lines:
            terminalreporter.line(line)


def _warnings(terminalreporter: pytest.TerminalReporter) -> Iterator[str]:
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, line in getattr(report, "user_properties", ()):
                if name == _WARNING:
                    yield f"{report.nodeid}: {line}"


def _ini_options(config: pytest.Config) -> dict[str, Any]:
    return {name: _read(config, name) for name in _OPTIONS if config.getini(f"hodiff_{name}") != ""}


def _read(config: pytest.Config, name: str) -> Any:
    text = str(config.getini(f"hodiff_{name}"))
    read, expected, _ = _OPTIONS[name]
    try:
        return read(text)
    except (KeyError, ValueError):
        raise pytest.UsageError(f"hodiff_{name}: expected {expected} in the ini file, got {text!r}.") from None


def _marker_options(node: pytest.Item) -> dict[str, Any]:
    """Those of the test come before those of its class, and those before its module's."""
    options: dict[str, Any] = {}
    for marker in node.iter_markers("hodiff"):
        if marker.args:
            raise pytest.UsageError(
                f"@pytest.mark.hodiff of {node.nodeid}: expected keyword arguments, such as order=3, "
                f"got {marker.args!r}."
            )
        options = {**marker.kwargs, **options}
    return options
