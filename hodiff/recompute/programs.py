"""Programs that are run again instead of stored, and the Function that differentiates them.

A program is a function of tensors. Its derivatives are programs that run it again, so the graph of a derivative of
any order holds the operands of programs, but no intermediate results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hodiff.graphs import inspect_graph
from hodiff.recompute.lost_slopes import is_due
from hodiff.recompute.reachable import hidden_tensor
from hodiff.recompute.recording import Recording
from hodiff.rules.any_order import AnyOrderFunction, uncompiled
from hodiff.rules.nesting import nestable_jvp
from hodiff.torch_internals.autograd.differentiation import autograd_records
from hodiff.torch_internals.autograd.grad_mode import forward_pass, has_tangent, in_dual_level, set_tangents
from hodiff.torch_internals.autograd.transforms import in_transform
from hodiff.torch_internals.tensors import is_view
from hodiff.torch_internals.wording import Wording, says

Tensors = Sequence[Tensor]


class Program:
    """A function of tensors that can be run any number of times.

    A subclass defines `run`. It may define `pull` and `push` too, if its derivatives have a shorter form.

    Attributes:
        name: The public function that made the program, for errors.
        function: The user's function that the program runs, if any.
    """

    name = "program"
    function: Any = None

    def run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Compute the outputs by differentiable operators."""
        raise NotImplementedError

    def pull(self, inputs: Tensors, cotangents: Sequence[Tensor | None], needed: Sequence[int]) -> list[Tensor | None]:
        """Compute gradients by the inputs at the positions `needed`, as the output of another program."""
        defined = [i for i, each in enumerate(cotangents) if each is not None]
        pullback = Pullback(self, len(inputs), needed, defined)
        pullback.watched = torch.is_grad_enabled() and not in_transform() and self.function is not None
        gradients = Checkpoint.call(pullback, *inputs, *(each for each in cotangents if each is not None))
        by_position = dict(zip(pullback.used, gradients, strict=True))
        return [by_position.get(i) for i in needed]

    def push(self, inputs: Tensors, tangents: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Compute tangents of all floating-point outputs, as the output of another program."""
        moving = [i for i, each in enumerate(tangents) if each is not None]
        pushforward = Pushforward(self, len(inputs), moving)
        return Checkpoint.call(pushforward, *inputs, *(each for each in tangents if each is not None))


class Checkpoint(AnyOrderFunction):
    """The Function behind `checkpoint` and all other programs. It saves the operands of the program."""

    @staticmethod
    def forward(program: Program, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the program without a graph."""
        constants = [each.detach() for each in inputs]
        outputs = first_run(program, inputs, constants)
        outputs = tuple(each.detach() if each.requires_grad else each for each in outputs)
        # In a dual level torch gives a view the tangent of its base, which is no output.
        return tuple(each.clone() if is_view(each) else each for each in outputs) if in_dual_level() else outputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save the program and its operands."""
        ctx.program, *operands = inputs
        ctx.save_for_backward(*operands)
        ctx.save_for_forward(*operands)
        ctx.differentiable = tuple(is_differentiable(each) for each in output)
        ctx.mark_non_differentiable(*(each for each in output if not is_differentiable(each)))
        ctx.set_materialize_grads(False)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Pull cotangents back by another run."""
        gradients: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        cotangents = tuple(c if d else None for c, d in zip(cotangents, ctx.differentiable, strict=True))
        needed = [i for i, need in enumerate(ctx.needs_input_grad[1:]) if need]
        if needed and any(each is not None for each in cotangents):
            for i, gradient in zip(needed, ctx.program.pull(ctx.saved_tensors, cotangents, needed), strict=True):
                gradients[i + 1] = gradient
        return tuple(gradients)

    @staticmethod
    @uncompiled
    @nestable_jvp
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Push tangents forward by another run."""
        pushed = iter(ctx.program.push(ctx.saved_tensors, tangents))
        return tuple(next(pushed) if each else None for each in ctx.differentiable)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], program: Program, *inputs: Tensor) -> tuple[Any, Any]:
        """Run the program under `torch.func.vmap`."""
        outputs = Checkpoint.call(BatchedProgram(program, in_dims[1:], info.randomness), *inputs)
        return outputs, (0,) * len(outputs)


class BatchedProgram(Program):
    """A program for a batch of operands."""

    def __init__(self, base: Program, in_dims: Sequence[int | None], randomness: str):
        self.base, self.in_dims, self.name = base, tuple(in_dims), base.name
        # If the point is the same for the whole batch, so are the random numbers that were drawn there.
        shared = isinstance(base, _Derivative) and all(dim is None for dim in self.in_dims[: base.count])
        self.randomness = "same" if shared else randomness

    def run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the base program under vmap, with the batch as the first dimension of the outputs."""
        return torch.func.vmap(self.base.run, in_dims=self.in_dims, randomness=self.randomness)(*inputs)


class _Derivative(Program):
    """A program whose inputs are `count` operands of another program, and then directions."""

    def __init__(self, base: Program, count: int):
        self.base, self.count, self.name = base, count, base.name


class Pullback(_Derivative):
    """Gradients of a program with respect to the inputs `needed`, given cotangents of the outputs `defined`.

    Attributes:
        used: After a run, the positions of the inputs that have gradients, because the outputs depend on them.
        watched: Whether the first run raises for Functions that treat their gradient as a constant.
    """

    watched = False

    def __init__(self, base: Program, count: int, needed: Sequence[int], defined: Sequence[int]):
        super().__init__(base, count)
        self.needed, self.defined, self.used = list(needed), list(defined), list(needed)
        self._ran = False

    def run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Record a run and pull the cotangents back."""
        point, cotangents = inputs[: self.count], inputs[self.count :]

        def restricted(*moving: Tensor) -> tuple[Tensor, ...]:
            outputs = self.base.run(*_exchanged(point, self.needed, moving))
            return tuple(outputs[i] for i in self.defined)

        moving = [point[i] for i in self.needed]
        gradients: Sequence[Tensor | None]
        # torch.func records in inference mode, too.
        if in_transform() or not autograd_records():
            gradients = torch.func.vjp(restricted, *moving)[1](cotangents)
        else:
            function = _users_function(self.base)
            roots = () if function is None else (function,)
            recording = Recording(lambda operands: restricted(*operands), moving, cotangents, roots=roots)
            if self.watched and not self._ran:
                self._refuse_lost_slopes(recording.result, restricted, moving, cotangents)
            gradients = recording.gradients(recording.result, cotangents)
        if not self._ran:  # Later runs return as many gradients, also by torch.func, which returns no None.
            self.used = [i for i, each in zip(self.needed, gradients, strict=True) if each is not None]
            self._ran = True
        return tuple(
            torch.zeros_like(point[i]) if each is None else each
            for i, each in zip(self.needed, gradients, strict=True)
            if i in self.used
        )

    def _refuse_lost_slopes(
        self, outputs: Tensors, restricted: Callable[..., Tensors], moving: Tensors, cotangents: Tensors
    ) -> None:
        """Raise for Functions of the program that treat their gradient as a constant, by a recorded run."""
        function = self.base.function
        if not is_due(function, [node for each in outputs for node in inspect_graph(each).functions]):
            return

        aside = Recording(lambda operands: restricted(*operands), [each.detach() for each in moving], roots=(function,))
        with suppress(NotImplementedError):  # the second derivative will raise it
            aside.gradients(aside.result, cotangents, graph=True)
        aside.refuse_lost_slopes()


class Pushforward(_Derivative):
    """Tangents of a program's floating-point outputs, given tangents of the inputs `moving`."""

    def __init__(self, base: Program, count: int, moving: Sequence[int]):
        super().__init__(base, count)
        self.moving = list(moving)

    def run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Push the tangents forward."""
        point, tangents = inputs[: self.count], inputs[self.count :]

        def restricted(*moving: Tensor) -> tuple[Tensor, ...]:
            outputs = self.base.run(*_exchanged(point, self.moving, moving))
            return tuple(each for each in outputs if is_differentiable(each))

        moving = [point[i] for i in self.moving]
        # torch promotes the tangent of a float32 scalar times a Python number to float64.
        tangents = tuple(t.to(x.dtype) for t, x in zip(tangents, moving, strict=True))
        if in_dual_level():
            return (_push_by_transposition if in_transform() else _push_dual)(restricted, moving, tangents)
        outputs, pushed = forward_pass(restricted, tuple(moving), tangents)
        return tuple(t.to(y.dtype) for t, y in zip(pushed, outputs, strict=True))


def _users_function(program: Program) -> Any:
    """Return the user's function behind a program and its derivatives."""
    while isinstance(program, (BatchedProgram, _Derivative)):
        program = program.base
    return program.function


def _push_dual(function: Callable[..., tuple[Tensor, ...]], moving: Tensors, tangents: Tensors) -> tuple[Tensor, ...]:
    with set_tangents(True):
        duals = [forward_ad.make_dual(x, t) for x, t in zip(moving, tangents, strict=True)]
        pairs = [forward_ad.unpack_dual(each) for each in function(*duals)]
        return tuple(torch.zeros_like(y) if t is None else t.clone() for y, t in pairs)


def _push_by_transposition(
    function: Callable[..., tuple[Tensor, ...]], moving: Tensors, tangents: Tensors
) -> tuple[Tensor, ...]:
    """Push tangents in a batch inside of a dual level, where torch makes no dual numbers: transpose the pullback."""
    recorded: Any = torch.func.vjp(function, *moving)
    outputs, pullback = recorded
    pushed: tuple[Tensor, ...] = torch.func.vjp(lambda *u: pullback(u), *map(torch.zeros_like, outputs))[1](tangents)
    return pushed


def _exchanged(inputs: Tensors, positions: Sequence[int], replacements: Tensors) -> list[Tensor]:
    result = list(inputs)
    for i, each in zip(positions, replacements, strict=True):
        result[i] = each
    return result


def is_differentiable(tensor: Tensor) -> bool:
    """Whether a tensor's dtype has derivatives."""
    return tensor.is_floating_point() or tensor.is_complex()


def first_run(program: Program, inputs: Tensors, constants: Tensors) -> tuple[Tensor, ...]:
    """Run a program at detached inputs, and raise if its outputs depend on other tensors that require a gradient."""
    # Only operands are known to require a gradient, so anything else recorded comes from one that was overlooked.
    with torch.enable_grad(), set_tangents(True):
        try:
            outputs = program.run(*constants)
        except RuntimeError as error:  # the program takes a gradient itself
            if not says(error, Wording.NO_GRAPH):
                raise
            any_recorded = any(each.requires_grad for each in inputs)  # transforms do not show by which
            for each, given in zip(constants, inputs, strict=True):
                each.requires_grad_(is_differentiable(each) and (given.requires_grad or not any_recorded))
            outputs = program.run(*constants)
        _require_operands(program, outputs, constants)
    return outputs


def _require_operands(program: Program, outputs: Tensors, operands: Tensors) -> None:
    """Raise if a program depends on tensors that are not its operands, because their derivatives would be lost."""
    if any(map(has_tangent, outputs)):
        raise hidden_tensor(program.name, "a dual number")
    others = _other_leaves(outputs, operands)
    # Leaves that the program creates itself, to take gradients, are new in each run.
    again = {id(each) for each in _other_leaves(program.run(*operands), operands)} if others else ()
    for leaf in others:
        if id(leaf) in again:
            raise hidden_tensor(program.name, leaf)


def _other_leaves(outputs: Tensors, operands: Tensors) -> list[Tensor]:
    known = {id(each) for each in operands}
    return [leaf for output in outputs for leaf in inspect_graph(output)[0] if id(leaf) not in known]
