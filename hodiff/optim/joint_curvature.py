"""Base class of optimizers that combine estimates of the curvature from several ranks, and their random numbers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_generator
from hodiff.errors import InputError
from hodiff.optim.ranks import Ranks, code_of, differ
from hodiff.optim.training_optimizer import StochasticOptimizer


class JointCurvature(StochasticOptimizer):
    """Optimizer that estimates the curvature of the mean loss of all ranks."""

    # State of the generator before the draws for the next step, if there are several ranks.
    _state_before: Tensor | None = None

    def _set_ranks(self, generator: torch.Generator | None, process_group: Any) -> None:
        require_generator(self.caller, "generator", generator)
        self._generator = torch.Generator().manual_seed(0) if generator is None else generator
        self._ranks = Ranks(self.caller, process_group)

    @abstractmethod
    def _summed(self, estimates: dict[int, Any]) -> dict[int, Any]:
        """Combine the estimates of all ranks, by the parameter's id, to those of the mean loss."""

    def _codes(self, estimates: dict[int, Any]) -> list[float]:
        """Return codes of the parameters with estimates, and of the state of the generator."""
        numbers = [i for i, p in enumerate(self.parameters()) if id(p) in estimates]
        return [len(numbers), code_of(numbers), code_of(self._generator.get_state().tolist())]

    def _combined(self, estimates: dict[int, Any], codes: Tensor) -> dict[int, Any]:
        """Combine the estimates of all ranks, whose `_codes` are given."""
        if not bool(codes[:, 0].any()):
            return {}
        if differ(codes[:, 2:]):
            raise InputError(
                f"{self.caller}: generator: expected generators in the same state on all ranks, got different ones; "
                "seed them equally, and call backward equally often on all ranks."
            )
        if differ(codes[:, :2]):
            raise InputError(
                f"{self.caller}: step: expected curvature of the same parameters from all ranks, got different "
                "parameters; use every parameter in the loss of every rank, for instance times zero."
            )
        return self._summed(estimates)

    def _begin_draws(self) -> None:
        """Note the state of the generator before the first draws for a step."""
        if self._ranks.size > 1 and self._state_before is None:
            self._state_before = self._generator.get_state()

    @contextmanager
    def _draws_repeated_after_errors(self) -> Iterator[None]:
        """Rewind the generator after an error, which not all ranks may have met before they drew."""
        try:
            yield
        except Exception:
            self._rewind()
            raise

    def _rewind(self) -> None:
        """Restore the state of the generator before the draws for a step that is not taken."""
        if self._state_before is not None:
            self._generator.set_state(self._state_before)
            self._state_before = None

    def _own_draws(self) -> torch.Generator:
        """Return a generator for random numbers that have to be independent on the ranks."""
        if self._ranks.size == 1:
            return self._generator
        device = self._generator.device
        seed = int(torch.randint(2**62, (), generator=self._generator, device=device))
        return torch.Generator(device).manual_seed(seed + self._ranks.rank)
