"""Base class of K-FAC and EK-FAC: running averages of factors, and a step of all layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_choice
from hodiff.distributed.layouts import local_part
from hodiff.graphs import inspect_graph
from hodiff.operators.kfac import moments
from hodiff.operators.kfac.blocks import Layout
from hodiff.operators.kfac.kfac_options import EMPIRICAL, EXACT, EXPAND, MONTE_CARLO, REDUCE
from hodiff.operators.kfac.layers import Source
from hodiff.optim.curvature_optimizer import CurvatureOptimizer
from hodiff.optim.kfac.fisher_columns import columns_of, find_any
from hodiff.optim.kfac.layer_calls import LayerObserver, wait_for_layers
from hodiff.optim.kfac.seen_layers import SeenLayers, Sums
from hodiff.optim.kfac.shared_factors import owners_of, sums_of_ranks
from hodiff.optim.kfac.stored_blocks import (
    forget_replaced,
    indices_in,
    layout_in,
    read,
    require_blocks,
    written,
)
from hodiff.optim.local_models import Closure
from hodiff.optim.optimizer_states import precise
from hodiff.optim.owned_steps import OwnedSteps
from hodiff.optim.pending_curvature import Estimates
from hodiff.optim.settings import is_due
from hodiff.optim.training_optimizer import Group
from hodiff.recompute.checkpoint import stored_instead

FISHERS = (MONTE_CARLO, EXACT, EMPIRICAL)

State = dict[str, Any]


class KroneckerFactoredOptimizer(CurvatureOptimizer, LayerObserver):
    """Optimizer whose curvature is a Kronecker-factored block for each layer.

    The state of a block is stored with its first parameter, the weight if there is one.
    """

    second_order = False
    precise_state = True
    # Whether `_adjust` needs the vectors from which the factors are computed.
    keeps_vectors = False

    def __init__(
        self,
        params: Any,
        defaults: Group,
        fisher: str,
        sharing: str,
        generator: torch.Generator | None,
        process_group: Any,
    ):
        require_choice(self.caller, "fisher", fisher, FISHERS)
        require_choice(self.caller, "sharing", sharing, (EXPAND, REDUCE))
        self._fisher, self._sharing = fisher, sharing
        self._listened: set[int] = set()
        # Whether `update_curvature` evaluates a closure.
        self._evaluates = False
        # Uses of each parameter in the graph when they were last checked.
        self._uses: dict[int, Any] = {}
        # Owners of the blocks of sharded parameters, once they are known.
        self._owned: OwnedSteps | None = None
        super().__init__(params, defaults, generator, process_group)

    @abstractmethod
    def _decomposed(self, state: State, group: Group, layout: Layout) -> dict[str, Tensor | None]:
        """Compute from the averaged factors what the step needs, with the names of `_zeros_for`."""

    @abstractmethod
    def _zeros_for(self, state: State, layout: Layout) -> dict[str, Tensor | None]:
        """Return zeros in the shapes of what `_decomposed` returns."""

    @abstractmethod
    def _solve(self, state: State, group: Group, gradient: Tensor) -> Tensor:
        """Multiply the damped inverse of a block with a gradient (1, groups, p, q)."""

    def awaits_layers_of(self, parameters: Sequence[Tensor]) -> bool:
        """See `LayerObserver`."""
        # A closure on shards calls layers with gathered tensors.
        if self._evaluates or self._closure_on_shards is not None:
            return True
        return any(p.requires_grad and id(p) in self._listened for p in parameters)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_fisher": self._fisher, "_sharing": self._sharing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # `load_state_dict` calls this method, too; during a copy there are no groups yet.
        if "param_groups" in vars(self):
            require_blocks(self.caller, state)
        self._uses, self._owned, self._evaluates = {}, None, False
        super().__setstate__(state)

    def _wait(self) -> None:
        super()._wait()
        by_hand = any(group["update_every"] is None for group in self.param_groups)
        # Frozen parameters, too: they may be unfrozen before the next step.
        listened = [(p, g) for g in self.param_groups for p in g["params"] if self._awaited or by_hand]
        self._listened = {id(p) for p, g in listened if g["update_every"] is None or self._is_due(p, g)}
        wait_for_layers(self, bool(self._listened))

    def _on_shards(self, closure: Closure, due: Sequence[Tensor], *, gradients: bool) -> tuple[Tensor, dict[int, Any]]:
        wait_for_layers(self, True)
        try:
            with stored_instead():  # a checkpoint would hide the graph of its layers
                return super()._on_shards(closure, due, gradients=gradients)
        finally:
            wait_for_layers(self, bool(self._listened))

    def _returned(self, closure: Closure) -> Any:
        self._evaluates = True
        wait_for_layers(self, True)
        try:
            return super()._returned(closure)
        finally:
            self._evaluates = False
            wait_for_layers(self, bool(self._listened))

    def _estimate(self, loss: Tensor, parameters: Sequence[Tensor], last: bool) -> tuple[Estimates, Estimates]:
        found = find_any(self.caller, loss)
        numbered = self.all_parameters()
        with torch.no_grad():
            trained = [p for p in numbered if p.requires_grad]
            leaf_of = dict(zip(map(id, trained), self._leaves_of(trained), strict=True))
            seen = SeenLayers(self.caller, loss, found, numbered, [leaf_of.get(id(p), p) for p in numbered])
            leaves = set(map(id, inspect_graph(loss).leaves))
            seen.require_all([p for p in parameters if id(leaf_of[id(p)]) in leaves])
            uses = seen.uses(loss)
            # The check costs two gradients; a graph with unchanged uses does not need it again.
            if any(self._uses.get(id(p)) != uses.get(id(p)) for p in parameters):
                seen.require_all_uses(self._fisher, torch.Generator().manual_seed(0), self._by_example)
                self._uses |= uses
            columns = columns_of(found, loss, self._fisher, self._draws())
            estimates: list[tuple[Tensor, Any]] = []
            for sums in seen.sums(columns, self._fisher, self._sharing, self.keeps_vectors):
                first, *others = (numbered[piece.index] for piece in sums.source.layout.pieces)
                # The curvature of the block's other parameters is stored with the first.
                estimates += [(first, sums), *((p, 0.0) for p in others)]
        return estimates, []

    def _written_by(self, leaves: Sequence[Tensor], estimates: Estimates) -> Estimates:
        # The factors of a block belong to all its parameters together.
        written, whole, numbered = set(map(id, leaves)), set(), self.all_parameters()
        for sums in (each for _, each in estimates if isinstance(each, Sums)):
            block = {id(numbered[piece.index]) for piece in sums.source.layout.pieces}
            whole |= block if block <= written else set()
        return [(p, h) for p, h in estimates if id(p) in whole]

    def _by_example(self, source: Source) -> bool:
        """Whether the block needs to know which places belong to the same example."""
        return self.keeps_vectors or source.per_example or self._sharing == REDUCE

    def _draws(self) -> torch.Generator:
        return self._own_draws() if self._fisher == MONTE_CARLO else self._generator

    def _numbers_of(self, estimate: Sums | float) -> list[Tensor]:
        parts = [estimate.inputs, estimate.gradients] if isinstance(estimate, Sums) else []
        return [each for each in parts if each is not None]

    def _absorb(self, parameter: Tensor, group: Group, curvature: Sums | float) -> None:
        if not isinstance(curvature, Sums):
            return
        state, source, B = self.state[parameter], curvature.source, curvature.gradients
        A = moments.mean_of_inputs(source, curvature.inputs, curvature.count, B)
        count = state.get("refreshes", 0) + 1
        # The first averages are plain means, until the running average has more terms.
        weight = max(1 / count, 1 - group["factor_decay"])
        pieces = [piece.index for piece in source.layout.pieces]
        if "A" in state and state["A"].shape == A.shape and indices_in(state) == pieces:
            state["A"].lerp_(A, weight)
            state["B"].lerp_(B, weight)
        else:
            state["A"], state["B"], state["refreshes"] = A, B, 0
            state["layout"] = written(source.layout)
            # Results of former factors have other shapes.
            for name in self._zeros_for(state, source.layout):
                state.pop(name, None)

    def _take(self, estimates: dict[int, Any]) -> None:
        steps = self._owned_steps() if self.sharded else None
        by_id = {id(p): p for p in self.all_parameters()}
        away = {key for key, h in estimates.items() if isinstance(h, Sums) and steps and not steps.owns(by_id[key])}
        super()._take({key: 0.0 if key in away else h for key, h in estimates.items()})
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        found = [
            (self.state[p], groups[id(p)], estimates[id(p)])
            for p in self.all_parameters()
            if isinstance(estimates.get(id(p)), Sums)
        ]
        weights, due = [], []
        for block in found:
            state, group, sums = block
            if "A" not in state:
                # Another rank has the factors.
                state["block"] = written(sums.source.layout)
                weights.append(0.0)
                continue
            state.pop("block", None)
            missing = any(name not in state for name in self._zeros_for(state, sums.source.layout))
            weights.append(1.0 if missing else max(1 / state["refreshes"], 1 - group["factor_decay"]))
            if missing or is_due(state["refreshes"], group["refresh_every"]):
                due.append(block)
        forget_replaced(
            [self.state.get(p, {}) for p in self.all_parameters()], [state for state, _, _ in found], self.whole_state
        )
        self._decompose(due)
        self._adjust([(state, sums) for state, _, sums in found], weights)

    def _decompose(self, due: Sequence[tuple[State, Group, Sums]]) -> None:
        """Store what the step needs of blocks; each rank computes a share of the blocks for all ranks."""
        if self._ranks.size == 1 or self.sharded:
            found: list[dict[str, Tensor | None]] = []
            self.agree(lambda: found.extend(self._decomposed(state, g, s.source.layout) for state, g, s in due))
            for (state, _, _), result in zip(due, found, strict=True):
                state.update(result)
            return
        if not due:
            return
        owners = owners_of([state for state, _, _ in due], self._ranks.size)
        own, error = self._ranks.attempt(
            lambda: {
                i: self._decomposed(state, group, sums.source.layout)
                for i, (state, group, sums) in enumerate(due)
                if owners[i] == self._ranks.rank
            }
        )
        self._ranks.exchange(self.caller, error, [], due[0][0]["B"].device)
        results = [
            (own or {}).get(i) or self._zeros_for(state, sums.source.layout) for i, (state, _, sums) in enumerate(due)
        ]
        # Products round differently with other strides, and ranks would drift apart: LAPACK returns columns.
        shared = [{k: None if t is None else t.contiguous() for k, t in result.items()} for result in results]
        # A sum with the zeros of all other ranks sends every block in one operation.
        self._ranks.sum_([each for result in shared for each in result.values() if each is not None])
        for (state, _, _), result in zip(due, shared, strict=True):
            state.update(result)

    def _adjust(self, blocks: Sequence[tuple[State, Sums]], weights: Sequence[float]) -> None:
        """Update states by the vectors of their blocks, with their weights in running averages."""

    def _summed(self, estimates: dict[int, Any]) -> dict[int, Any]:
        blocks = {id(p): estimates[id(p)] for p in self.all_parameters() if isinstance(estimates.get(id(p)), Sums)}
        found = sums_of_ranks(list(blocks.values()), self._ranks, joint=self.sharded)
        return {**estimates, **dict(zip(blocks, found, strict=True))}

    def _descend(self) -> None:
        found = [(p, g, group) for group in self.param_groups for p, g in self.gradients(group)]
        for parameter, _, _ in found:
            self._require_curvature(parameter)
        given = {id(p): precise(g) for p, g, _ in found}
        directions = self._directions_of_shards(given) if self.sharded else self._directions(given)
        for group in self.param_groups:
            own = [(p, g, directions[id(p)]) for p, g, its in found if its is group]
            shorter = self._clipped(group, own)
            for parameter, _, direction in own:
                self._move(parameter, group, direction * shorter)

    def _directions(self, gradients: dict[int, Tensor]) -> dict[int, Tensor]:
        """Multiply the inverse of each block with its gradients; a missing gradient counts as zero."""
        directions = {}
        for group, state, layout, own in self._blocks(gradients):
            if "A" not in state:
                continue
            # The dict is indexed by leaf number, like a list.
            leaves: Any = {
                piece.index: gradients[id(p)] if id(p) in gradients else precise(p.new_zeros(p.shape))
                for piece, p in zip(layout.pieces, own, strict=True)
            }
            solved: Any = dict.fromkeys(leaves)
            layout.scatter(self._solve(state, group, layout.gather(leaves, 1)), solved)
            for piece, p in zip(layout.pieces, own, strict=True):
                directions[id(p)] = solved[piece.index].reshape(p.shape)
        return directions

    def _blocks(self, gradients: Mapping[int, Tensor]) -> Iterator[tuple[Group, State, Layout, list[Tensor]]]:
        """Iterate over the blocks with gradients: their group, state, layout and parameters."""
        numbered = self.all_parameters()
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state.get(parameter, {})
                numbers = layout_in(state)
                if numbers is None:
                    continue
                layout = read(numbers)
                own = [numbered[piece.index] for piece in layout.pieces]
                if any(id(p) in gradients for p in own):
                    yield group, state, layout, own

    def _directions_of_shards(self, gradients: dict[int, Tensor]) -> dict[int, Tensor]:
        """Multiply whole gradients by the inverses on the ranks that have them, and shard the results."""
        steps = self._owned_steps()
        parts = [(p, own[0]) for _, _, _, own in self._blocks(gradients) for p in own if id(p) in gradients]
        wholes = {id(p): steps.gathered(p, gradients[id(p)], first) for p, first in parts}
        present = {key: whole for key, whole in wholes.items() if whole is not None}
        found: dict[int, Tensor] = {}
        self.agree(lambda: found.update(self._directions(present)))
        return {id(p): steps.scattered(p, found.get(id(p)), precise(p).dtype) for p, _ in parts}

    def _owned_steps(self) -> OwnedSteps:
        numbered = self.all_parameters()
        if self._owned is None or not self._owned.covers(numbered):
            states = [self.state.get(p, {}) for p in numbered]
            held, elsewhere = ([name in state for state in states] for name in ("A", "block"))
            # A block belongs to its first parameter, the weight: inverses of (p, p) and (q, q).
            costs = [float(len(p)) ** 3 + (p.numel() / len(p)) ** 3 if p.dim() > 1 else 0.0 for p in numbered]
            self._owned = OwnedSteps(self.caller, numbered, costs, held, elsewhere)
        return self._owned

    def _clipped(self, group: Group, steps: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor | float:
        """Return the factor that keeps the step's squared length in the metric of the curvature below `kl_clip`."""
        if group["kl_clip"] is None or not steps:
            return 1.0
        like = local_part(steps[0][2])
        products = [torch.sum(precise(local_part(g)) * local_part(d)).to(like) for _, g, d in steps]
        if self.sharded:
            products = [like.new_tensor(self.total([p for p, _, _ in steps], list(map(float, products))))]
        squared = torch.stack(products).sum() * group["lr"] ** 2
        return (group["kl_clip"] / squared.clamp_min(torch.finfo(squared.dtype).tiny)).sqrt().clamp(max=1)

    def _move(self, parameter: Tensor, group: Group, direction: Tensor) -> None:
        state, step = self.state[parameter], direction * group["lr"]
        if group["momentum"]:
            # The buffer holds steps, not directions: otherwise a schedule that raises lr would exceed the clipping.
            if "momentum_buffer" in state:
                # Earlier versions stored directions.
                state["last_step"] = state.pop("momentum_buffer") * group["lr"]
            if "last_step" not in state:
                state["last_step"] = torch.zeros_like(step)
            step = state["last_step"].mul_(group["momentum"]).add_(step)
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(step.to(parameter.dtype))
