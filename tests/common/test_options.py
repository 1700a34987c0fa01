"""Option validators: the values that they accept, and their messages for other values."""

import math

import pytest
import torch

from hodiff import InputError
from hodiff.common import options

TAKEN = {
    "an int": lambda: options.require_int("f", "n", -3),
    "a least int": lambda: options.require_int("f", "n", 1, 1),
    "a bounded int": lambda: options.require_int("f", "n", 4, 1, 4),
    "no int": lambda: options.require_int("f", "n", None, 1, optional=True),
    "a number": lambda: options.require_number("f", "x", -math.inf),
    "an int for a number": lambda: options.require_number("f", "x", 2, positive=True, finite=True),
    "zero": lambda: options.require_number("f", "x", 0, nonnegative=True),
    "an end": lambda: options.require_number("f", "x", 1, within=(0, 1)),
    "no number": lambda: options.require_number("f", "x", None, positive=True, optional=True),
    "an amount": lambda: options.require_amount("f", "x", 0.0),
    "a switch": lambda: options.require_bool("f", "on", False),
    "a choice": lambda: options.require_choice("f", "kind", "b", {"a": 1, "b": 2}),
    "no choice": lambda: options.require_choice("f", "kind", None, ["a"], optional=True),
    "a callable": lambda: options.require_callable("f", g=len, h=torch.nn.ReLU()),
}

REFUSED = {
    "a bool for an int": (lambda: options.require_int("f", "n", True), "f: n: expected an int, got True."),
    "a float for an int": (lambda: options.require_int("f", "n", 1.0, 0), "expected an int of 0 or more, got 1.0."),
    "too small": (lambda: options.require_int("f", "n", 0, 1), "expected an int of 1 or more, got 0."),
    "too large": (lambda: options.require_int("f", "n", 5, 1, 4), "expected an int from 1 to 4, got 5."),
    "None for an int": (lambda: options.require_int("f", "n", None), "expected an int, got None."),
    "an optional int": (
        lambda: options.require_int("f", "n", 0, 1, optional=True, remedy="None is exact"),
        "expected an int of 1 or more or None, got 0; None is exact.",
    ),
    "a bool for a number": (lambda: options.require_number("f", "x", False), "f: x: expected a number, got False."),
    "a tensor": (lambda: options.require_number("f", "x", torch.zeros(2)), "expected a number, got (2,) float32."),
    "not positive": (lambda: options.require_number("f", "x", 0, positive=True), "expected a positive number, got 0."),
    "nan": (lambda: options.require_number("f", "x", math.nan, nonnegative=True), "a nonnegative number, got nan."),
    "outside": (lambda: options.require_number("f", "x", 1.5, within=(0, 1)), "a number from 0 to 1, got 1.5."),
    "infinite": (lambda: options.require_amount("f", "x", math.inf), "expected a nonnegative finite number, got inf."),
    "a text": (lambda: options.require_amount("f", "x", "1", positive=True), "a positive finite number, got '1'."),
    "an int for a switch": (lambda: options.require_bool("f", "on", 1), "f: on: expected True or False, got 1."),
    "no choice": (lambda: options.require_choice("f", "kind", "c", ["a", "b"]), "expected one of 'a', 'b', got 'c'."),
    "no callable": (lambda: options.require_callable("f", g=len, h=3), "f: h: expected a callable, got int."),
}


@pytest.mark.parametrize("call", TAKEN.values(), ids=TAKEN)
def test_validator_accepts(call):
    call()


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_validator_rejects_with_message(call, message):
    with pytest.raises(InputError) as refused:
        call()
    assert str(refused.value).endswith(message)
