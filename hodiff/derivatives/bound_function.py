"""A user's function as hodiff differentiates it: flat leaves in, output and aux out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.complex_numbers import as_complex, as_real
from hodiff.common.module_state import at_another_point
from hodiff.common.options import is_int, require_bool, require_callable
from hodiff.common.overriding import of_hodiff, offered_in_trees
from hodiff.common.trees import (
    PyTree,
    as_given,
    as_plain,
    dense,
    describe,
    flatten,
    flatten_primals,
    flatten_tangents,
    is_of_subclass,
    is_only_leaf,
    is_ordinary,
    recordable,
    recordable_tree,
    tensors_in,
    unflatten,
)
from hodiff.corrections import Corrections
from hodiff.corrections.rules.autograd.checkpoints import uncorrected
from hodiff.derivatives.own_gradient import Watch, is_asked, warn_once
from hodiff.distributed.layouts import any_distributed
from hodiff.distributed.points import ShardedPoint
from hodiff.distributed.regathering import saving_shards
from hodiff.errors import InputError
from hodiff.recompute.reachable import modules_in
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.transforms import in_transform
from hodiff.torch_internals.tensors import stands_for_tensor

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(eq=False)
class BoundFunction:
    """A function with its constants bound, as a function of the real leaves that are differentiated.

    Complex leaves are given as real and imaginary parts, and are joined (`joined`) before the function sees them.
    Leaves of tensor subclasses are stored as plain tensors; `subclassed` holds the originals by position, and the
    function is called with tensors of the original class.
    """

    caller: str
    f: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    argnums: tuple[int, ...]
    leaves: tuple[Tensor, ...] = field(repr=False)
    specs: tuple[pytree.TreeSpec, ...]
    user_spec: pytree.TreeSpec
    has_aux: bool
    correct: bool
    joined: tuple[bool, ...]
    offers_aux: bool = True
    subclassed: dict[int, Tensor] = field(default_factory=dict, repr=False)
    sharded: ShardedPoint | None = field(default=None, repr=False)

    @property
    def roots(self) -> tuple[Any, ...]:
        """The function and its arguments, which may hold modules and generators."""
        return (self.f, *self.args, *self.kwargs.values())

    @at_another_point
    def __call__(self, leaves: Sequence[Tensor], mode: Corrections | None = None) -> tuple[PyTree, PyTree]:
        """Evaluate at other leaves; `mode` replaces the default corrections, and aux is `()` without `has_aux`."""
        if self.sharded is None:
            return self._evaluate(self._joined(leaves), mode)
        arguments = self.sharded.arguments(self._joined(leaves))
        with self.sharded.running(arguments):
            return self._evaluate(arguments, mode)

    def _evaluate(self, rest: list[Any], mode: Corrections | None) -> tuple[PyTree, PyTree]:
        args = list(self.args)
        for place, given in self.subclassed.items():
            rest[place] = as_given(rest[place], given)
        for argnum, spec in zip(self.argnums, self.specs, strict=True):
            args[argnum] = unflatten(rest[: spec.num_leaves], spec)
            rest = rest[spec.num_leaves :]
        if self.correct:
            mode = mode or Corrections()
            # A transform may see tensors that have no numbers.
            # Ranks must agree on the number of evaluations.
            unwatched = torch.compiler.is_compiling() or in_transform() or self.sharded is not None
            watch = None if unwatched or is_asked(self.f) else Watch()
            mode.watcher = watch
            with mode:
                result = self.f(*args, **self.kwargs)
            if watch is not None:
                mode.watcher = None
                warn_once(self.caller, self.f, self, self.leaves, result, watch.cut)
        elif torch.compiler.is_compiling():
            result = self.f(*args, **self.kwargs)
        else:
            with uncorrected():
                result = self.f(*args, **self.kwargs)
        if self.subclassed:
            result = pytree.tree_map_only(Tensor, as_plain, result)
        if self.sharded is not None:
            result = self.sharded.plain(result)
        if not self.has_aux:
            return result, ()
        if not (isinstance(result, tuple) and len(result) == 2):
            raise InputError(
                f"{self.caller}: has_aux=True needs a function that returns (output, aux), "
                f"got {type(result).__name__}; return a pair, or drop has_aux."
            )
        for leaf in pytree.tree_leaves(result[1]):
            if not isinstance(leaf, Tensor) or stands_for_tensor(leaf):
                raise InputError(
                    f"{self.caller}: aux: expected a pytree of tensors, got {describe(leaf)} in it; "
                    "return torch.tensor(...) of it."
                )
        return result

    def scalar(self, leaves: Sequence[Tensor], mode: Corrections | None = None) -> tuple[Tensor, PyTree]:
        """Evaluate the function, and require one real number as its value."""
        value, aux = self(leaves, mode)
        value = self.one_number(value)
        return value if self.sharded is None else self.sharded.joint(value), aux

    def one_number(self, value: Any) -> Tensor:
        """Return the function's value, or raise `InputError` if it is not one real number."""
        if not isinstance(value, Tensor) or stands_for_tensor(value):
            advice = "pass has_aux=True if it returns (value, aux)" if self.offers_aux else "return only the value"
            hint = f"; {advice}" if isinstance(value, tuple) else ""
            raise InputError(
                f"{self.caller}: expected a function that returns a scalar tensor, got {type(value).__name__}{hint}."
            )
        if value.shape != () or not value.is_floating_point():
            remedy = (
                "take its real part or its squared modulus"
                if value.is_complex()
                else "reduce it with .sum() or .mean(), pick one component, or use hodiff.jacobian"
            )
            raise InputError(
                f"{self.caller}: expected a function that returns one real number, a tensor of shape (), "
                f"got {describe(value)}; {remedy}."
            )
        return value

    def constants(self) -> list[Tensor]:
        """Tensors among the arguments that are not differentiated."""
        others = [argument for i, argument in enumerate(self.args) if i not in self.argnums]
        return tensors_in((others, self.kwargs)) if others or self.kwargs else []

    def unflatten(self, leaves: Sequence[Any]) -> PyTree:
        """Return leaves in the user's structure: the one argument, or a tuple of several."""
        joined = self._joined(leaves)
        if self.sharded is not None:
            joined = [self.sharded.result(each, i) for i, each in enumerate(joined)]
        return unflatten(joined, self.user_spec)

    def tangents(self, v: PyTree) -> tuple[Tensor, ...]:
        """Return the leaves of a direction, which must match the differentiated arguments."""
        if self.sharded is not None:
            v = self._local_tangents(self.sharded, v)
        elif is_only_leaf(self.user_spec) and not self.joined[0] and is_ordinary(v):
            (primal,) = self.leaves
            if v.shape == primal.shape and v.dtype is primal.dtype and v.device == primal.device:
                return (v,)
        leaves = flatten_tangents(v, self._joined(self.leaves), self.user_spec, self.caller)
        return tuple([as_real(as_plain(leaf)) for leaf in leaves])

    def _local_tangents(self, sharded: ShardedPoint, v: PyTree) -> PyTree:
        """Return a direction with local tensors; another structure is left for `flatten_tangents` to refuse."""
        leaves, spec = pytree.tree_flatten(v)
        if len(leaves) != len(self.leaves):
            return v
        return unflatten([sharded.local_tangent(each, i, self.caller) for i, each in enumerate(leaves)], spec)

    def _joined(self, leaves: Sequence[Any]) -> list[Any]:
        return list(map(as_complex, leaves, self.joined)) if any(self.joined) else list(leaves)

    def recorded(self, record: Callable[[], R]) -> R:
        """Run code that records a graph of the function, which saves shards in place of gathered parameters."""
        gathers = self.sharded is not None and self.sharded.modules is not None
        return saving_shards(record) if gathers and not in_transform() else record()

    def require_route(self, route: str) -> None:
        """Raise if sharded leaves do not support a route."""
        if self.sharded is None or route == ROUTES[0]:
            return
        if not self.sharded.forward_too:
            raise InputError(
                f"{self.caller}: route: expected 'reverse-over-reverse' for a function of DTensors, of which torch has "
                f"no forward mode, got {route!r}; use that route."
            )
        if route == ROUTES[3]:
            raise InputError(
                f"{self.caller}: route: expected a route with reverse mode for sharded parameters, got {route!r}, "
                "which takes one pass for each number; use 'reverse-over-reverse'."
            )

    def independent(self) -> InputError:
        """Return the error for an output that autograd cannot trace back to the input."""
        return InputError(
            f"{self.caller}: the output does not depend on the differentiated argument: expected a differentiable "
            "path from it to the output; look for .detach(), .item(), NumPy code, torch.no_grad(), or parameters "
            "read from the module instead of the argument (use torch.func.functional_call)."
        )


def require_argnums(caller: str, argnums: Any) -> tuple[int, ...]:
    """Return `argnums` as a tuple of positions; raise `InputError` if it has anything but ints."""
    positions = argnums if isinstance(argnums, tuple) else (argnums,)
    if not all(map(is_int, positions)):
        raise InputError(
            f"{caller}: argnums: expected an int or a tuple of ints, got {describe(argnums)}. {caller}(f) returns a "
            f"function of the arguments of f: write hodiff.{caller}(f)(x)."
        )
    return positions


def bind(
    caller: str,
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    argnums: int | tuple[int, ...] = 0,
    *,
    has_aux: bool | None = None,
    name: str | None = None,
    correct: bool = True,
    complex_too: bool = False,
    jagged_too: bool = False,
    sharded_too: bool = False,
    weight: float | None = None,
) -> BoundFunction:
    """Validate a function and its arguments, and bind them.

    Args:
        caller: The public function, for error messages.
        f: The user's function.
        args: Its positional arguments.
        kwargs: Its keyword arguments, all constants.
        argnums: Which positional arguments are differentiated.
        has_aux: Whether `f` returns `(output, aux)`; None where the caller has no such option.
        name: What error messages call the differentiated argument; by default its position.
        correct: Whether hodiff's rules replace torch's wrong and missing ones.
        complex_too: Whether complex leaves are supported, by their real and imaginary parts.
        jagged_too: Whether jagged nested leaves are supported.
        sharded_too: Whether DTensors are differentiated by their local parts; if not, as tensors.
        weight: Weight of this rank's value in the sum over ranks; see `ShardedPoint`.

    Returns:
        The bound function.

    Raises:
        InputError: If `f` is not callable, `argnums` does not fit, or a leaf cannot be differentiated.
    """
    require_callable(caller, f=f)
    require_bool(caller, "has_aux", has_aux is not None and has_aux)
    require_bool(caller, "correct", correct)
    if type(argnums) is int and not argnums and args and is_ordinary(args[0]):
        # The usual case, for which the checks below would take half the time of a small gradient.
        leaf, spec = args[0], flatten(args[0])[1]
        rest = [recordable_tree(each) for each in args[1:]]
        constants = {name: recordable_tree(arg) for name, arg in kwargs.items()} if kwargs else {}
        return BoundFunction(
            *(caller, f, (leaf, *rest), constants, (0,), (leaf,), (spec,), spec, bool(has_aux), correct, (False,)),
            has_aux is not None,
        )
    positions = require_argnums(caller, argnums)
    for position in positions:
        if not -len(args) <= position < len(args):
            raise InputError(
                f"{caller}: argnums={argnums!r} does not fit {len(args)} positional argument(s); "
                "differentiated arguments must be passed by position."
            )
    positions = tuple([position % len(args) for position in positions])
    if not positions or len(set(positions)) != len(positions):
        raise InputError(f"{caller}: argnums: expected each argument once and at least one, got {argnums!r}.")
    also = {"complex_too": complex_too, "jagged_too": jagged_too}
    flat = [flatten_primals(args[position], caller, name or f"argument {position}", **also) for position in positions]
    leaves = [recordable(leaf) for found, _ in flat for leaf in found]
    sharded = None
    # Ordinary tensors need no look at their subclasses.
    special = not torch.compiler.is_compiling() and set(map(type, leaves)) != {Tensor}
    if special and any_distributed(leaves):
        sharded = ShardedPoint.of(caller, leaves, partial(modules_in, f, *args, *(kwargs or {}).values()))
        if sharded is not None and not sharded_too:
            sharded.require_dtensors(caller)
            sharded = None
        if sharded is not None:
            if in_transform():
                raise InputError(
                    f"{caller}: {name or 'x'}: expected ordinary tensors inside a torch.func transform, got DTensors; "
                    f"call {caller} outside of the transform."
                )
            sharded = sharded.weighted(weight)
            leaves = [sharded.local(leaf, i) for i, leaf in enumerate(leaves)]
    subclassed = {i: x for i, x in enumerate(leaves) if is_of_subclass(x)} if special else {}
    for place, leaf in subclassed.items():
        leaves[place] = as_plain(leaf)
    specs = tuple([spec for _, spec in flat])
    user_spec = pytree.tree_flatten(tuple(args[i] for i in positions))[1] if isinstance(argnums, tuple) else specs[0]
    args = tuple([arg if i in positions else recordable_tree(arg) for i, arg in enumerate(args)])
    kwargs = {name: recordable_tree(arg) for name, arg in kwargs.items()} if kwargs else {}
    joined = tuple(map(Tensor.is_complex, leaves))
    reals = tuple([dense(as_real(leaf)) for leaf in leaves])
    offers_aux, has_aux = has_aux is not None, bool(has_aux)
    return BoundFunction(
        caller,
        f,
        args,
        kwargs,
        positions,
        reals,
        specs,
        user_spec,
        has_aux,
        correct,
        joined,
        offers_aux,
        subclassed,
        sharded,
    )


def leave_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to run under `torch.no_grad()` instead of `torch.inference_mode()`, which records nothing."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return run


def at_the_boundary(function: Callable[P, R]) -> Callable[P, R]:
    """Act as `leave_inference_mode` does, and let tensor-like objects take over the call, also closed-over ones."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        result = offered_in_trees(run, args, kwargs)
        if result is not NotImplemented:
            return cast(R, result)
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return cast(Callable[P, R], of_hodiff(run))
