"""`custom_vjp`: a rule for reverse mode, from which forward mode follows by transposition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.authoring.closures import recorded
from hodiff.authoring.custom_function import RuleCall, Tensors
from hodiff.authoring.custom_rule import CustomRule
from hodiff.authoring.rule_checks import require_linear, require_same_value, require_unchanged, versions_of
from hodiff.authoring.rule_trees import TreeLayout, differentiable, flatten_like, kind
from hodiff.authoring.transposition import transpose
from hodiff.errors import InputError


class CustomVJP(CustomRule):
    """A function whose derivatives of every kind and order follow from a rule for cotangents; see `custom_vjp`."""

    def __init__(self, f: Callable[..., Any], nondiff_argnums: int | Sequence[int] = ()):
        super().__init__(f, nondiff_argnums, "custom_vjp", "defvjp")
        self.forward: Callable[..., Any] = f
        self.backward: Callable[..., Any] = f

    def defvjp(self, forward: Callable[..., Any], backward: Callable[..., Any], symbolic_zeros: bool = False) -> None:
        """Define the rule.

        Args:
            forward: `forward(*args) -> (output, residuals)` with the arguments of the function; residuals are any
                pytree. It is composed of differentiable torch operators, as second derivatives differentiate it.
            backward: `backward(residuals, cotangent) -> cotangents`, linear in the cotangent: a tuple with one entry
                per argument, with the argument's structure; None is zero. With `nondiff_argnums`, the static arguments
                come first, one by one, and have no entry.
            symbolic_zeros: Whether zero parts of the cotangent are passed as None, which saves work.
        """
        self._define(symbolic_zeros, forward, backward)
        self.forward, self.backward = forward, backward

    def _check(self, call: Any, leaves: list[Tensor], seed: int) -> None:
        values = call.take_output(self.f(*call.all_arguments(leaves)))
        found = call.forward(leaves)[: len(values)]
        require_same_value(f"{self.__name__}: forward", found, values)
        everything = [differentiable(each) for each in leaves]
        require_linear(f"{self.__name__}: backward", lambda c: call.pullback(leaves, None, everything, c), values, seed)

    def _call(self, static: tuple[Any, ...], layout: TreeLayout | None, transformed: bool) -> RuleCall:
        return VJPCall(self, static, layout, transformed)


class VJPCall(RuleCall):
    """A call whose pullback is the user's rule and whose pushforward is the transpose."""

    __slots__ = ("owner", "plan", "where")

    def __init__(self, owner: CustomVJP, static: tuple[Any, ...], layout: TreeLayout | None, transformed: bool):
        super().__init__(owner.signature, static, layout, transformed)
        self.owner = owner

    def forward(self, leaves: Tensors) -> tuple[Tensor, ...]:
        """Return the rule's output and its residuals, except residuals that are arguments or outputs."""
        output, residuals = self._pair(recorded(self.name, self.owner.forward, self.all_arguments(leaves)))
        results = self.take_output(output)
        count = len(results)
        position = {id(each): ~i for i, each in enumerate(leaves)} | {id(each): i for i, each in enumerate(results)}
        parts, spec = pytree.tree_flatten(residuals)
        where: list[tuple[bool, Any]] = []
        for part in parts:
            if not isinstance(part, Tensor):
                where.append((False, part))
                continue
            if id(part) not in position:
                position[id(part)] = len(results)
                results.append(part)
            where.append((True, position[id(part)]))
        self.plan, self.where = spec, where
        self.kept = sorted({i for is_tensor, i in where if is_tensor and i >= 0})
        self.extra = len(results) - count
        return tuple(results)

    def pullback(
        self, leaves: Tensors, kept: Tensors | None, needed: Sequence[bool], cotangents: Tensors
    ) -> list[Tensor | None]:
        """Run the rule and check its results."""
        if kept is None:
            _, residuals = self._pair(self.in_modes(self.owner.forward, *self.all_arguments(leaves)))
        else:
            residuals = self._residuals(leaves, kept)
        return self._run_rule(residuals, leaves, needed, cotangents, kept or ())

    def pushforward(self, leaves: Tensors, tangents: Tensors) -> list[Tensor | None]:
        """Transpose the rule as a linear function of its cotangent."""
        output, residuals = self._pair(self.in_modes(self.owner.forward, *self.all_arguments(leaves)))
        values = [output] if self.output is None else self.output.pick(pytree.tree_leaves(output))
        moving = [each is not None for each in tangents]
        chosen = [i for i, each in enumerate(values) if differentiable(each)]

        def pull(some: list[Tensor]) -> list[Tensor | None]:
            cotangents: list[Tensor | None] = [None] * len(values)
            for i, each in zip(chosen, some, strict=True):
                cotangents[i] = each
            return self._run_rule(residuals, leaves, moving, cotangents)

        found: list[Tensor | None] = [None] * len(values)
        for i, each in zip(chosen, transpose(pull, [values[i] for i in chosen], tangents), strict=True):
            found[i] = each
        return found

    def _run_rule(
        self, residuals: Any, leaves: Tensors, needed: Sequence[bool], cotangents: Tensors, kept: Tensors = ()
    ) -> list[Tensor | None]:
        if not self.owner.symbolic_zeros:
            cotangents = [
                leaves[0].new_zeros(shape, dtype=dtype)
                if each is None and (dtype.is_floating_point or dtype.is_complex)
                else each
                for each, (shape, dtype) in zip(cotangents, self.like, strict=True)
            ]
        cotangent = cotangents[0] if self.output is None else self.output.fill_tangents(cotangents, True)
        others = [*leaves, *kept]
        before = versions_of([*cotangents, *others])
        result = self.in_modes(self.owner.backward, *self.static, residuals, cotangent)
        require_unchanged(self.name, cotangents, others, before)
        found = self._leaves_of(result, len(leaves))
        for i, (each, leaf, need) in enumerate(zip(found, leaves, needed, strict=True)):
            if not need or each is None:
                found[i] = None
            elif not isinstance(each, Tensor):
                raise InputError(f"{self.name}: backward: expected tensors or None, got {type(each).__name__}.")
            elif each.shape != leaf.shape:
                raise InputError(
                    f"{self.name}: backward: expected shape {tuple(leaf.shape)} for {self.argument_name(i)}, as the "
                    f"argument has, got {tuple(each.shape)}; sum_to_size reduces broadcasting."
                )
            elif each.dtype != leaf.dtype:
                found[i] = each.to(leaf.dtype)
        return found

    def _leaves_of(self, result: Any, leaf_count: int) -> list[Any]:
        count = leaf_count if self.layout is None else self.layout.spec.num_children
        if not isinstance(result, (tuple, list)) or len(result) != count:
            raise InputError(
                f"{self.name}: backward: expected a tuple of {count} cotangent{'s' * (count != 1)}, one for each "
                f"argument, got {kind(result)}."
            )
        if self.layout is None:
            return list(result)
        return self.layout.pick(flatten_like(tuple(result), self.layout.spec, f"{self.name}: backward"))

    def _pair(self, result: Any) -> tuple[Any, Any]:
        if not isinstance(result, tuple) or len(result) != 2:
            raise InputError(f"{self.name}: forward: expected (output, residuals), got {kind(result)}.")
        return result

    def _residuals(self, leaves: Tensors, kept: Tensors) -> Any:
        found = dict(zip(self.kept, kept, strict=True))
        return self.plan.unflatten([
            part if not is_tensor else found[part] if part >= 0 else leaves[~part] for is_tensor, part in self.where
        ])


def custom_vjp(f: Callable[..., Any] | None = None, *, nondiff_argnums: int | Sequence[int] = ()) -> Any:
    r"""Give a function a rule for its cotangents, from which every other derivative follows.

    With a rule for the vector-Jacobian product $P(x)$, forward mode is its transpose,

    $$ \bar x = P(x) \, \bar y, \qquad \dot y = P(x)^T \dot x, $$

    and higher derivatives differentiate $x \mapsto P(x)$ as forward and backward compute it. Forward is run again where
    the residuals must be differentiated, so that they are never treated as constants. Reverse and forward mode of every
    order and in every composition, `torch.func.vmap` and `torch.compile` work, and all follow the rule.

    A forward pass saves the tensor arguments and the residuals. A residual that is an argument or an output takes no
    extra memory. Under a transform of `torch.func`, and in a backward pass that is recorded, forward is evaluated
    again.

    Args:
        f: The function: takes tensors, pytrees of tensors and constants, and returns a tensor or a pytree. Keyword
            arguments are resolved to positions. Tensors that are to be differentiated must be arguments.
        nondiff_argnums: Positions of arguments that are not differentiated: functions, strings, settings. Backward
            gets them before residuals and cotangent; forward gets all arguments in their own order.

    Returns:
        The function, with `defvjp(forward, backward)` for `forward(*args) -> (output, residuals)` and
        `backward(residuals, cotangent) -> cotangents`, and `check_rule(*args)`. Cotangents are a tuple with one entry
        per differentiated argument; None, also for any part of a pytree, is zero. Without `f`, returns a decorator.

    Raises:
        InputError: If the function has keyword-only parameters, has no rule when called, closes over a tensor with a
            derivative, or if its rule returns something of another structure or shape, or writes into its cotangent or
            residuals in place.

    Example:
        >>> import torch
        >>> from hodiff.authoring import custom_vjp
        >>> @custom_vjp
        ... def clip_gradient(low, high, x):
        ...     return x.clone()
        >>> def forward(low, high, x):
        ...     return x.clone(), (low, high)
        >>> def backward(residuals, cotangent):
        ...     low, high = residuals
        ...     return None, None, cotangent.clamp(low, high)
        >>> clip_gradient.defvjp(forward, backward)
        >>> torch.func.grad(lambda x: (5 * clip_gradient(-1.0, 1.0, x)).sum())(torch.zeros(2))
        tensor([1., 1.])
        >>> @custom_vjp
        ... def product(x, y):
        ...     return x * y
        >>> product.defvjp(lambda x, y: (x * y, (x, y)), lambda saved, c: (c * saved[1], c * saved[0]))
        >>> torch.func.jvp(product, (torch.tensor(2.0), torch.tensor(3.0)), (torch.tensor(1.0), torch.tensor(1.0)))[1]
        tensor(5.)

    A nonlinear backward rule, such as the clamp above, has no transpose. Its forward mode uses the derivative of the
    rule at zero.

    Source:
        JAX, "Custom derivative rules for JAX-transformable Python functions", `jax.custom_vjp`; forward mode by two
        reverse passes: J. Townsend, A new trick for calculating Jacobian vector products (2017).
    """
    if f is None:
        return lambda f: CustomVJP(f, nondiff_argnums)
    return CustomVJP(f, nondiff_argnums)
