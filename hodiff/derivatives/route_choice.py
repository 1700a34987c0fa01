"""The choice of a route: the named route, or for "auto" the first that torch implements."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from hodiff.common.options import require_choice
from hodiff.derivatives.origin import function_at_fault, raised_by_user
from hodiff.distributed.exchanges import leave_note
from hodiff.errors import HodiffError, HodiffWarning, InputError, RouteError
from hodiff.recompute.cut_graphs import UnrecordedGradientError
from hodiff.routes import FORWARD_INSIDE, ROUTES
from hodiff.torch_internals.wording import EAGER_STANCE, UNAVAILABLE, Wording, says

T = TypeVar("T")


def require_route(caller: str, route: Any) -> None:
    """Raise unless the value is "auto" or the name of a route."""
    require_choice(caller, "route", route, ("auto", *ROUTES))


# Errors for missing derivatives for which torch's message lacks the remedy.
_EXPLAINED = {
    Wording.RANDOM: "the function draws random numbers, which would differ for each group of directions; call "
    "model.eval(), pass randomness='same' to share one draw, or use the route "
    "'reverse-over-reverse' (for a Jacobian, the mode 'reverse'), which draws once",
    Wording.INFERENCE_TENSOR: "the function closes over a tensor made under torch.inference_mode; clone it "
    "outside of that mode",
    Wording.CHANGES_CAPTURED: "the function changes a tensor in place, which torch.func refuses (batch norm updates "
    "its buffers so in training mode); call model.eval(), pass copies of the buffers through functional_call, or use "
    "the route 'reverse-over-reverse'",
    Wording.NO_HOOK: "the function registers a hook on a tensor, which needs a recorded graph; use the route "
    "'reverse-over-reverse' (for a Jacobian, the mode 'reverse')",
    Wording.SPARSE: "a sparse tensor is in the way: torch differentiates those in reverse mode only, and compressed "
    "ones (CSR, CSC, BSR, BSC) only outside of torch.func transforms; use the route 'reverse-over-reverse', or "
    ".to_sparse_coo() or .to_dense()",
    Wording.JAGGED: "a jagged nested tensor is in the way: torch differentiates those in reverse mode only, and not "
    "all of their operators twice; compute with a list of tensors, or with a padded tensor and a mask, in its place",
    Wording.VIEW_WITHOUT_GRAD: "a view that was made without a graph is written to, as torch's second derivative of "
    "unbind of a nested tensor does; compute with a list of tensors in its place",
    Wording.WRAPPER_WITHOUT_MEMORY: "torch has no forward mode for subclasses of Tensor that wrap others, such as "
    "DTensor; use the route 'reverse-over-reverse' (for a Jacobian, the mode 'reverse'), or pass ordinary tensors",
    Wording.MIXED_WITH_DTENSORS: "a DTensor meets an ordinary tensor, one of the function's or one of this transform's "
    "own vectors; hodiff.hvp, value_grad_hvp, grad_and_hvp, HessianOperator, GaussNewtonOperator and FisherOperator "
    "support DTensors, if all tensors of the function are DTensors; or pass full_tensor() of them",
    Wording.COMPILED_GRADIENT: "the graph was made by code of torch.compile, whose gradient has no derivative; make it "
    f"within `{EAGER_STANCE}`, or pass a function or closure that makes it, in which hodiff does so",
    Wording.DONATED_BUFFERS: "the graph was made by code of torch.compile, which gives its memory away in the first "
    f"backward pass, and this derivative takes another one; make it within `{EAGER_STANCE}`, or pass a function or "
    "closure that makes it, in which hodiff does so",
    Wording.REENTRANT_CHECKPOINT: "torch.utils.checkpoint with use_reentrant=True supports loss.backward() only; pass "
    "use_reentrant=False, in transformers as gradient_checkpointing_kwargs={'use_reentrant': False}",
    Wording.HIGHER_ORDER: "an operator that takes functions is in the way, such as torch.cond, scan or flex_attention, "
    "which torch compiles before it is run; use plain Python instead, `if` and `for`, or "
    "hodiff.functions.flex_attention",
}

# Remedies for derivatives that torch lacks, and that its message names.
_INSTEAD = {
    Wording.SAMPLE_OF_GAMMA: "torch has no second derivative of samples of Gamma, Beta, Dirichlet, StudentT and other "
    "distributions made of them with respect to their parameters; detach the sample, and use the score-function "
    "estimate, of f(sample) * log_prob(sample), or use a distribution such as LogNormal or LogisticNormal",
    Wording.ORDER_OF_FUNCTION: "torch has no derivative of igamma, igammac and zeta with respect to their first "
    "argument; detach it, or define the derivative by hodiff.custom_jvp",
    Wording.EMBEDDING_BAG: "torch has no second derivative of embedding_bag, and hodiff's rule does not take "
    "sparse=True, as sparse gradients are torch's alone; set sparse=False, and correct=True",
}

# Inside of a transform these errors mean a missing derivative; elsewhere they are the user's own errors.
_UNRECORDED = (Wording.NO_GRAPH, Wording.NOT_IN_GRAPH)
_WHY_UNRECORDED = (
    "the function computes a gradient with respect to a tensor that it closes over, which transforms do not record; "
    "pass that tensor as an argument, or use the route 'reverse-over-reverse'"
)
_NO_JVP_IN_BATCH = (
    "it has generate_vmap_rule=True, and no jvp, or does not call ctx.save_for_forward for it; give it a jvp, or use "
    "the route 'reverse-over-reverse' (for a Jacobian, the mode 'reverse')"
)


def unavailable(error: Exception) -> bool:
    """Whether an exception means that torch lacks the derivative on this route; user errors never do."""
    if isinstance(error, UnrecordedGradientError):
        return True
    if isinstance(error, HodiffError) or raised_by_user(error):
        return False
    if isinstance(error, (AssertionError, KeyError)):  # of dynamo inside a transform, and of a Function in a batch
        return says(error, Wording.HIGHER_ORDER, Wording.NO_JVP_IN_BATCH)
    if isinstance(error, (AttributeError, ValueError)):
        return says(error, Wording.JAGGED)
    return isinstance(error, NotImplementedError) or (
        isinstance(error, RuntimeError) and says(error, *UNAVAILABLE, *_EXPLAINED)
    )


def takes_unrecorded(error: Exception) -> bool:
    """Whether the error says that a function takes a gradient with respect to something that was not recorded."""
    return isinstance(error, RuntimeError) and says(error, *_UNRECORDED)


def _explanation(error: Exception) -> str | None:
    """Return the remedy for an error whose message lacks one, or None."""
    if says(error, Wording.NO_JVP_IN_BATCH):
        return f"{function_at_fault(error) or 'a Function'}: {_NO_JVP_IN_BATCH}"
    return next((explanation for words, explanation in _EXPLAINED.items() if says(error, words)), None)


def _instead(error: Exception) -> str:
    """Return the remedy for a derivative that torch lacks by every route, or ""."""
    said = f"{error} {function_at_fault(error)}"
    return next((remedy for words, remedy in _INSTEAD.items() if says(said, words)), "")


def _reason(error: Exception) -> str:
    if says(error, *_UNRECORDED):
        return _WHY_UNRECORDED
    explanation = _explanation(error)
    if explanation is not None:
        return explanation
    name = function_at_fault(error)
    return f"{name}: " * bool(name) + str(error).strip().split("\n")[0]


_CHECK = "hodiff.check says which operator is at fault, hodiff.functions has many that are differentiable to any order"


@contextmanager
def refused(caller: str, remedy: str = _CHECK) -> Iterator[None]:
    """Turn the many errors that torch raises for a missing derivative into a `RouteError`."""
    try:
        yield
    except Exception as error:
        raise_if_unavailable(error, caller, remedy)
        raise


def raise_if_unavailable(error: Exception, caller: str, remedy: str = _CHECK) -> None:
    """Raise a `RouteError` for an error that torch raises for a missing derivative."""
    if unavailable(error):
        reason = str(error).strip().splitlines()[0].rstrip(".")
        # Explained errors include their own remedy.
        said = _explanation(error) or f"{reason}; {_instead(error) or remedy}"
        raise RouteError(f"{caller}: torch does not implement this derivative: {said}.") from error


def follow(route: str, caller: str, attempt: Callable[[str], T], order: Sequence[str] = ROUTES) -> T:
    """Run an attempt by the named route; for "auto", by the first route of `order` that torch implements.

    Args:
        route: A route, or "auto".
        caller: The public function, for the error message.
        attempt: A function of a route's name.
        order: The routes that "auto" tries, in this order.

    Returns:
        The result of the attempt.

    Raises:
        RouteError: If the route, or with "auto" every route, is not implemented.
    """
    candidates = order if route == "auto" else (route,)
    if torch.compiler.is_compiling():
        return attempt(candidates[0])
    said: dict[str, Exception] = {}
    for name in candidates:
        try:
            result = attempt(name)
        except Exception as error:
            # Once a route has failed, a later one may lose the derivative on its way.
            lost = bool(said) and isinstance(error, InputError)
            if not unavailable(error) and not lost and not (name != ROUTES[0] and takes_unrecorded(error)):
                leave_note(error)
                raise
            said[name] = error
            if isinstance(error, UnrecordedGradientError):
                break  # the other routes use the rule for forward mode, which was not checked
            continue
        if said and name in FORWARD_INSIDE:
            warnings.warn(
                f"{caller}: took {name}, as torch does not implement {' and '.join(said)} here. In this route, "
                f"torch's forward rules of some operators are silently wrong. hodiff corrects the operators in "
                f"hodiff.corrections.table(), unless correct=False; compare with hodiff.check(f, x).",
                HodiffWarning,
                stacklevel=4,
            )
        return result
    listing = "\n".join(f"  {name}: {_reason(error)}" for name, error in said.items())
    # Callers without a choice have a single route.
    remedy = "" if route == "auto" or caller == "directional_derivatives" else '\n"auto" tries the others.'
    instead = next(filter(None, map(_instead, said.values())), "")
    remedy = f"\n{instead[0].upper()}{instead[1:]}." if instead else remedy
    raise RouteError(f"{caller}: torch does not implement this derivative.\n{listing}{remedy}") from next(
        iter(said.values())
    )
