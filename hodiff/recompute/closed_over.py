"""The tensors that a callable reads without being given them, and other tensors put in their place.

A Function differentiates nothing but its operands; what a callable closes over becomes an operand by being found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hodiff.common.module_state import exchanged_buffers
from hodiff.common.randomness import is_generator
from hodiff.recompute.hidden_tensors import hidden_tensor
from hodiff.recompute.plain_values import PlainValues, changed_since, holds_tensors
from hodiff.recompute.reachable import places, reachable
from hodiff.torch_internals.autograd.forward_mode import has_tangent
from hodiff.torch_internals.autograd.transforms import in_transform, outside_transforms
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped
from hodiff.torch_internals.modules import RunningNorm, buffers_by_name
from hodiff.torch_internals.tensors import version_of

# The type of functions under `functools.cache` and `functools.lru_cache`.
LRU_CACHE = type(cache(len))


@dataclass(frozen=True)
class _Reference:
    """Stands for the tensor at a position."""

    index: int


@dataclass
class Slot:
    """A place that can be read and written, and what it held when it was found, with references for tensors."""

    get: Callable[[], Any]
    set: Callable[[Any], None]
    content: Any


class _Buffer:
    """A module's buffer as it was before the first run, kept if that run changes it."""

    def __init__(self, owner: MutableMapping[str, Any], name: str, silent: bool):
        self.owner, self.name, self.silent = owner, name, silent
        self.tensor: Tensor = owner[name]
        self.version = version_of(self.tensor)
        # A copy made inside a transform would end with it, before the last run.
        with outside_transforms() if in_transform() else nullcontext():
            self.before = self.tensor.clone()

    @property
    def changed(self) -> bool:
        return self.silent or self.owner.get(self.name) is not self.tensor or version_of(self.tensor) != self.version


class ClosedOver:
    """What a callable closes over.

    Args:
        name: Who asks, for errors.
        *roots: The callable, and whatever else it is given.

    Attributes:
        left: After the first run, how to get the tensors that it has left in places, from where they may be used.
        still_required: After a later run, whether one of them requires a gradient there.
        generators: Generators of random numbers among it, of torch, NumPy and Python.
    """

    def __init__(self, name: str, *roots: Any):
        self._name = name
        self.generators: list[Any] = []
        self._slots: list[Slot] = []
        self._buffers: list[_Buffer] = []
        self._values = PlainValues()
        self._tensors: list[Tensor] = []
        self._index: dict[int, int] = {}
        self._ran = False
        self.left: list[Callable[[], Any]] = []
        self.still_required = False
        # Containers in which modules keep what nobody else reads.
        self._inner: set[int] = set()
        self._walk(roots)

    def take(self) -> list[Tensor]:
        """Hand over the tensors, in the order in which `filled` wants them; they are not kept here."""
        tensors, self._tensors = self._tensors, []
        self._index = {}
        return tensors

    @contextmanager
    def filled(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Put tensors in the places of those that were found, for the time of one run.

        The first run is the one whose side effects stay: what it rebinds stays bound and buffers that it updates stay
        updated. Later runs start from the same buffers, numbers and switches, and leave no trace.

        Args:
            tensors: One for each that `take` gave.

        Yields:
            Nothing.
        """
        first, self._ran = not self._ran, True
        with nullcontext() if first else self._values.restored(self._name), self._exchanged(tensors, first=first):
            yield
        if first:
            self.left += self._values.left(self._inner)

    @contextmanager
    def _exchanged(self, tensors: Sequence[Tensor], *, first: bool) -> Iterator[None]:
        replaced = []
        try:
            for slot in self._slots:
                placed = filled_in(slot.content, tensors)
                try:
                    replaced.append((slot, slot.get(), placed))
                except (AttributeError, LookupError, ValueError):  # of objects, containers and cells
                    raise changed_since(self._name, "a tensor in it that is not in its place") from None
                slot.set(placed)
            if first:
                yield
            else:
                with exchanged_buffers([(each.owner, each.name, each.before.clone()) for each in self._buffers]):
                    yield
                    own = set(map(id, tensors))
                    self.still_required = any(_requires_gradient(get(), own) for get in self.left)
        finally:
            for slot, held, placed in reversed(replaced):
                if not first or (now := slot.get()) is placed:
                    slot.set(held)
                elif holds_tensors(now) and not self._is_inner(slot):
                    self.left.append(slot.get)
            if first:
                self._buffers = [buffer for buffer in self._buffers if buffer.changed]
                for buffer in self._buffers:
                    del buffer.tensor

    def _walk(self, roots: Sequence[Any]) -> None:
        for value in reachable(*roots):
            if is_generator(value):
                self.generators.append(value)
            if isinstance(value, LRU_CACHE):
                self._refuse_cached(value)
            self._values.keep(value)
            if isinstance(value, nn.Module) and type(value).__module__.startswith("torch."):
                held = vars(value)
                self._inner |= {id(held), *(id(each) for each in held.values() if isinstance(each, (dict, list)))}
            if isinstance(value, nn.Module) and getattr(value, "training", False):  # a frozen script has no modes
                self._keep_buffers(value)
            for get, set_, snapshot in places(value):
                held = get()
                if snapshot:
                    self._values.keep_array(held)
                content = referenced(held, self._tensors, self._index)
                # Cells are kept whatever they hold: a loop may have bound them anew by the time of the next run.
                if snapshot or content is not held:
                    self._slots.append(Slot(get, set_, content))

    def _refuse_cached(self, function: Any) -> None:
        """Refuse a memoized function of tensors: later runs would get the tensors of the first one from its cache."""
        held: list[Tensor] = []
        for value in reachable(function.__wrapped__):
            for get, _, _ in places(value):
                referenced(get(), held, {})
        for tensor in held:
            if not is_constant(tensor):
                raise hidden_tensor(self._name, tensor)

    def _is_inner(self, slot: Slot) -> bool:
        """Whether nobody but a module reads what is in a place, or hooks write it anew before each call."""
        container = getattr(getattr(slot.get, "func", None), "__self__", None)
        hooked = isinstance(container, dict) and bool(container.get("_forward_pre_hooks"))
        return hooked or id(container) in self._inner

    def _keep_buffers(self, module: nn.Module) -> None:
        # torch.batch_norm updates its running statistics without counting it as a change.
        silent = isinstance(module, RunningNorm)
        for name, tensor in (buffers := buffers_by_name(module)).items():
            if isinstance(tensor, Tensor) and is_constant(tensor) and not tensor.is_inference():
                self._buffers.append(_Buffer(buffers, name, silent))
                self._index[id(tensor)] = -1


def referenced(value: Any, tensors: list[Tensor], index: dict[int, int]) -> Any:
    """The value with references in place of tensors, which join the others; itself where it has none.

    Args:
        value: What a place holds.
        tensors: The tensors found so far.
        index: Their positions by identity; a negative one is of a tensor to leave in its place.

    Returns:
        What `filled_in` takes.
    """
    if isinstance(value, Tensor):
        position = index.setdefault(id(value), len(tensors))
        if position < 0:
            return value
        if position == len(tensors):
            tensors.append(value)
        return _Reference(position)
    if type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
        parts = [referenced(part, tensors, index) for part in value]
        if any(a is not b for a, b in zip(parts, value, strict=True)):
            return _like(value, parts)
    return value


def _requires_gradient(value: Any, own: Set[int]) -> bool:
    leaves = (each for each in pytree.tree_leaves(value) if isinstance(each, Tensor) and id(each) not in own)
    return any(each.requires_grad for each in leaves)


def is_constant(tensor: Tensor) -> bool:
    """Whether no derivative can run through a tensor: it is no part of a graph, a transform or a dual number."""
    return not (tensor.requires_grad or is_wrapped(tensor) or has_tangent(tensor))


def filled_in(content: Any, tensors: Sequence[Tensor]) -> Any:
    """The value with tensors in place of the references."""
    if isinstance(content, _Reference):
        return tensors[content.index]
    if isinstance(content, tuple):
        parts = [filled_in(part, tensors) for part in content]
        if any(a is not b for a, b in zip(parts, content, strict=True)):
            return _like(content, parts)
    return content


def _like(model: tuple[Any, ...], parts: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(parts) if type(model) is tuple else type(model)(*parts)
