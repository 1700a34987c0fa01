"""Validation of the arguments of `check`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from hodiff.checks.check_options import WRT
from hodiff.common.options import is_int, require_bool, require_choice, require_number
from hodiff.common.trees import tensors_in
from hodiff.errors import InputError


def require_function(f: Any) -> None:
    """Raise InputError unless f is a callable or a Function class."""
    if not callable(f):
        raise InputError(
            "check: f: expected a callable or a torch.autograd.Function subclass, "
            f"got {type(f).__name__}. Pass the function itself, not its result."
        )


def require_numbers(f: Any, inputs: Any) -> None:
    """Raise InputError for tensors on the device "meta", which have no numbers to compare."""
    held = (*f.parameters(), *f.buffers()) if isinstance(f, torch.nn.Module) else ()
    for each in (*tree_leaves(inputs), *held):
        if isinstance(each, Tensor) and each.is_meta:
            where = "f" if any(each is one for one in held) else "inputs"
            raise InputError(
                f"check: {where}: expected tensors with numbers, got one of shape {tuple(each.shape)} on the device "
                '"meta". Create it on another device, such as by module.to_empty(device="cpu") and an initialization; '
                "hodiff.preflight needs no numbers."
            )


def require_loss(f: Any, loss: Any, reference: Any) -> None:
    """Raise InputError if a loss is given for a function, with a reference, or is not callable."""
    if loss is None:
        return
    if not isinstance(f, torch.nn.Module):
        raise InputError(
            f"check: loss: expected None unless f is a torch.nn.Module, got a loss for {type(f).__name__}. "
            "Compose loss and f, and check the composition."
        )
    if reference:
        raise InputError(
            f"check: reference: expected None with a loss, got {reference!r}. reference is for functions; check the "
            "functions that the module calls."
        )
    if not callable(loss):
        raise InputError(
            f"check: loss: expected a function of the module's output, got {type(loss).__name__}. "
            "Bind the target: `loss=lambda output: F.mse_loss(output, target)`."
        )


def require_module(f: torch.nn.Module, args: tuple[Any, ...], wrt: Any, fixed: Any) -> None:
    """Raise InputError for a module without Python code, and for wrong variables to differentiate by."""
    if isinstance(f, torch.jit.ScriptModule):
        raise InputError(
            "check: f: expected a module in Python, got a scripted or traced module, whose submodules and calls are "
            "not visible. Check the original module, or this one as a function: `hodiff.check(lambda x: module(x), x)`."
        )
    count = len(args)
    if not isinstance(fixed, (tuple, list)) or not all(is_int(each) and 0 <= each < count for each in fixed):
        raise InputError(
            f"check: fixed: expected a tuple of positions of the {count} inputs, from 0 to {count - 1}, got {fixed!r}; "
            "for only the first, pass `fixed=(0,)`."
        )
    require_choice("check", "wrt", wrt or "both", WRT)


def require_inputs(f: Any, wrt: Any, fixed: Any) -> None:
    """Raise InputError for options of modules, as a function is differentiated by all its floating inputs."""
    name = "wrt" if wrt not in (None, "inputs") else "fixed" if fixed else ""
    if name:
        raise InputError(
            f"check: {name}: expected nothing for a function, got {fixed if name == 'fixed' else wrt!r} for "
            f"{getattr(f, '__name__', type(f).__name__)}. A function is differentiated with respect to its "
            "floating-point inputs: close over constants, `lambda x: f(x, c)`, and pass parameters as inputs."
        )


def require_backend(compile: Any) -> None:
    """Raise InputError unless `compile` is a bool or the name of a backend."""
    if not isinstance(compile, str):
        require_bool("check", "compile", compile, remedy="or the name of a backend, as 'inductor'")


def require_ulps(ulps: Any, reference: Any) -> None:
    """Raise InputError unless ulps is None, or a positive number and there is a reference."""
    require_number("check", "ulps", ulps, positive=True, finite=True, optional=True)
    if ulps is not None and reference is None:
        raise InputError(
            f"check: ulps: expected None without a reference, got {ulps!r}. Pass the same function in float64 as "
            "`reference`."
        )


def under_autocast(f: Any, inputs: Any, dtype: Any, reference: Any) -> tuple[Callable[..., Any], Any, Any]:
    """Return the function under `torch.autocast`, float32 inputs, and the reference (by default the function)."""
    if dtype not in (torch.bfloat16, torch.float16) or isinstance(f, torch.nn.Module):
        got = type(f).__name__ if isinstance(f, torch.nn.Module) else repr(dtype)
        raise InputError(
            f"check: autocast: expected torch.bfloat16 or torch.float16 for a function, got {got}. For a module, "
            "check the functions that it calls."
        )
    own = f.apply if isinstance(f, type) and issubclass(f, torch.autograd.Function) else f
    tensors = tensors_in(inputs)
    device = tensors[0].device.type if tensors else "cpu"

    def cast(*args: Any) -> Any:
        with torch.autocast(device, dtype=dtype):
            return own(*args)

    cast.__name__ = f"{getattr(f, '__name__', type(f).__name__)} under autocast to {str(dtype).removeprefix('torch.')}"
    cast.__wrapped__ = own  # type: ignore[attr-defined]  # for the line of its source
    inputs = tree_map_only(Tensor, lambda each: each.float() if each.is_floating_point() else each, inputs)
    return cast, inputs, reference or own


def require_reference(reference: Any, approximate: bool) -> Callable[..., Any] | None:
    """Return the reference, a Function class as its apply; raise InputError if combined with `approximate`."""
    if reference is None:
        return None
    if isinstance(reference, type) and issubclass(reference, torch.autograd.Function):
        reference = reference.apply
    if not callable(reference):
        raise InputError(
            f"check: reference: expected the same function for float64, got {type(reference).__name__}. "
            "Pass the function itself, not its result."
        )
    if approximate:
        raise InputError(
            "check: approximate: expected False with a reference, got True. With a reference, derivatives are "
            "compared with differences of its values; pass only one of the two."
        )
    return reference
