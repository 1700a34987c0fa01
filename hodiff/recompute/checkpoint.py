"""Checkpoints, which recompute intermediate results instead of storing them, for derivatives of every order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hodiff.common.module_state import at_another_point
from hodiff.common.options import require_callable, require_int
from hodiff.common.overriding import overridable_in_trees
from hodiff.distributed.fully_sharded import require_no_training, running_again, sharded_modules_run
from hodiff.distributed.stand_ins import gathered, shard_of, stand_in
from hodiff.errors import InputError
from hodiff.recompute.closed_over import ClosedOver, is_constant
from hodiff.recompute.programs import Checkpoint, Program, is_differentiable
from hodiff.recompute.reachable import RefuseForeign, hidden_tensor, modules_in
from hodiff.recompute.surroundings import Surroundings
from hodiff.recompute.unused_operands import intermediate_results, without_unused
from hodiff.torch_internals.autograd.differentiation import autograd_records, may_be_differentiated
from hodiff.torch_internals.autograd.grad_mode import in_dual_level
from hodiff.torch_internals.autograd.transforms import in_transform, outside_transforms
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms, is_batched
from hodiff.torch_internals.tensors import has_numbers, storage_of, version_of
from hodiff.torch_internals.threads import one_thread_at_a_time

_STORED: ContextVar[bool] = ContextVar("stored", default=False)


class CallProgram(Program):
    """A call of a function as a program of its tensor arguments and of the tensors that it closes over.

    Runs after the first one see the random numbers, autocast state and buffers of the first run.

    Attributes:
        inputs: The program's operands, until `take_inputs` returns them.
        returned: After the first run, the index of the operand that each output is, None for a new tensor.
        returns_views: After the first run, whether an output is a view of an operand; in forward mode and transforms
            also whether outputs overlap, where a change of one in place would not change the other or its derivative.
    """

    def __init__(self, name: str, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        self._constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._closed_over = ClosedOver(name, f, *self._constants)
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._count = len(given)
        # Autograd sees the shards of fully sharded modules, and gathers them in each run.
        parts = [shard_of(each) for each in (*given, *self._closed_over.take())]
        self._inputs, self._layouts = [shard for shard, _ in parts], [layout for _, layout in parts]
        self._again = partial(running_again, name) if sharded_modules_run() else nullcontext
        self._surroundings = Surroundings(self._inputs, self._closed_over.generators)
        self._guard = RefuseForeign(partial(hidden_tensor, name)) if in_transform() else None
        self._ran = self._held = False
        self._outputs: tuple[Tensor, ...] | None = None
        self.returned: list[int | None] = []
        self.returns_views = False
        self.name, self.function = name, f

    def take_inputs(self) -> list[Tensor]:
        """Return the operands, and drop the references to them here, where autograd would not see them."""
        inputs, self._inputs = self._inputs, []
        return inputs

    def without_unused(self, inputs: list[Tensor], *, again: bool) -> list[Tensor]:
        """Detach closed-over operands that are not used, by a first run; the next run repeats it only if `again`."""
        if positions := intermediate_results(inputs, self._count):
            inputs, outputs = without_unused(self, inputs, positions)
            self._outputs = None if again else outputs
        return inputs

    def run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Call the function."""
        if self._outputs is not None:
            outputs, self._outputs = self._outputs, None
            return outputs
        with one_thread_at_a_time():
            if self._held:
                self._surroundings.rewind()
                return self._call(inputs)
            if self._ran:
                with self._surroundings.restored(), self._again():
                    return self._call(inputs)
            self._ran = True
            before = list(map(_version, inputs))
            if self._guard is None:
                outputs = self._call(inputs)
            else:
                with self._surroundings.modes_restored(), self._guard:
                    outputs = self._call(inputs)
            # Later runs raise for an input that the function itself changes in place.
            if list(map(_version, inputs)) == before:
                self._compare(inputs, outputs)
            return outputs

    @contextmanager
    def held(self) -> Iterator[None]:
        """Restore what later runs see once for all runs within the context, instead of once for each."""
        if self._held or not self._ran:
            yield
            return
        with one_thread_at_a_time(), self._surroundings.restored(), self._again(), self._closed_over.held():
            self._held = True
            try:
                yield
            finally:
                self._held = False

    def _compare(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Find the outputs that share memory with inputs, which code may change in place later."""
        places = {id(each): i for i, each in enumerate(inputs)}
        self.returned = [places.get(id(each)) for each in outputs]
        memory = {_memory(each) for each in inputs} - {None}
        fresh = [each for each, i in zip(outputs, self.returned, strict=True) if i is None]
        self.returns_views = any(_memory(each) in memory for each in fresh)
        if self._guard is not None or in_dual_level():
            self.returns_views |= any(_overlap(a, b) for a, b in combinations(fresh, 2))

    @at_another_point
    def _call(self, shards: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        inputs = tuple(map(stand_in, shards, self._layouts))
        given = iter(inputs[: self._count])
        leaves = [next(given) if each else c for each, c in zip(self._is_tensor, self._constants, strict=True)]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        with self._closed_over.filled(inputs[self._count :]):
            output = gathered(self.function(*args, **kwargs))
        leaves, self._output_spec = pytree.tree_flatten(output)
        self._output = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._is_output = [isinstance(leaf, Tensor) for leaf in leaves]
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    @property
    def leaves_tensors(self) -> bool:
        """Whether the first run left tensors in places that other code may read."""
        return bool(self._closed_over.left)

    def leaves_what_is_differentiated(self, inputs: Sequence[Tensor]) -> bool:
        """Whether tensors that the function leaves behind depend on differentiated inputs, by a recorded run."""
        if not autograd_records() or any(is_batched(each) for each in inputs):
            return True  # nothing would be recorded; or a run without the batch is another one
        differentiated = [is_differentiable(each) and not is_constant(each) for each in inputs]
        plain = map(below_transforms, inputs)
        with outside_transforms() if in_transform() else nullcontext(), torch.enable_grad():
            self.run(
                *(each.detach().requires_grad_(wanted) for each, wanted in zip(plain, differentiated, strict=True))
            )
        return self._closed_over.still_required

    def structured(self, outputs: Iterable[Tensor]) -> Any:
        """Return outputs in the structure of the function's result, after a run."""
        tensors = iter(outputs)
        leaves = [next(tensors) if each else c for each, c in zip(self._is_output, self._output, strict=True)]
        return pytree.tree_unflatten(leaves, self._output_spec)


@overridable_in_trees
def checkpoint(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    r"""Call a function without storing its intermediate results: derivatives run the function again.

    $$ y = f(x, \theta), \qquad (\bar x, \bar\theta) = \bar y\, \frac{\partial f}{\partial (x, \theta)}
       \quad \text{with } f \text{ run again at } (x, \theta) $$

    Between forward and backward only the arguments are stored (and the arguments of the backward pass, if it is
    differentiated in turn). This holds at every order and by every route: inside `torch.func` transforms, `hodiff.hvp`
    and `hodiff.hessian`, where `torch.utils.checkpoint` raises. Each further order runs `f` once more.

    Closed-over tensors are found in closure cells, defaults, `functools.partial`, attributes of objects and modules,
    lists, dicts and the globals that `f` names, and get their gradients. If `f` reaches a tensor that requires a
    gradient in another way, the call raises. If `f` closes over a tensor with a graph, the call stores what depends on
    it until `f` returns, to see whether it is used; as an argument it needs no such memory. Later runs see the same
    random numbers, generators, autocast, buffers, rebound loop variables, and numbers and switches that `f` reads, such
    as a module's `training`, and elements of lists, dicts, deques and sets; they have no side effects. Some state is
    neither restored nor checked: attributes of imported modules, `ContextVar`, `os.environ`, weak references, and
    switches of torch such as its default dtype. It must not change before the last derivative. `f` must return its
    results; if it stores a differentiated tensor elsewhere, the call raises.

    During the runs of `f`, plain tensors replace the tensors that it closes over. So `f` must not depend on their
    `requires_grad`, class, identity or attributes, such as a sum over parameters with `requires_grad`: decide outside
    of `f`. Threads that use these tensors only through hodiff wait for each other; other code in another thread must
    not use the same modules or closures meanwhile, as with `torch.func.functional_call`.

    Under `torch.compile` the call is `f(*args, **kwargs)`: the compiler decides what to recompute.

    Args:
        f: Function, or module, of pytrees of tensors and other values; it returns a pytree.
        *args: Its positional arguments.
        **kwargs: Its keyword arguments.

    Returns:
        The result of `f`.

    Raises:
        InputError: If `f` is not callable, depends on a tensor that cannot be found, or stores one elsewhere; in
            backward, if state that `f` reads has changed and cannot be restored.

    Example:
        >>> import torch
        >>> w = torch.tensor(2.0, requires_grad=True)
        >>> x = torch.tensor(3.0, requires_grad=True)
        >>> y = checkpoint(lambda x: (w * x) ** 3, x)
        >>> (slope,) = torch.autograd.grad(y, x, create_graph=True)
        >>> torch.autograd.grad(slope, w)[0]
        tensor(324.)

    Source: A. Griewank & A. Walther, Evaluating Derivatives, 2nd ed., 2008, section 12.2.
    """
    return checkpointed("checkpoint", f, args, kwargs)


@overridable_in_trees
def checkpoint_sequential(functions: nn.Sequential | Iterable[Callable[..., Any]], segments: int, *args: Any) -> Any:
    r"""Call functions one after another, and store only the tensors between segments.

    $$ y = (f_n \circ \dots \circ f_1)(x), \qquad \text{held: every } \lceil n / s \rceil \text{-th intermediate} $$

    With $s \approx \sqrt n$ segments, memory grows as $\sqrt n$ at the cost of one more forward pass. See `checkpoint`.
    Unlike in torch, the last segment is checkpointed too, because second derivatives would store its results.

    Args:
        functions: An `nn.Sequential`, or functions, each called with the result of the one before.
        segments: Number of segments $s$, from 1 to the number of functions.
        *args: Arguments of the first function.

    Returns:
        The result of the last function.

    Raises:
        InputError: If there are no functions, one is not callable, or `segments` is out of range.

    Example:
        >>> import torch
        >>> x = torch.tensor(0.5, requires_grad=True)
        >>> y = checkpoint_sequential([torch.sin] * 4, 2, x)
        >>> torch.allclose(y, x.sin().sin().sin().sin())
        True

    Source: T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training deep nets with sublinear memory cost", 2016, section 3.
    """
    name = "checkpoint_sequential"
    chain = list(functions)
    for each in chain:
        require_callable(name, functions=each)
    require_int(name, "segments", segments, 1, len(chain))
    bounds = [round(i * len(chain) / segments) for i in range(segments + 1)]
    for start, stop in pairwise(bounds):
        args = (checkpointed(name, _Chain(chain[start:stop]), args, {}),)
    return args[0]


class _Chain:
    def __init__(self, functions: list[Callable[..., Any]]):
        self.functions = functions

    def __call__(self, *args: Any) -> Any:
        for function in self.functions:
            args = (function(*args),)
        return args[0]


@contextmanager
def stored_instead() -> Iterator[None]:
    """Make checkpoints plain calls within the context, for code that inspects what a graph records."""
    token = _STORED.set(True)
    try:
        yield
    finally:
        _STORED.reset(token)


def checkpointed(name: str, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `f` as `checkpoint` does; `name` is the public function in error messages."""
    require_callable(name, f=f)
    if torch.compiler.is_compiling() or not may_be_differentiated() or _STORED.get():
        return f(*args, **kwargs)
    # Other threads may replace closed-over tensors, and draw random numbers that the first run is to draw.
    with one_thread_at_a_time():
        call = CallProgram(name, f, args, kwargs)
        require_no_training(name, partial(modules_in, f, *args, *kwargs.values()))
        inputs = call.take_inputs()
        outputs = Checkpoint.call(call, *call.without_unused(inputs, again=False))
        if call.leaves_tensors and call.leaves_what_is_differentiated(inputs):
            raise InputError(
                f"{name}: f: expected f to return all tensors that are differentiated, got a tensor that it stores in "
                "an attribute, a list or a variable, where its derivatives would be lost; return it as well, or "
                "store it detached."
            )
        if call.returns_views:
            # A view of an argument has to be one of the caller's tensor, so this call stores its intermediate results.
            return call.structured(call.run(*inputs))
        if call.returned:
            outputs = [out if i is None else inputs[i] for out, i in zip(outputs, call.returned, strict=True)]
        return call.structured(outputs)


def _version(tensor: Tensor) -> int | None:
    """How often a tensor was changed in place; None in inference mode, where nothing counts."""
    plain = below_transforms(tensor)
    return None if plain.is_inference() else version_of(plain)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have an element in common; parts that `chunk` and `unbind` return have none."""
    if _memory(a) is None or _memory(a) != _memory(b):
        return False
    a, b = below_transforms(a), below_transforms(b)
    if a.dtype != b.dtype or not has_numbers(a):
        return True
    marks = torch.zeros(a.untyped_storage().nbytes() // a.element_size(), dtype=torch.bool, device=a.device)
    marks.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
    return bool(marks.as_strided(b.shape, b.stride(), b.storage_offset()).any())


def _memory(tensor: Tensor) -> int | None:
    """Identify the memory of a tensor; None for sparse tensors and subclasses, which may have none."""
    plain = below_transforms(tensor)
    known = type(plain) in (Tensor, nn.Parameter) and plain.layout == torch.strided
    return storage_of(plain) if known else None
