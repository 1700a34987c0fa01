"""What every test runs under: one thread a worker, seeded generators, reproducible property tests."""

import gc
import os
import random
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# Until all tests are collected nothing is garbage, and the many times that it would be looked for take seconds.
gc.disable()

# Without a GPU, Triton's kernels run in its interpreter, which it has to know before it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# xdist's workers share the cores, and the tensors are tiny: more threads only wait for each other.
torch.set_num_threads(1)

with warnings.catch_warnings():
    # torch's first forward-mode derivative imports TorchScript decompositions, which announce their deprecation.
    warnings.simplefilter("ignore", DeprecationWarning)
    torch.func.jvp(torch.sin, (torch.ones(()),), (torch.ones(()),))

# Seconds since 1970 after which no test is begun; without it all tests run.
TESTS_END = int(os.environ.get("HODIFF_TESTS_END", "0"))

settings.register_profile(
    "hodiff",
    deadline=None,
    derandomize=True,
    max_examples=25,
    database=None,
    # The first examples compile nothing but import a lot; that is no sign of a slow strategy.
    suppress_health_check=[HealthCheck.too_slow],
)
# Other examples at each seed, and many of them: `make test-explore`.
settings.register_profile(
    "explore", settings.get_profile("hodiff"), derandomize=False, max_examples=300, print_blob=True
)
settings.load_profile(os.environ.get("HODIFF_HYPOTHESIS_PROFILE", "hodiff"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test marked `one_in(k)` every k-th stays among the quick tests."""
    quick = [item for item in items if not item.get_closest_marker("slow")]
    cases: dict[tuple[Path, str], int] = {}
    for item in quick:
        if marker := item.get_closest_marker("one_in"):
            test = item.path, getattr(item, "originalname", item.name)
            cases[test] = cases.get(test, -1) + 1
            if cases[test] % marker.args[0]:
                item.add_marker(pytest.mark.slow)
    if TESTS_END and items:
        # Where not all tests may be reached, each run begins with another file.
        first = random.Random(TESTS_END).choice(items).path
        start = next(place for place, item in enumerate(items) if item.path == first)
        items[:] = items[start:] + items[:start]


def pytest_runtest_setup() -> None:
    """Skip the tests that a slow machine cannot begin before `.ci/run` has to end; the summary counts them."""
    if TESTS_END and time.time() > TESTS_END:
        pytest.skip("not begun: HODIFF_TESTS_END, which .ci/run sets for slow machines, has passed")


def pytest_collection_finish() -> None:
    """What was imported and collected stays: a garbage collection, of which tests ask for many, may pass it over."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()
    gc.enable()  # also where the collection failed


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Beside pytest's list of the longest tests, the files that take most: many short tests cost minutes."""
    shown = terminalreporter.config.getoption("durations")
    reports = [each for kind in terminalreporter.stats.values() for each in kind if isinstance(each, pytest.TestReport)]
    if not shown or not reports:
        return
    seconds: Counter[str] = Counter()
    for report in reports:
        seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section(f"{shown} files that take most of {sum(seconds.values()):.0f} s")
    for name, duration in seconds.most_common(shown):
        terminalreporter.write_line(f"{duration:.1f}s {name}")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    # `torch.manual_seed` notes a whole traceback for each accelerator that is not there: a millisecond a test.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def _global_state_is_left_alone() -> Iterator[None]:
    """A transform that forgets to restore a mode of torch would change every later test."""
    before = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype())
    yield
    after = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype())
    assert after == before


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
