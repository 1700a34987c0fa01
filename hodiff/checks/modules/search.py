"""Search for the smallest submodules at fault in a module whose routes disagree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from hodiff.checks.report.data import Entry
from hodiff.checks.subjects.module_calls import ModuleCall
from hodiff.checks.subjects.subject import Subject


@dataclass(frozen=True)
class Guilty:
    """Call whose routes disagree, though the routes of all calls inside it agree.

    Attributes:
        call: The call.
        failed: Its comparisons that failed.
        alike: Names of other modules of the same class, options and shapes.
        loss: The loss, if that is at fault and the module is not.
    """

    call: ModuleCall
    failed: tuple[Entry, ...]
    alike: tuple[str, ...] = ()
    loss: Callable[[Any], Tensor] | None = None


class Search:
    """Search that checks calls alone; each call is checked once."""

    def __init__(self, failures: Callable[[Subject], tuple[Entry, ...]], subject_for: Callable[[ModuleCall], Subject]):
        self._failures = failures
        self._subject_for = subject_for
        self._known: dict[ModuleCall, tuple[Entry, ...]] = {}

    def run(
        self, root: ModuleCall, failed: tuple[Entry, ...], loss: Callable[[Any], Tensor] | None
    ) -> Iterator[Guilty]:
        """Yield the smallest calls at fault: first from the outside inwards, then beside that path."""
        first, path = self._descend(root, root, failed)
        if first.call is root and loss is not None:
            if not self.failures(root):
                yield Guilty(root, failed, loss=loss)
                return
            first = replace(first, failed=self.failures(root))
        yield first
        yield from self._beside(root, path, {first.call.signature})

    def _beside(self, root: ModuleCall, path: Sequence[ModuleCall], seen: set[tuple[str, ...]]) -> Iterator[Guilty]:
        """Find further faulty calls beside the path to the first one; skip calls that agree as a whole."""
        for call in path:
            for child in _unlike(call.children):
                if child in path or child.signature in seen:
                    continue
                seen.add(child.signature)
                if self.failures(child):
                    guilty, inner = self._descend(root, child, self.failures(child))
                    if guilty.call is child or guilty.call.signature not in seen:
                        seen.add(guilty.call.signature)
                        yield guilty
                    yield from self._beside(root, inner, seen)

    def failures(self, call: ModuleCall) -> tuple[Entry, ...]:
        """Return the failed comparisons of a call checked alone."""
        if call not in self._known:
            self._known[call] = self._failures(self._subject_for(call))
        return self._known[call]

    def _descend(
        self, root: ModuleCall, call: ModuleCall, failed: tuple[Entry, ...]
    ) -> tuple[Guilty, tuple[ModuleCall, ...]]:
        """Return the smallest call at fault inside a call at fault, and the path to it."""
        path = [call]
        # A solver calls its field a hundred times, so check one of several equal calls.
        while guilty := next((child for child in _unlike(call.children) if self.failures(child)), None):
            call, failed = guilty, self.failures(guilty)
            path.append(call)
        return self._with_alike(root, call, failed), tuple(path)

    @staticmethod
    def _with_alike(root: ModuleCall, call: ModuleCall, failed: tuple[Entry, ...]) -> Guilty:
        names = [each.name for each in root.post_order() if each.signature == call.signature]
        return Guilty(call, failed, tuple(dict.fromkeys(name for name in names if name != call.name)))


def _unlike(calls: Sequence[ModuleCall]) -> list[ModuleCall]:
    """Return the first call for each combination of module and signature."""
    firsts: dict[tuple[str, ...], ModuleCall] = {}
    for call in calls:
        firsts.setdefault((call.name, *call.signature), call)
    return list(firsts.values())
