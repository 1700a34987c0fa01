"""Tests of the table of torch's private names against the installed torch, and against the folder that uses them."""

from collections.abc import Callable
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from custom_functions import old_style
from torch import nn
from torch.distributed.tensor import DTensor
from torch_internals.private_names import is_private, of_folder, overridden

import hodiff.torch_internals
from hodiff.torch_internals.names import ATTRIBUTES, NAMES, SINCE

DOOR = Path(hodiff.torch_internals.__file__).parent


_Double = old_style("_Double", lambda x: (2 * x,), lambda ctx, g: 2 * g)


def _x() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def _under_vmap(look: Callable[[], Any]) -> Any:
    found = []
    torch.func.vmap(lambda x: (found.append(look()), x)[1])(torch.ones(2))
    return found[0]


def _hidden_from_dynamo() -> Any:
    hidden = torch._disable_dynamo(lambda: None)
    hidden()
    return hidden.__wrapped__


def _fully_sharded() -> Any:
    """A module under `fully_shard` of a single process."""
    if not dist.is_available():
        pytest.skip("torch without torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return fully_shard(nn.Linear(1, 1), mesh=init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()


# In some versions a node loses its attributes with the tensor that it computed.
_DOUBLED = _Double.apply(_x())

# A value that has the attributes, for every kind in the table.
EXAMPLES: dict[str, Callable[[], Any]] = {
    "tensor": _x,
    "storage": lambda: _x().untyped_storage(),
    "module": nn.Module,
    "lbfgs": lambda: torch.optim.LBFGS([_x()]),
    "optimizer": lambda: torch.optim.SGD([_x()]),
    "convolution": lambda: nn.Conv1d(1, 1, 1),
    "node of an operator": lambda: _x().exp().grad_fn,
    "node of a Function": lambda: _DOUBLED.grad_fn,
    "operator": lambda: torch.ops.aten.exp.default,
    "custom operator": lambda: torch.library.custom_op(
        "hodiff_tests_of_names::copy", lambda x: x.clone(), mutates_args=(), schema="(Tensor x) -> Tensor"
    ),
    "type DTensor": lambda: DTensor,
    "dispatcher of DTensor": lambda: DTensor._op_dispatcher,
    "fully sharded module": _fully_sharded,
    "state of a fully sharded module": lambda: _fully_sharded()._get_fsdp_state(),
    "operators of oneDNN": lambda: torch.ops.mkldnn,
    "disabled function": lambda: torch.compiler.disable(lambda: None),
    "compiled function": lambda: torch.compile(lambda: None, backend="eager"),
    "compiled module": lambda: torch.compile(nn.Module(), backend="eager"),
    "function that torch hides from dynamo": _hidden_from_dynamo,
    "function that dynamo runs while it traces": lambda: torch.compiler.assume_constant_result(lambda: None),
    "transform": lambda: _under_vmap(torch._C._functorch.peek_interpreter_stack),
    "vmap": lambda: _under_vmap(
        lambda: torch._C._functorch.CVmapInterpreterPtr(torch._C._functorch.peek_interpreter_stack())
    ),
}


def _found(dotted: str) -> Any:
    """Return the object of a dotted name, or raise AttributeError if torch does not have it."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            module = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        return reduce(getattr, parts[length:], module)
    raise AttributeError(dotted)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_has_every_private_name(name: str) -> None:
    if ".mkldnn." in name and not torch.backends.mkldnn.is_available():
        pytest.skip("torch without oneDNN")
    if torch.__version__ < SINCE.get(name, ""):
        pytest.skip(f"torch has it since {SINCE[name]}")
    try:
        _found(name)
    except AttributeError:
        pytest.fail(f"torch {torch.__version__} has no {name}, which hodiff/torch_internals uses")


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner in ATTRIBUTES for name in ATTRIBUTES[owner]])
def test_torch_values_have_every_private_attribute(owner: str, name: str) -> None:
    if owner == "operators of oneDNN" and not torch.backends.mkldnn.is_available():
        pytest.skip("torch without oneDNN")
    if torch.__version__ < (since := SINCE.get(f"{owner}.{name}", "")):
        pytest.skip(f"torch has it since {since}")
    value = EXAMPLES[owner]()
    has = any(each.startswith(name) for each in dir(value)) if name.endswith("_") else hasattr(value, name)
    assert has, f"torch {torch.__version__}: a {owner} has no {name}, which hodiff/torch_internals uses"


def test_table_matches_the_names_that_are_used() -> None:
    used = {name for path, _, name in of_folder(DOOR) if path.name != "names.py"}
    used |= set(overridden("hodiff.torch_internals"))
    attributes = {name for names in ATTRIBUTES.values() for name in names}
    assert {name for name in used if not name.startswith(".")} == set(NAMES)
    assert {name[1:] for name in used if name.startswith(".")} == set(filter(is_private, attributes))
    text = "".join(path.read_text(encoding="utf-8") for path in DOOR.rglob("*.py") if path.name != "names.py")
    assert [name for name in attributes if f".{name}" not in text and f'"{name}' not in text] == []


def test_table_is_sorted_without_duplicates() -> None:
    assert list(NAMES) == sorted(set(NAMES))
