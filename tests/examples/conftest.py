"""The example that a test file tests, by the file's name, and its run."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module in `examples` with the name of the test file."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module(request.path.stem.removeprefix("test_"))


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the main function of an example, check that it saves a picture in a new folder, and return what it prints."""

    def printed(main: Callable[[list[str]], Any], *options: str, output: str = "--output") -> str:
        figure = tmp_path / "figures" / "figure.png"
        main([*options, output, str(figure)])
        assert figure.read_bytes().startswith(b"\x89PNG")
        return capsys.readouterr().out

    return printed
