"""Jets: truncated power series that replace tensors inside of a function and support torch's functions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeGuard

import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.taylor.python_operators import PythonOperators
from hodiff.taylor.running import as_constant, is_constant_here
from hodiff.taylor.series import Coefficient, Coefficients, Frame
from hodiff.torch_internals.autograd.transforms import at_level, in_transform
from hodiff.torch_internals.autograd.wrapped_tensors import level_of
from hodiff.torch_internals.tensors import VERSION, without_memory


class Jet(PythonOperators):
    """A truncated power series that replaces a tensor.

    `new_jet` creates a `TensorJet`, which is a tensor to Python and torch. A compiler cannot trace the construction of
    Tensor subclasses; there `new_jet` creates this class, which is not a tensor to `isinstance`.

    Args:
        frame: Frame of the call.
        coefficients: Coefficients in rising order, the value first.
        support: Directions of the slots of coefficients, unless these hold all directions in order.
    """

    # Marks the class for corrections and `hodiff.common.overriding`: it has rules for all functions.
    is_stand_in = True
    # NumPy defers operators to the jet.
    __array_ufunc__ = None

    def __init__(self, frame: Frame, coefficients: Coefficients, support: Any = None):
        self.frame = frame
        self.held = tuple(coefficients)
        self.support = support
        self._whole: tuple[Coefficient, ...] | None = None
        # Number of writes. A view also has its base, the function that takes it from the base, and the base's version
        # at the last update.
        self.version = 0
        self.base: Jet | None = None
        self.taken: Callable[[Any], Any] | None = None
        # Whether the base stores values written to the view unchanged.
        self.exact = True
        # Whether it depends on a length that is 0, which moves differently on the two sides of the point.
        self.is_kinked = False
        self._seen = 0

    @property
    def coefficients(self) -> tuple[Coefficient, ...]:
        """Coefficients for all directions, the value first; None is zero."""
        held = self.in_slots()
        if self.support is None:
            return held
        if self._whole is None:
            whole = self.support.dense
            # Transforms that began after the coefficients were computed must not wrap the cached result, which outlives
            # them.
            with at_level(level_of_all(held)) if in_transform() else nullcontext():
                self._whole = tuple(whole(each) if self.frame.has_axis(k) else each for k, each in enumerate(held))
        return self._whole

    def in_slots(self) -> tuple[Coefficient, ...]:
        """Coefficients for the directions of the support alone, the value first."""
        base = self.base
        if base is not None and self.taken is not None:
            held = base.in_slots()
            if base.version != self._seen:
                again = self.taken(new_jet(self.frame, held, base.support))
                self.held, self.support, self._whole = again.in_slots(), again.support, None
                self._seen = base.version
                self.version += 1
        return self.held

    @property
    def value(self) -> Any:
        """Coefficient 0."""
        return self.in_slots()[0]

    def is_moving(self) -> bool:
        """Whether it has derivatives that are not switched off."""
        frame = self.frame
        if frame.ended or frame.moment is as_constant or (frame.moment is None and is_constant_here(frame)):
            return False
        return any(each is not None for each in self.in_slots()[1:])

    def as_view(self, base: Jet, taken: Callable[[Any], Any], *, exact: bool = True) -> Jet:
        """Make this jet a view of `base`, which sees writes to the base."""
        base.in_slots()  # Updates the base's version.
        self.base, self.taken, self._seen, self.exact = base, taken, base.version, exact
        return self

    def write(self, coefficients: Coefficients, support: Any = None) -> Jet:
        """Replace the coefficients, in place."""
        self.in_slots()
        self.held, self.support, self._whole = tuple(coefficients), support, None
        self.version += 1
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        jets = [*jets_in(args), *jets_in(kwargs)] if kwargs else [*jets_in(args)]
        return jets[0].frame.handle(jets, func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(Tensor, name, None)
        if found is None:
            raise AttributeError(f"a jet has no attribute {name!r}, nor has a tensor")
        if callable(found):
            return _Method(self, found)
        return self.__torch_function__(found.__get__, (), (self,))

    @property
    def requires_grad(self) -> bool:
        """Whether the value requires a gradient."""
        return bool(self.value.requires_grad)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.__torch_function__(Tensor.requires_grad_, (), (self, value))

    def is_complex(self) -> bool:
        """Whether the value is complex."""
        return bool(self.value.is_complex())

    def is_floating_point(self) -> bool:
        """Whether the value is floating-point."""
        return bool(self.value.is_floating_point())

    @property
    def H(self) -> Any:  # noqa: N802
        """Conjugate transpose of a matrix."""
        return self.__torch_function__(Tensor.adjoint, (), (self,))

    mH = H  # noqa: N815

    @property
    def T(self) -> Any:  # noqa: N802
        """Jet with its dimensions reversed."""
        this: Any = self
        return torch.permute(this, tuple(reversed(range(self.value.ndim))))

    @property
    def mT(self) -> Any:  # noqa: N802
        """Jet with its last two dimensions swapped."""
        this: Any = self
        return torch.transpose(this, -2, -1)

    def as_subclass(self, cls: type[Tensor]) -> Any:
        """Alias of the jet; torch's method reaches neither `__torch_function__` nor a rule."""
        if cls is not Tensor:
            raise InputError(
                f"jet: as_subclass: expected torch.Tensor for a jet, got {cls.__name__}; the jet already has all "
                "functions and methods of a tensor."
            )
        return self.__torch_function__(Tensor.view_as, (), (self, self))

    # Python looks up these methods on the type, not on the instance.
    def __repr__(self) -> str:
        if self.frame.ended:
            return repr(self.value)
        along = "" if self.frame.directions is None else f", {self.frame.directions} directions"
        return f"Jet(order {self.frame.order}{along}, value {self.value!r})"

    def __format__(self, specification: str) -> str:
        return format(self.value, specification)

    def __deepcopy__(self, memo: Any) -> Any:
        if self.frame.ended:
            return copy.deepcopy(self.value, memo)
        return new_jet(self.frame, [each.clone() if isinstance(each, Tensor) else each for each in self.coefficients])

    def __len__(self) -> int:
        if self.value.ndim == 0:
            raise TypeError(
                "len() of a 0-d tensor, which is a jet: torch.tensor and torch.as_tensor do not support jets, "
                "expected torch.stack, or the jet itself."
            )
        return len(self.value)

    def __iter__(self) -> Iterator[Any]:
        this: Any = self
        return iter(torch.unbind(this))

    def __bool__(self) -> bool:
        return bool(self.value)

    def __hash__(self) -> int:
        return id(self)


def level_of_all(coefficients: Sequence[Coefficient]) -> int:
    """Level of the innermost transform that wraps a coefficient; 0 if none does."""
    levels = [level_of(tensor_of(each)) for each in coefficients if isinstance(each, (Tensor, Jet))]
    return max(0, *levels)


def jets_in(tree: Any) -> Iterator[Jet]:
    """Yield the jets in a tree of lists, tuples and dicts."""
    if isinstance(tree, Jet):
        yield tree
    elif isinstance(tree, (list, tuple, dict)):
        for each in tree.values() if isinstance(tree, dict) else tree:
            if isinstance(each, Jet):
                yield each
            elif isinstance(each, (list, tuple, dict)):
                yield from jets_in(each)


def is_plain_tensor(x: Any) -> TypeGuard[Tensor]:
    """Whether x is a tensor and not a jet."""
    return isinstance(x, Tensor) and not isinstance(x, Jet)


def tensor_of(x: Any) -> Any:
    """The tensor below all jets."""
    while isinstance(x, Jet):
        x = x.value
    return x


class _Method:
    """A tensor method bound to a jet."""

    def __init__(self, jet: Jet, function: Any):
        self.jet = jet
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.jet.__torch_function__(self.function, (), (self.jet, *args), kwargs)


def _part(name: str) -> property:
    """Real or imaginary part, which shows the memory of the jet."""
    descriptor = getattr(Tensor, name)

    def get(self: Jet) -> Any:
        this: Any = self
        return getattr(torch, name)(this)

    def put(self: Jet, value: Any) -> None:
        self.__torch_function__(descriptor.__set__, (), (self, value))

    return property(get, put)


# Attributes that are read from the value.
_AS_THE_VALUE = (
    *("shape", "ndim", "dtype", "device", "layout", "is_cuda", "is_sparse", "is_quantized", "is_nested", "is_meta"),
    *("itemsize", "nbytes", "is_mps", "is_cpu", "is_leaf", "is_mkldnn", VERSION),
)


def _of_value(name: str) -> property:
    def get(self: Jet) -> Any:
        return getattr(self.value, name)

    return property(get)


def _refused(name: str) -> property:
    def refuse(self: Jet, *_: Any) -> Any:
        if self.frame.ended and not _:
            return getattr(self.value, name)
        raise InputError(
            f"jet: .{name} of a jet is not supported: use x.detach() for its value as a constant. If a library calls "
            "it, such as torchdiffeq's adaptive solvers, use hodiff.hessian or hodiff.jacobian."
        )

    return property(refuse, refuse)


for _name in _AS_THE_VALUE:
    setattr(Jet, _name, _of_value(_name))
for _name in ("real", "imag"):
    setattr(Jet, _name, _part(_name))
for _name in ("data", "grad"):
    setattr(Jet, _name, _refused(_name))


class TensorJet(Jet, Tensor):  # type: ignore[misc,override]
    """A jet that is a tensor to `isinstance`, `match`, dispatch by type, and methods called as `torch.Tensor.sin(x)`.

    The underlying tensor has no memory: torch's functions reach `__torch_function__`; calls that bypass it are refused.
    """

    def __new__(cls, frame: Any, coefficients: Any, *_: Any) -> TensorJet:
        """Create the underlying tensor, with the dtype and device of the value."""
        return without_memory(cls, coefficients[0])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise InputError(
            f"jet: {func} is called where the derivatives of a jet would be lost, such as by torch.tensor(x), a C++ "
            "extension or within DisableTorchFunctionSubclass: expected functions and methods of torch, torch.stack "
            "of jets, or x.detach() for a constant."
        )


def new_jet(frame: Frame, coefficients: Coefficients, support: Any = None) -> Jet:
    """Create a `TensorJet`, or a `Jet` under a compiler."""
    if torch.compiler.is_compiling():
        return Jet(frame, coefficients, support)
    return TensorJet(frame, coefficients, support)
