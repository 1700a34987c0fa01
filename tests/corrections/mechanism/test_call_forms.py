"""Equivalent forms of a call (keywords, tensors as numbers, sequences) have equal values and derivatives."""

import ast
import inspect
import itertools
import textwrap

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from corrections.calls import CALLS, CONSTANTS, ELSEWHERE, FAMILIES_ELSEWHERE, name_of
from slow_cases import slow_except
from torch.utils import _pytree as pytree

from hodiff.corrections import Corrections
from hodiff.corrections.mechanism.registry import CORRECTIONS, correction_of

# torch warns once that some functions are deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")

NUMPY = ("a", "x", "x1", "x2", "axis", "keepdims")
# Argument names of functions whose rules take any arguments
OTHERS = "batch_first bidirectional ceil_mode dropout has_biases hx input2 input3 kernel_size num_layers params train"
# Rules of operators are tested in `test_operators`.
RULES = {
    function: each
    for function, each in CORRECTIONS.items()
    if "operator" not in each.rule.__module__.rpartition(".")[2]
}
NAMES = sorted({name for each in RULES.values() for name in each.parameters.names}.union(NUMPY, OTHERS.split()))
NUMBERS = {
    bool: (torch.tensor, np.bool_, int),
    int: (torch.tensor, np.int64, np.int32, bool, float),
    float: (torch.tensor, lambda x: torch.tensor(x, dtype=torch.float32), np.float64, np.float32, int, bool),
}


def copied(arguments):
    """Copy tensors, because calls may write into them."""
    return pytree.tree_map_only(torch.Tensor, torch.clone, arguments)


def value(function, args, kwargs):
    return [each for each in pytree.tree_leaves(function(*copied(args), **copied(kwargs))) if each is not None]


def torch_accepts(function, args, kwargs, expected):
    """Whether torch accepts the call and returns the expected value."""
    try:
        found = value(function, args, kwargs)
    except Exception:  # torch may raise any exception
        return False
    return len(found) == len(expected) and all(
        (one.shape, one.dtype) == (other.shape, other.dtype) and torch.allclose(one, other, rtol=1e-4, equal_nan=True)
        for one, other in zip(found, expected, strict=True)
    )


def names(function, args, kwargs):
    """Torch's names for the positional arguments; the first argument may have none."""
    expected = value(function, args, kwargs)
    found = []
    for place in reversed(range(len(args))):
        rest = {known[0]: args[place + 1 + i] for i, known in enumerate(reversed(found))}
        given = {**rest, **kwargs}
        taken = [
            name
            for name in NAMES
            if name not in given and torch_accepts(function, args[:place], {name: args[place], **given}, expected)
        ]
        # Another argument that does not affect the value may accept the same number.
        own = [*correction_of(function, args).parameters.signature.parameters, *[""] * len(args)][place]
        if own in taken:
            taken = [own, *(name for name in taken if name in NUMPY)]
        if not taken:
            break
        found.append(taken)
    return found[::-1]


def by_name(function, args, kwargs):
    known = names(function, args, kwargs)
    first = len(args) - len(known)
    for place in range(first, len(args)):
        rest = {names[0]: args[place + 1 + i] for i, names in enumerate(known[place + 1 - first :])}
        for name in known[place - first]:
            yield f"{name}=", args[:place], {name: args[place], **rest, **kwargs}


def with_other_numbers(function, args, kwargs):
    """Yield calls with each number as a tensor or another number type, and each list as another sequence type."""
    for place, value in itertools.chain(enumerate(args), kwargs.items()):
        if type(value) in NUMBERS:
            others = [kind(value) for kind in NUMBERS[type(value)]]
        elif isinstance(value, list) and value and all(type(each) is int for each in value):
            others = [tuple(value), torch.Size(value), [torch.tensor(each) for each in value], np.array(value)]
            others += [[np.int64(each) for each in value], value[0], np.int64(value[0]), torch.tensor(value[0])]
        else:
            continue
        for other in others:
            what = f"{place}: {type(other).__name__} {other!r}"
            if isinstance(place, int):
                yield what, (*args[:place], other, *args[place + 1 :]), kwargs
            else:
                yield what, args, {**kwargs, place: other}


def other_forms(function, args, kwargs):
    """Yield other forms of the call."""
    if kwargs:
        yield "without keywords", args, {}
    yield "out=None", args, {**kwargs, "out": None}
    yield from by_name(function, args, kwargs)
    yield from with_other_numbers(function, args, kwargs)


def floating(tree):
    return [each for each in pytree.tree_leaves(tree) if isinstance(each, torch.Tensor) and each.is_floating_point()]


def parts(tree):
    """Outputs as real tensors."""
    leaves = (each for each in pytree.tree_leaves(tree) if isinstance(each, torch.Tensor))
    return [torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for each in leaves]


def is_variable(leaf):
    """Whether the leaf is differentiated: it has dimensions (others stand for numbers), and is no constant."""
    return floating(leaf) and leaf.dim() and not any(leaf is each for each in CONSTANTS)


def derivatives(function, args, kwargs):
    """The value, and second derivatives of its sum of squares with the forward pass outside and inside.

    Eigenvectors are excluded, since their phases are arbitrary.
    """
    leaves, structure = pytree.tree_flatten((args, kwargs))
    places = [i for i, each in enumerate(leaves) if is_variable(each)]
    primals = tuple(leaves[i].detach().clone() for i in places)
    tangents = tuple(torch.linspace(-1, 1, each.numel(), dtype=each.dtype).reshape(each.shape) for each in primals)

    def call(*tensors):
        filled = copied(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor.clone()
        args, kwargs = pytree.tree_unflatten(filled, structure)
        return function(*args, **kwargs)

    def total(*tensors):
        found = floating(parts(call(*tensors)))
        found = found[:1] if function in (torch.linalg.eigh, torch.linalg.eig) else found
        return sum(((each**2).sum() for each in found), torch.zeros(()))

    def along(*tensors):
        return torch.func.jvp(total, tensors, tangents)[1]

    every = tuple(range(len(primals)))
    with Corrections(lean=True, many=True):
        value = parts(call(*primals))
        if not primals or not total(*(each.requires_grad_() for each in map(torch.clone, primals))).requires_grad:
            return value, (), ()
        gradient = torch.func.grad(total, every)
        inside = torch.func.grad(along, every)(*primals)
        outside = torch.func.jvp(gradient, primals, tangents)[1]
    return value, inside, outside


# A quarter of the table, in which related functions are adjacent
QUICK = set(map(id, CALLS[::4]))


@pytest.mark.one_in(12)
@pytest.mark.parametrize("call", slow_except(CALLS, lambda call: id(call) in QUICK, lambda call: name_of(call[0])))
def test_every_call_form_matches_the_plain_form(call):
    function, args, kwargs = call
    if correction_of(function, args) is None:
        pytest.skip(f"the correction stands aside in torch {torch.__version__}")
    expected = derivatives(function, args, kwargs)
    alone = value(function, args, kwargs)
    for what, *form in other_forms(function, args, kwargs):
        if not torch_accepts(function, *form, alone):
            continue
        try:
            got = derivatives(function, *form)
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9, msg=lambda m, what=what: f"{what}: {m}")


def parameters_of(function):
    return {
        name
        for name, each in inspect.signature(function).parameters.items()
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    }


WRITTEN_IN_PYTHON = [each for each in RULES if inspect.isfunction(each)]


@pytest.mark.parametrize("function", WRITTEN_IN_PYTHON, ids=name_of)
def test_rules_take_every_argument_of_torch(function):
    rule = RULES[function].parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in rule.signature.parameters.values())
    assert takes_any or parameters_of(function) - {"out"} <= rule.names


def hidden_from_modes(function):
    """Return the arguments that a Python function of torch omits when it offers its call to a mode."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [
        each
        for each in ast.walk(tree)
        if isinstance(each, ast.Call) and getattr(each.func, "id", "") == "handle_torch_function"
    ]
    passed = [
        {name.id for value in (*call.args[2:], *(each.value for each in call.keywords)) for name in names_in(value)}
        for call in calls
    ]
    return {name for each in passed for name in parameters_of(function) - each}


def names_in(tree):
    return (each for each in ast.walk(tree) if isinstance(each, ast.Name))


def test_torch_hides_no_argument_from_modes_but_the_weight_of_l1_loss():
    functions = {each for each in vars(F).values() if inspect.isfunction(each) and each.__module__ == F.__name__}
    hidden = {each.__name__: hidden_from_modes(each) for each in functions}
    assert {name: each for name, each in hidden.items() if each} == {"l1_loss": {"weight"}}


def test_every_correction_has_a_tested_call():
    called = {call[0] for call in CALLS} | ELSEWHERE
    missing = {each.name for function, each in RULES.items() if function not in called}
    assert {name for name in missing if not name.startswith(FAMILIES_ELSEWHERE)} == set()
