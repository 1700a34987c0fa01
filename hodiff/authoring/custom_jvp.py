"""`custom_jvp`: a rule for forward mode, from which reverse mode follows by transposition."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.authoring.closures import recorded
from hodiff.authoring.custom_function import RuleCall, Tensors
from hodiff.authoring.custom_rule import CustomRule
from hodiff.authoring.rule_checks import require_linear, require_same_value
from hodiff.authoring.rule_trees import TreeLayout, differentiable, kind
from hodiff.authoring.transposition import transpose
from hodiff.errors import InputError


class CustomJVP(CustomRule):
    """A function whose derivatives of every kind and order follow from a rule for its tangents; see `custom_jvp`."""

    def __init__(self, f: Callable[..., Any], nondiff_argnums: int | Sequence[int] = ()):
        super().__init__(f, nondiff_argnums, "custom_jvp", "defjvp")
        self.rule: Callable[..., Any] = f

    def defjvp(self, rule: Callable[..., Any], symbolic_zeros: bool = False) -> Callable[..., Any]:
        """Define the rule.

        Args:
            rule: `rule(primals, tangents) -> (primal_out, tangent_out)`, composed of differentiable torch operators and
                linear in the tangents. With `nondiff_argnums`, the static arguments come first, one by one.
            symbolic_zeros: Whether zero tangents are passed as None, which saves work, instead of zero tensors.

        Returns:
            The rule, so that `defjvp` works as a decorator.
        """
        self._define(symbolic_zeros, rule)
        self.rule = rule
        return rule

    def defjvps(self, *rules: Callable[..., Any] | None) -> None:
        """Define one rule per argument; only rules of arguments with a tangent are called.

        Args:
            *rules: `rule(tangent, output, *primals) -> tangent_out` for each argument, which returns its contribution,
                or None if the output does not depend on the argument.

        Raises:
            InputError: If there are not as many rules as arguments, or some arguments are static.
        """
        if self.signature.static:
            raise InputError(
                f"custom_jvp: {self.__name__}.defjvps: expected no nondiff_argnums, got {self.signature.static}; "
                "use defjvp."
            )
        if self.signature.exact not in {-1, len(rules)}:
            raise InputError(
                f"custom_jvp: {self.__name__}.defjvps: expected one rule for each of {self.signature.exact} arguments, "
                f"got {len(rules)}; pass None for an argument without a derivative."
            )

        def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
            output = self(*primals)
            total = None
            for each, tangent in zip(rules, tangents, strict=True):
                if each is not None and tangent is not None:
                    term = each(tangent, output, *primals)
                    total = term if total is None else total + term
            return output, total

        self._define(True, *(each for each in rules if each is not None))
        self.rule = rule

    def _check(self, call: Any, leaves: list[Tensor], seed: int) -> None:
        values = call.forward(leaves)
        primals, _ = call.run_rule(leaves, [None] * len(leaves))
        require_same_value(f"{self.__name__}: primal_out", call.flatten_output_like(primals, "primal_out"), values)
        require_linear(f"{self.__name__}: tangent_out", lambda t: call.pushforward(leaves, t), leaves, seed)

    def _call(self, static: tuple[Any, ...], layout: TreeLayout | None, transformed: bool) -> RuleCall:
        return JVPCall(self, static, layout, transformed)


class JVPCall(RuleCall):
    """A call whose pushforward is the user's rule and whose pullback is the transpose."""

    __slots__ = ("owner",)

    def __init__(self, owner: CustomJVP, static: tuple[Any, ...], layout: TreeLayout | None, transformed: bool):
        super().__init__(owner.signature, static, layout, transformed)
        self.owner = owner

    def forward(self, leaves: Tensors) -> tuple[Tensor, ...]:
        """Evaluate the function."""
        return tuple(self.take_output(recorded(self.name, self.owner.f, self.all_arguments(leaves))))

    def run_rule(self, leaves: Tensors, tangents: Tensors) -> tuple[Any, Any]:
        """Run the rule and return its primal and tangent outputs."""
        symbolic = self.owner.symbolic_zeros
        if not symbolic and any(t is None for t in tangents):
            tangents = [
                torch.zeros_like(x) if t is None and differentiable(x) else t
                for x, t in zip(leaves, tangents, strict=True)
            ]
        shaped = tuple(tangents) if self.layout is None else self.layout.fill_tangents(tangents, symbolic)
        result = self.in_modes(self.owner.rule, *self.static, self.arguments(leaves), shaped)
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise InputError(f"{self.name}: rule: expected (primal_out, tangent_out), got {kind(result)}.")
        return result[0], result[1]

    def pushforward(self, leaves: Tensors, tangents: Tensors) -> list[Tensor | None]:
        """Run the rule and check its results."""
        primals, tangent = self.run_rule(leaves, tangents)
        if isinstance(primals, Tensor) and isinstance(tangent, Tensor) and self.output is None:
            ((shape, dtype),) = self.like
            if primals.shape == shape == tangent.shape and tangent.dtype == dtype and differentiable(tangent):
                return [tangent]
        for primal, (shape, _) in zip(self.flatten_output_like(primals, "primal_out"), self.like, strict=True):
            if not isinstance(primal, Tensor) or primal.shape != shape:
                got = tuple(primal.shape) if isinstance(primal, Tensor) else type(primal).__name__
                raise InputError(f"{self.name}: primal_out: expected shape {tuple(shape)}, got {got}.")
        return self.tangents_of_output(tangent)

    def pullback(
        self, leaves: Tensors, kept: Tensors | None, needed: Sequence[bool], cotangents: Tensors
    ) -> list[Tensor | None]:
        """Transpose the rule; if that calls the function again (a linear one), use the gradient of its body."""
        del kept
        if self.owner in _TRANSPOSED.owners:
            return transpose_of(self._shift, leaves, needed, cotangents)
        _TRANSPOSED.owners.append(self.owner)
        try:
            return transpose_of(self.pushforward, leaves, needed, cotangents)
        finally:
            _TRANSPOSED.owners.pop()

    def _shift(self, leaves: Tensors, tangents: Tensors) -> list[Tensor]:
        """Evaluate the function at the leaves plus the tangents."""
        moved = [x if t is None else x + t for x, t in zip(leaves, tangents, strict=True)]
        return self.take_output(self.in_modes(self.owner.f, *self.all_arguments(moved)))


class _Transposed(threading.local):
    """Functions whose rules are being transposed in this thread."""

    def __init__(self) -> None:
        self.owners: list[CustomJVP] = []


_TRANSPOSED = _Transposed()


def transpose_of(
    pushforward: Callable[..., Any], leaves: Tensors, needed: Sequence[bool], cotangents: Tensors
) -> list[Tensor | None]:
    """Cotangents of the leaves that need one, by transposing the pushforward; None is zero."""
    if all(needed):
        return transpose(lambda tangents: pushforward(leaves, tangents), list(leaves), cotangents)
    chosen = [i for i, need in enumerate(needed) if need]

    def restricted(some: list[Tensor]) -> Any:
        tangents: list[Tensor | None] = [None] * len(leaves)
        for i, tangent in zip(chosen, some, strict=True):
            tangents[i] = tangent
        return pushforward(leaves, tangents)

    found = transpose(restricted, [leaves[i] for i in chosen], cotangents)
    result: list[Tensor | None] = [None] * len(leaves)
    for i, each in zip(chosen, found, strict=True):
        result[i] = each
    return result


def custom_jvp(f: Callable[..., Any] | None = None, *, nondiff_argnums: int | Sequence[int] = ()) -> Any:
    r"""Give a function a rule for its tangents, from which every other derivative follows.

    With a rule for the Jacobian-vector product, reverse mode is its transpose,

    $$ \dot y = L(x) \, \dot x, \qquad \bar x = L(x)^T \bar y, $$

    and higher derivatives differentiate $x \mapsto L(x)$ as the rule computes it. Reverse and forward mode of every
    order and in every composition, `torch.func.vmap` and `torch.compile` work. All follow the rule, which need not be
    the derivative of the function. The rule may call the function itself.

    A forward pass saves only the tensor arguments. Backward evaluates the rule, and the function if the rule calls it.
    A backward pass thus costs about one forward pass more than a hand-written one.

    Args:
        f: The function: takes tensors, pytrees of tensors and constants, and returns a tensor or a pytree. Keyword
            arguments are resolved to positions. Tensors that are to be differentiated must be arguments.
        nondiff_argnums: Positions of arguments that are passed to the rule unchanged, before primals and tangents:
            functions, strings, settings.

    Returns:
        The function, with `defjvp(rule)` for `rule(primals, tangents) -> (primal_out, tangent_out)`, or `defjvps` for
        one rule per argument, and `check_rule(*args)`. Tangents have the structure of the arguments; tangents of
        integer tensors and of constants other than numbers are None. A rule may return None for a zero tangent. Without
        `f`, returns a decorator.

    Raises:
        InputError: If the function has keyword-only parameters, has no rule when called, closes over a tensor with a
            derivative, or if its rule returns something of another structure or shape.

    Example:
        >>> import torch, hodiff
        >>> from hodiff.authoring import custom_jvp
        >>> @custom_jvp
        ... def log1pexp(x):
        ...     return torch.log1p(torch.exp(x))
        >>> @log1pexp.defjvp
        ... def rule(primals, tangents):
        ...     (x,), (x_dot,) = primals, tangents
        ...     return log1pexp(x), torch.sigmoid(x) * x_dot
        >>> torch.func.grad(log1pexp)(torch.tensor(100.0))
        tensor(1.)
        >>> torch.func.grad(torch.func.grad(log1pexp))(torch.tensor(0.0))
        tensor(0.2500)
        >>> bool(hodiff.check(log1pexp, torch.tensor([-1.0, 2.0], dtype=torch.float64), order=3).ok)
        True

    Source:
        JAX, "Custom derivative rules for JAX-transformable Python functions", `jax.custom_jvp`; transposition:
        A. Radul et al., You Only Linearize Once (POPL 2023).
    """
    if f is None:
        return lambda f: CustomJVP(f, nondiff_argnums)
    return CustomJVP(f, nondiff_argnums)
