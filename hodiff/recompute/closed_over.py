"""Discovery of the tensors that a callable closes over, and their replacement during a run.

A Function differentiates only its operands, so closed-over tensors must be found to become operands.
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
from hodiff.recompute.plain_values import PlainValues, changed_since, holds_tensors
from hodiff.recompute.reachable import hidden_tensor, places, reachable
from hodiff.torch_internals.autograd.grad_mode import has_tangent
from hodiff.torch_internals.autograd.transforms import in_transform, outside_transforms
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped
from hodiff.torch_internals.modules import RunningNorm, buffers_by_name, has_forward_pre_hooks
from hodiff.torch_internals.tensors import version_of

# The type of functions decorated by `functools.cache` or `functools.lru_cache`.
LRU_CACHE = type(cache(len))


@dataclass(frozen=True)
class _Reference:
    """A placeholder for the tensor at a position."""

    index: int


@dataclass
class Slot:
    """A place that can be read and written, and its content when it was found, with references for tensors."""

    get: Callable[[], Any]
    set: Callable[[Any], None]
    content: Any


class _Buffer:
    """A module's buffer as it was before the first run, kept if the first run changes it."""

    def __init__(self, owner: MutableMapping[str, Any], name: str, silent: bool):
        self.owner, self.name, self.silent = owner, name, silent
        self.tensor: Tensor = owner[name]
        self.version = version_of(self.tensor)
        # A copy made inside a transform would end with the transform, before the last run.
        with outside_transforms() if in_transform() else nullcontext():
            self.before = self.tensor.clone()

    @property
    def changed(self) -> bool:
        return self.silent or self.owner.get(self.name) is not self.tensor or version_of(self.tensor) != self.version


class ClosedOver:
    """The tensors, values and generators that a callable closes over.

    Args:
        name: The calling function, for errors.
        *roots: The callable and its arguments that are not tensors.

    Attributes:
        left: After the first run, functions that read the tensors which it left in places that other code may read.
        still_required: After a later run, whether such a tensor requires a gradient.
        generators: Closed-over random generators of torch, NumPy and Python.
    """

    def __init__(self, name: str, *roots: Any):
        self._name = name
        self.generators: list[Any] = []
        self._slots: list[Slot] = []
        self._buffers: list[_Buffer] = []
        self._values = PlainValues()
        self._tensors: list[Tensor] = []
        self._index: dict[int, int] = {}
        self._ran = self._held = False
        self.left: list[Callable[[], Any]] = []
        self.still_required = False
        # Containers of torch's modules that no other code reads.
        self._inner: set[int] = set()
        self._walk(roots)

    def take(self) -> list[Tensor]:
        """Return the tensors, in the order that `filled` expects, and drop the references here."""
        tensors, self._tensors = self._tensors, []
        self._index = {}
        return tensors

    @contextmanager
    def filled(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Replace the closed-over tensors during one run.

        The side effects of the first run remain: rebound variables and updated buffers. Later runs start from the same
        buffers, numbers and switches as the first, and have no side effects.

        Args:
            tensors: One tensor for each that `take` returned.

        Yields:
            Nothing.
        """
        first, self._ran = not self._ran, True
        plain = nullcontext() if first or self._held else self._values.restored(self._name)
        with plain, self._exchanged(tensors, first=first):
            yield
        if first:
            self.left += self._values.left(self._inner)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Restore numbers and switches once for all runs within the context, none of which is the first."""
        with self._values.restored(self._name):
            self._held = True
            try:
                yield
            finally:
                self._held = False

    @contextmanager
    def _exchanged(self, tensors: Sequence[Tensor], *, first: bool) -> Iterator[None]:
        replaced = []
        try:
            for slot in self._slots:
                placed = filled_in(slot.content, tensors)
                try:
                    replaced.append((slot, slot.get(), placed))
                except (AttributeError, LookupError, ValueError):  # objects, containers and cells
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
                # Cells are kept whatever they hold, because a loop may have rebound them by the next run.
                if snapshot or content is not held:
                    self._slots.append(Slot(get, set_, content))

    def _refuse_cached(self, function: Any) -> None:
        """Raise for a memoized function of tensors, whose cache would return tensors of the first run."""
        held: list[Tensor] = []
        for value in reachable(function.__wrapped__):
            for get, _, _ in places(value):
                referenced(get(), held, {})
        for tensor in held:
            if not is_constant(tensor):
                raise hidden_tensor(self._name, tensor)

    def _is_inner(self, slot: Slot) -> bool:
        """Whether only a module reads the content of a place, or hooks rewrite it before each call."""
        container = getattr(getattr(slot.get, "func", None), "__self__", None)
        return id(container) in self._inner or (isinstance(container, dict) and has_forward_pre_hooks(container))

    def _keep_buffers(self, module: nn.Module) -> None:
        # torch.batch_norm updates its running statistics without increasing their version.
        silent = isinstance(module, RunningNorm)
        for name, tensor in (buffers := buffers_by_name(module)).items():
            if isinstance(tensor, Tensor) and is_constant(tensor) and not tensor.is_inference():
                self._buffers.append(_Buffer(buffers, name, silent))
                self._index[id(tensor)] = -1


def referenced(value: Any, tensors: list[Tensor], index: dict[int, int]) -> Any:
    """Replace tensors in a value by references, and collect them; those of negative `index` are kept."""
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
    """Whether no derivative can pass through a tensor: it has no graph, transform or tangent."""
    return not (tensor.requires_grad or is_wrapped(tensor) or has_tangent(tensor))


def filled_in(content: Any, tensors: Sequence[Tensor]) -> Any:
    """Return a value with tensors instead of references."""
    if isinstance(content, _Reference):
        return tensors[content.index]
    if isinstance(content, tuple):
        parts = [filled_in(part, tensors) for part in content]
        if any(a is not b for a, b in zip(parts, content, strict=True)):
            return _like(content, parts)
    return content


def _like(model: tuple[Any, ...], parts: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(parts) if type(model) is tuple else type(model)(*parts)
