"""The layers of a model that own given parameters, and the blocks of their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hodiff.errors import InputError
from hodiff.operators.kfac.blocks import Layout, Piece
from hodiff.operators.kfac.kfac_options import DIAGONAL, JOINED
from hodiff.operators.kfac.sources import KINDS, MIXING, WITHOUT_OPTIONS, Kind, known_type

WEIGHT, BIAS = "weight", "bias"
REMEDY = "remove them from x, or use GaussNewtonOperator, which needs no layers"


@dataclass(frozen=True)
class Source:
    """A block of one layer: the positions of its numbers, and the kind of the layer.

    Attributes:
        layer: The layer's name in the model.
        type: A class of `KINDS`: the layer's class or a base class of it.
        parts: The parameters in the block: "weight", "bias" or both.
        layout: The positions of the block's numbers in the leaves.
        diagonal: Whether the factor of gradients is diagonal.
    """

    layer: str
    type: type[nn.Module]
    parts: tuple[str, ...]
    layout: Layout
    diagonal: bool = False

    @property
    def kind(self) -> Kind:
        """The entry of `KINDS` for the layer."""
        return KINDS[self.type]

    @property
    def one_hot(self) -> bool:
        """Whether inputs are indices of rows of the weight."""
        return self.kind.one_hot and WEIGHT in self.parts

    @property
    def per_example(self) -> bool:
        """Whether gradients are summed over the places of an example."""
        return self.kind.inputs is None

    def inputs(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """Return vectors a, (N, places, groups, q), or row indices (N, places); None if all inputs are 1."""
        if WEIGHT not in self.parts or self.kind.inputs is None:
            return None
        a = self.kind.inputs(module, x)
        return torch.cat([a, a.new_ones(*a.shape[:-1], 1)], -1) if BIAS in self.parts else a

    def gradients(self, module: nn.Module, x: Tensor, g: Tensor) -> Tensor:
        """Return vectors g, (c, N, places, groups, p), from gradients of the output."""
        if not self.per_example:
            return self.kind.weight(module, x, g)
        functions = {WEIGHT: self.kind.weight, BIAS: self.kind.bias}
        return torch.cat([functions[part](module, x, g) for part in self.parts], -1)


def sources_of(caller: str, model: nn.Module, names: Sequence[str], bias: str, norm: str) -> dict[str, list[Source]]:
    """Return the blocks of parameters, by layer; raise for layers that are not supported."""
    require_apart(caller, model)
    owners = _owners(caller, model, names)
    found: dict[str, list[Source]] = {}
    for layer, held in owners.items():
        module = model.get_submodule(layer)
        known = known_type(module)
        assert known is not None
        joined = bias == JOINED and len(held) == 2
        found[layer] = [
            source_of(layer, module, known, parts, norm)
            for parts in ([held] if joined else [{part: index} for part, index in held.items()])
        ]
    return found


def source_of(layer: str, module: nn.Module, known: type[nn.Module], held: dict[str, int], norm: str) -> Source:
    """Return the block of a layer's parameters; `held` has their leaf indices, weight first."""
    kind = KINDS[known]
    groups, p, q = kind.sizes(module)
    weight = (groups, q, p) if kind.inputs_first else (groups, p, q)
    pieces = tuple(
        Piece(index, weight, kind.inputs_first) if part == WEIGHT else Piece(index, (groups, p, 1))
        for part, index in held.items()
    )
    layout = Layout(pieces, dim=-1 if kind.inputs is not None else -2)
    return Source(layer, known, tuple(held), layout, kind.inputs is None and norm == DIAGONAL)


def layer_blocks(model: nn.Module, names: Sequence[str]) -> dict[str, list[Source]]:
    """Return a block for each parameter of a supported layer, by layer; other parameters have none."""
    tied, owners, modules = _tied(model), dict[str, dict[str, int]](), dict(model.named_modules())
    for index, name in enumerate(names):
        layer, part, module = _layer_of(modules, name)
        if module is not None and name not in tied and not KINDS[_kind(module)].refused(module):
            owners.setdefault(layer, {})[part] = index
    return {
        layer: [
            source_of(layer, (module := model.get_submodule(layer)), _kind(module), {part: index}, DIAGONAL)
            for part, index in held.items()
        ]
        for layer, held in owners.items()
    }


def _owners(caller: str, model: nn.Module, names: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return leaf indices of the point by layer and by "weight" or "bias", weight first."""
    tied, modules = _tied(model), dict(model.named_modules())
    owners: dict[str, dict[str, int]] = {}
    for index, name in enumerate(names):
        layer, part, module = _layer_of(modules, name)
        if module is None:
            known = ", ".join(each.__name__ for each in KINDS)
            other = f" of {type(modules[layer]).__name__}" if layer in modules else ""
            raise InputError(
                f"{caller}: x: expected weights and biases of supported layers, {known}, got {name!r}{other}; {REMEDY}."
            )
        if name in tied:
            raise InputError(
                f"{caller}: x: expected each parameter in one layer, got one that is both {' and '.join(tied[name])}; "
                f"{REMEDY}."
            )
        if refused := KINDS[_kind(module)].refused(module):
            raise InputError(
                f"{caller}: x: expected an embedding without an option that changes its gradient, got {name!r} with "
                f"{refused}; {WITHOUT_OPTIONS}, or remove it from x."
            )
        owners.setdefault(layer, {})[part] = index
    return {layer: dict(sorted(held.items(), reverse=True)) for layer, held in owners.items()}


def _tied(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter that has several."""
    everywhere: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        everywhere.setdefault(id(parameter), []).append(name)
    return {name: held for held in everywhere.values() if len(held) > 1 for name in held}


def _layer_of(modules: Mapping[str, nn.Module], name: str) -> tuple[str, str, nn.Module | None]:
    """Return a parameter's layer and part, and the module if it is a supported layer."""
    layer, _, part = name.rpartition(".")
    module = modules.get(layer)
    known = module is not None and known_type(module) is not None
    return layer, part, module if known and part in (WEIGHT, BIAS) and getattr(module, part, None) is not None else None


def _kind(module: nn.Module) -> type[nn.Module]:
    known = known_type(module)
    assert known is not None
    return known


def require_apart(caller: str, model: nn.Module) -> None:
    """Raise if batch norm uses the statistics of a batch, which couple examples."""
    for name, module in model.named_modules():
        if isinstance(module, MIXING) and (module.training or not module.track_running_stats):
            raise InputError(
                f"{caller}: model: expected independent examples, got {name or 'a model'!r}, "
                f"{type(module).__name__}, with statistics of the batch; call model.eval(), with "
                "track_running_stats=True."
            )
