"""No private name of torch is used outside `hodiff/torch_internals`, including uses that ruff does not detect.

Ruff refuses attributes and imports. These tests find names in strings, methods that override private methods, and
attributes of `self` that come from a base class of torch.
"""

from pathlib import Path

import pytest
from torch_internals.private_names import of_folder, overridden, private_names, strings_of

import hodiff
from hodiff.torch_internals.names import ATTRIBUTES, NAMES

PACKAGE = Path(hodiff.__file__).parent
KERNELS = PACKAGE / "kernels"  # a link, which `rglob` does not follow
PLUGIN = PACKAGE.parent / "pytest_hodiff.py"
INTERNALS = PACKAGE / "torch_internals"

VIOLATIONS = {
    "import torch\ntorch._C._set_grad_enabled(True)": "torch._C._set_grad_enabled",
    "from torch import _C": "torch._C",
    "from torch._C import _functorch as levels\nlevels.get_unwrapped(x)": "torch._C._functorch.get_unwrapped",
    "import torch._dynamo": "torch._dynamo",
    "import torch\ntorch._dynamo.reset()": "torch._dynamo.reset",
    "from torch.nn.modules.batchnorm import _NormBase": "torch.nn.modules.batchnorm._NormBase",
    "from torch.autograd import forward_ad\nforward_ad._current_level": "torch.autograd.forward_ad._current_level",
    "import torch\ntorch.ops.mkldnn._linear_pointwise(a, b)": "torch.ops.mkldnn._linear_pointwise",
    "import torch\naten = torch.ops.aten\naten._cdist_backward(a)": "._cdist_backward",
    "x._version": "._version",
    "f(x)._base": "._base",
    "self.tensor._version": "._version",
    'import sys\n"torch._dynamo" in sys.modules': "torch._dynamo",
    'getattr(node, "_forward_cls", None)': "._forward_cls",
    'hasattr(torch.ops.mkldnn, "_linear_pointwise")': "._linear_pointwise",
    'import operator\noperator.attrgetter("_version")': "._version",
    '[n for n in dir(node) if n.startswith("_saved_")]': "._saved_",
}
INNOCENT = (
    "from torch.utils import _pytree as pytree\npytree.tree_map(f, x)",
    "import torch\ntorch.utils._pytree.tree_map(f, x)",
    "self._version = 1",
    "import torch\ntorch.is_grad_enabled.__name__",
    "super()._dense(x)",
    'hasattr(value, "_fields")',
    "import argparse\nargparse._SubParsersAction",
    '"torch._dynamo is slow to import"',
)


@pytest.mark.parametrize("source", VIOLATIONS)
def test_violation_is_detected(source: str) -> None:
    assert VIOLATIONS[source] in {name for _, name in private_names(source)}


@pytest.mark.parametrize("source", INNOCENT)
def test_allowed_code_is_not_reported(source: str) -> None:
    assert list(private_names(source)) == []


def test_private_names_of_torch_occur_in_torch_internals_only() -> None:
    found = [
        f"{path}:{line}: {name}"
        for path, line, name in of_folder(PACKAGE, KERNELS, PLUGIN)
        if INTERNALS not in path.parents
    ]
    assert found == []


def test_private_names_do_not_occur_as_strings() -> None:
    private = {part for name in NAMES for part in name.split(".") if part.startswith("_")}
    private |= {name for names in ATTRIBUTES.values() for name in names if name.startswith("_")}
    # Special names of Python, such as `__code__`.
    private = {name for name in private if not name.startswith("__")}
    found = [
        f"{path}:{line}: {text!r}"
        for path, line, text in strings_of(PACKAGE, KERNELS, PLUGIN)
        if text in private and INTERNALS not in path.parents
    ]
    assert found == []


@pytest.mark.slow
def test_no_class_overrides_private_members_of_torch() -> None:
    # This override is in `torch_internals` itself.
    assert set(overridden("hodiff")) == {"torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo"}
