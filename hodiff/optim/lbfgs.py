"""L-BFGS with a strong Wolfe line search."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hodiff.common.complex_numbers import as_real
from hodiff.optim.finite_numbers import require_finite, require_norms
from hodiff.optim.local_models import Closure, require_closure
from hodiff.optim.optimizer_states import Shapes
from hodiff.optim.ranks import Ranks
from hodiff.optim.settings import STRONG_WOLFE, require_settings, settings_in
from hodiff.optim.training_optimizer import Group, StochasticOptimizer
from hodiff.torch_internals.modules import join_parameters, unhooked_step


class LBFGS(StochasticOptimizer, torch.optim.LBFGS):
    r"""L-BFGS: quasi-Newton steps from the last gradients, with a line search for the strong Wolfe conditions.

    $$ \theta \leftarrow \theta - t H_k g, \qquad
       f(\theta + t d) \le f + c_1 t\, g^\top d, \quad |g(\theta + t d)^\top d| \le c_2 |g^\top d|, \quad
       c_1 = 10^{-4},\; c_2 = 0.9 $$

    The iterates and the interface are those of `torch.optim.LBFGS(line_search_fn="strong_wolfe")`. In addition,
    closures need not zero gradients or call backward, and invalid settings raise. Frozen parameters do not move: the
    history starts anew when parameters are frozen or unfrozen. All parameters are in one group.

    Args:
        params: Parameters, which may be complex.
        lr: First length t that the line search tries.
        max_iter: Maximum number of iterations in a step.
        max_eval: Maximum number of evaluations of the closure in a step; by default 5/4 of the iterations.
        tolerance_grad: Largest entry of the gradient at which a step ends.
        tolerance_change: Change of parameters and loss at which a step ends.
        history_size: Number of stored gradients.
        process_group: Process group of `torch.distributed` whose ranks train this model, such as
            `torch.distributed.group.WORLD`. Loss and gradient are means over the ranks. "local" if each rank
            has a model of its own.

    Raises:
        InputError: If a setting is out of its range, or this process is not in the group.

    Example:
        >>> import torch, hodiff
        >>> w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> optimizer = hodiff.optim.LBFGS([w])
        >>> loss = optimizer.step(lambda: w[0] ** 2 + 10 * (w[1] - w[0] - 1) ** 2)
        >>> torch.allclose(w, torch.tensor([0.0, 1.0]), atol=1e-4)
        True

    Source: J. Nocedal & S. J. Wright, *Numerical Optimization*, 2nd ed., algorithms 7.5 and 3.5; `torch.optim.LBFGS`.
    """

    complex_too = True
    whole_state = frozenset({"d", "t", "old_dirs", "old_stps", "ro", "H_diag", "prev_flat_grad", "prev_loss"})

    # A line search would compare the losses of different ranks.
    sharded_by_group = None

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        max_iter: int = 20,
        max_eval: int | None = None,
        tolerance_grad: float = 1e-7,
        tolerance_change: float = 1e-9,
        history_size: int = 100,
        *,
        process_group: Any = None,
    ):
        self._ranks = Ranks(self.caller, process_group)
        settings = settings_in(locals())
        # Some settings would raise torch's own messages instead.
        require_settings(self.caller, settings)
        self._require_no_module(params)
        torch.optim.LBFGS.__init__(self, params, **settings, line_search_fn=STRONG_WOLFE)

    def step(self, closure: Closure | None = None) -> Any:
        """Take one step of up to `max_iter` iterations.

        Args:
            closure: Function without arguments that computes the loss and returns it, with its graph. It may zero
                gradients and call backward, as for torch's optimizers, but need not.

        Returns:
            The loss before the step.

        Raises:
            InputError: If there is no closure, or it returns no loss; or if ranks drift apart.
        """
        require_closure(self.caller, closure)
        self.require_dtypes()
        assert closure is not None
        trained = self.parameters()
        if not trained:
            return self.evaluated_together(closure, by_loss=True)
        first = True

        def evaluate() -> Tensor:
            nonlocal first
            loss: Tensor = self.evaluated_together(closure, by_loss=True)
            if first:
                # A line search may try points where the loss is not finite, but must not begin there.
                gradients = [p.grad for p in self.parameters() if p.grad is not None]
                require_finite(self.caller, "losses", [loss])
                require_norms(self.caller, [(as_real(g), self.param_groups[0]["tolerance_grad"]) for g in gradients])
                first = False
            return loss

        with torch.no_grad(), self._restored_on_error(trained):
            return unhooked_step(torch.optim.LBFGS)(self, evaluate)

    @contextmanager
    def _restored_on_error(self, trained: list[Tensor]) -> Iterator[None]:
        """Step with these parameters; restore parameters and state if a closure raises at a trial point."""
        parameters = [(p, p.detach().clone()) for p in trained]
        # torch modifies the lists and this tensor in place, and replaces all other values.
        state = {
            p: {
                name: list(each) if isinstance(each, list) else each.clone() if name == "prev_flat_grad" else each
                for name, each in known.items()
            }
            for p, known in self.state.items()
        }
        joined = join_parameters(self, trained)
        if list(map(id, joined)) != list(map(id, trained)):
            # Parameters were frozen, or no longer are: the history is that of another vector.
            self.state.clear()
        try:
            yield
        except BaseException:
            join_parameters(self, joined)
            for parameter, before in parameters:
                parameter.copy_(before)
            self.state.clear()
            self.state.update(state)
            raise

    def dtype_of_state(self, parameter: Tensor) -> torch.dtype:
        """See `StochasticOptimizer`; the state is one vector of all parameters that are not frozen."""
        parameters = self.parameters() or self.all_parameters()
        return functools.reduce(torch.promote_types, (p.dtype for p in parameters))

    def shapes_of_state(self, parameter: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> Shapes:
        """See `StochasticOptimizer`; the state is of one vector of all parameters that are not frozen."""
        size = sum(as_real(p).numel() for p in group["params"] if p.requires_grad)
        # As many pairs of steps and changes of the gradient are stored as reciprocals of their products.
        count = len(state["ro"]) if isinstance(state.get("ro"), list) else 0
        vectors = dict.fromkeys(("old_dirs", "old_stps"), [(size,)] * count)
        numbers = dict.fromkeys(("t", "H_diag", "prev_loss"), ())
        return {"d": (size,), "prev_flat_grad": (size,), "ro": [()] * count, **vectors, **numbers}

    def __setstate__(self, state: Group) -> None:
        super().__setstate__(state)
        join_parameters(self, self.parameters())
        # A state of torch's optimizer may have no line search.
        for group in self.param_groups:
            group["line_search_fn"] = STRONG_WOLFE
        # Scratch space of torch's step, whose length is that of the history.
        for each in self.state.values():
            each.pop("al", None)

    def __getstate__(self) -> Group:
        # torch omits attributes that its step needs. Callables, as a scheduler's wrapper of the step, are left out.
        own = {name: value for name, value in vars(self).items() if "hook" not in name and not callable(value)}
        for name in ("_spent", "_replicas", "_exchanges"):  # references to gradients, and notes for other ranks
            own.pop(name, None)
        return {**own, **super().__getstate__()}
