"""Source code of calls: tensors as literals, and a sample's call as lines of plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves, tree_unflatten

from hodiff.checks.mutations.sample import Sample, is_buffer
from hodiff.common.trees import tensors_in
from hodiff.errors import HodiffError


class UnwritableError(HodiffError):
    """Call that has no source code, for example with an object as argument."""


class Code(str):
    """Text whose repr is the text itself, for arguments in source code."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def argument(sample: Sample, place: int) -> str:
    """Return the expression of a tensor of the sample, in its layout."""
    name = f"x{place}"
    return sample.layouts[place].source.format(name) if place in sample.layouts else name


def literal(x: Tensor) -> str:
    """Return an expression of a tensor's numbers."""
    if x.layout != torch.strided:
        return repr(x)
    shape = f".reshape({tuple(x.shape)})" if not x.numel() else ""
    return f"torch.tensor({x.resolve_conj().resolve_neg().tolist()}, dtype={x.dtype}){shape}"


class CallLines(TorchFunctionMode):
    """Records the torch functions that a call uses, as lines of code.

    Attributes:
        lines: The lines, one for each function that returns tensors.
        changed: Names of the tensors that a function changed in place.
    """

    def __init__(self, names: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.changed: set[str] = set()
        self._names = {id(tensor): name for name, tensor in names.items()}
        self._before = {name: tensor.clone() for name, tensor in names.items()}
        self._alive = dict(names)  # so that no other tensor gets the identity of a named one

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function, and record a line if it returns tensors."""
        kwargs = kwargs or {}
        written = [self._write(each) for each in args], {name: self._write(each) for name, each in kwargs.items()}
        result = func(*args, **kwargs)
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            name = f"y{len(self.lines)}"
            self.lines.append(f"{name} = {_call(func, *written)}")
            self._name(name, result)
        return result

    def expression(self, tensor: Tensor) -> str:
        """Return the expression of a recorded tensor."""
        if id(tensor) not in self._names:
            raise UnwritableError("a tensor was created without a torch function")
        return self._names[id(tensor)]

    def finish(self) -> None:
        """Find the inputs that were changed in place."""
        self.changed = {name for name, old in self._before.items() if not torch.equal(old, self._alive[name])}

    def _name(self, name: str, result: Any) -> None:
        if isinstance(result, Tensor):
            self._names[id(result)] = name
            self._alive[name] = result
        elif isinstance(result, (tuple, list)):
            for i, each in enumerate(result):
                self._name(f"{name}[{i}]", each)

    def _write(self, x: Any) -> str:
        if isinstance(x, Tensor):
            return self._names.get(id(x)) or literal(x)
        if isinstance(x, (tuple, list)):
            inside = ", ".join(map(self._write, x))
            return f"[{inside}]" if isinstance(x, list) else f"({inside}{',' * (len(x) == 1)})"
        if isinstance(x, float) and not math.isfinite(x):
            return f'float("{x}")'
        if isinstance(x, torch.device):
            return f'torch.device("{x}")'
        if x is None or isinstance(x, (bool, int, float, complex, str, torch.dtype, torch.memory_format, torch.layout)):
            return repr(x)
        if isinstance(x, slice) or x is Ellipsis:
            return repr(x)
        if is_dataclass(x) and type(x).__module__.startswith("torch."):
            inside = ", ".join(f"{each.name}={self._write(getattr(x, each.name))}" for each in fields(x))
            return f"{type(x).__module__}.{type(x).__qualname__}({inside})"
        raise UnwritableError(f"an argument is a {type(x).__name__}")


def _call(func: Any, args: list[str], kwargs: dict[str, str]) -> str:
    name = _function_name(func)
    rest = ", ".join([*args[1:], *(f"{key}={value}" for key, value in kwargs.items())])
    if name == "torch.Tensor.__getitem__":
        return f"{args[0]}[{rest}]"
    method = name.removeprefix("torch.Tensor.")
    if method != name and args:
        return f"{args[0]}.{method.removesuffix('.__get__')}" + (f"({rest})" if not method.endswith("__get__") else "")
    return f"{name}({', '.join(filter(None, (*args[:1], rest)))})"


def _function_name(func: Any) -> str:
    name = resolve_name(func) or f"{func.__module__}.{func.__name__}"
    name = f"torch.ops.{name}" if name.startswith("aten.") else name
    if not name.startswith("torch."):
        raise UnwritableError(f"{name} is no function of torch")
    return name


def written_call(sample: Sample) -> tuple[list[str], list[str], set[str]]:
    """Return the lines of a sample's call, the expressions of its outputs, and the tensors that it changes in place.

    The tensors of the sample have the names x0, x1, ..., by position.

    Args:
        sample: The call.

    Returns:
        Lines, expressions and names.

    Raises:
        UnwritableError: If the call cannot be written.
    """
    leaves = [leaf.detach().clone() if is_buffer(leaf) else leaf for leaf in sample.leaves]
    leaves = [sample.layouts[i].arrange(leaf) if i in sample.layouts else leaf for i, leaf in enumerate(leaves)]
    names = {f"x{i}": leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    with torch.no_grad(), CallLines(names) as recorder:
        output = sample.call(*tree_unflatten(leaves, sample.structure))
    recorder.finish()
    outputs = []
    for each in tensors_in(output):
        if each.is_complex():
            outputs.append(f"torch.view_as_real({recorder.expression(each)}.resolve_conj())")
        elif each.is_floating_point():
            outputs.append(recorder.expression(each))
    arranged = [f"x{i} = {layout.source.format(f'x{i}')}" for i, layout in sample.layouts.items()]
    return [*arranged, *recorder.lines], outputs, recorder.changed
