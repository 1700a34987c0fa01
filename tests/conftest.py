"""Settings for all tests: one thread per worker, seeded generators, reproducible property tests."""

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

# Collecting tests creates no garbage, and garbage collections during it take seconds.
gc.disable()

# Without a GPU, Triton's kernels run in its interpreter, which must be chosen before Triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# xdist's workers share the cores, and the tensors are tiny: more threads only wait for each other.
torch.set_num_threads(1)

with warnings.catch_warnings():
    # torch's first forward-mode derivative imports TorchScript decompositions, which emit a deprecation warning.
    warnings.simplefilter("ignore", DeprecationWarning)
    torch.func.jvp(torch.sin, (torch.ones(()),), (torch.ones(()),))

# Time in seconds since 1970 after which no test begins; 0 runs all tests.
TESTS_END = int(os.environ.get("HODIFF_TESTS_END", "0"))
# Changed files; if time is limited, tests of their folders run first.
CHANGED = [Path(name).parts for name in os.environ.get("HODIFF_TESTS_CHANGED", "").split()]

settings.register_profile(
    "hodiff",
    deadline=None,
    derandomize=True,
    max_examples=25,
    database=None,
    # The first examples import many modules, which does not mean that the strategy is slow.
    suppress_health_check=[HealthCheck.too_slow],
)
# `make test-explore` tries many examples, which differ from seed to seed.
settings.register_profile(
    "explore", settings.get_profile("hodiff"), derandomize=False, max_examples=300, print_blob=True
)
settings.load_profile(os.environ.get("HODIFF_HYPOTHESIS_PROFILE", "hodiff"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark as slow all but every k-th case of each quick test marked `one_in(k)`; order what `-m` then selects."""
    quick = [item for item in items if not item.get_closest_marker("slow")]
    cases: dict[tuple[Path, str], int] = {}
    left_out = set()
    for item in quick:
        if marker := item.get_closest_marker("one_in"):
            test = item.path, getattr(item, "originalname", item.name)
            cases[test] = cases.get(test, -1) + 1
            if cases[test] % marker.args[0]:
                item.add_marker(pytest.mark.slow)
                left_out.add(item)
    yield
    if TESTS_END and items:
        items[:] = _most_telling_first(items, left_out)


def _most_telling_first(items: list[pytest.Item], left_out: set[pytest.Item]) -> list[pytest.Item]:
    """Order tests of which only a part runs in time.

    Folders that changed come first, and in them the cases that quick tests leave out, which are cheap. Within such a
    group, each run begins with a different file.
    """
    first = random.Random(TESTS_END).choice(items).path
    start = next(place for place, item in enumerate(items) if item.path == first)
    rooms = {parts[1] for parts in CHANGED if len(parts) > 2 and parts[0] in ("hodiff", "tests")}
    groups: tuple[list[pytest.Item], ...] = ([], [], [], [])
    for item in items[start:] + items[:start]:
        groups[2 * rooms.isdisjoint(item.path.parts) + (item not in left_out)].append(item)
    # xdist's worksteal gives each worker a run of consecutive tests: a share of each group, in this order.
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return [
        item
        for worker in range(count)
        for group in groups
        for item in group[len(group) * worker // count : len(group) * (worker + 1) // count]
    ]


def pytest_runtest_setup() -> None:
    """Skip tests that cannot begin before `.ci/run` must end; the summary counts them."""
    if TESTS_END and time.time() > TESTS_END:
        pytest.skip("not begun: HODIFF_TESTS_END, which .ci/run sets for slow machines, has passed")


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """Undo what torch_geometric replaces in torch as it is imported: its `index_select` refuses scalars."""
    before = {name: getattr(torch, name) for name in ("index_select", "manual_seed", "select")}
    yield
    for name, function in before.items():
        setattr(torch, name, function)


def pytest_collection_finish() -> None:
    """Exempt imported modules and collected tests from later garbage collections, which tests often request."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()
    gc.enable()  # collection may have failed before


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the slowest files in addition to pytest's slowest tests: many short tests add up to minutes."""
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
    # `torch.manual_seed` records a traceback for each missing accelerator, which takes a millisecond per test.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def _global_state_is_left_alone() -> Iterator[None]:
    """Fail if a test changes a global mode of torch, which would affect every later test."""
    before = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype())
    yield
    after = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype())
    assert after == before


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
