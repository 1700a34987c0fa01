"""Trigger every error and warning of the table in torch, and match its pattern with torch's message."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Function, grad, gradcheck
from torch.func import grad as gradient
from torch.func import jacrev, jvp, vmap
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from hodiff.torch_internals.autograd.graph_nodes import raises_when_run
from hodiff.torch_internals.wording import Wording, pattern_of, says


def _mixed_with_dtensors() -> None:
    if not dist.is_available():
        pytest.skip("torch without torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,))) + torch.ones(2)
    finally:
        dist.destroy_process_group()


class _Old(Function):
    """A Function that takes ctx in forward, and has a once-differentiable backward."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, cotangent):
        return 2 * cotangent


class _Bare(Function):
    """A Function without any rule."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


class _WithoutJvp(_Bare):
    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)


class _TwoVmaps(_Bare):
    generate_vmap_rule = True

    @staticmethod
    def vmap(info, in_dims, x):
        return x.clone(), in_dims[0]


class _InPlace(_Bare):
    """A Function that changes its input, and returns a new tangent."""

    @staticmethod
    def forward(x):
        return x.add_(1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_dirty(inputs[0])

    @staticmethod
    def jvp(ctx, tangent):
        return tangent.clone()


@torch.library.custom_op("hodiff_wording::doubled", mutates_args=())
def _doubled(x: Tensor) -> Tensor:
    return 2 * x


def _x(*shape: int) -> Tensor:
    return torch.ones(*(shape or (3,)), requires_grad=True)


def _rows() -> Tensor:
    return torch.ones(2, 3)


def _slope(f: Callable[[Tensor], Tensor]) -> Tensor:
    x = _x()
    return grad(f(x).sum(), x, create_graph=True)[0]


def _jvp_at_ones(f: Callable[[Tensor], Tensor]) -> Any:
    return jvp(f, (torch.ones(3, 3),), (torch.ones(3, 3),))


def _pulled_back_twice() -> None:
    y = _x().square().sum()
    y.backward()
    y.backward()


def _changed_in_place():
    x, w = torch.ones(2, requires_grad=True), torch.ones(2)
    y = (w * x).sum()
    w.mul_(2)
    y.backward()


def _zero_in_place() -> Any:
    x = torch.ones(3)
    slope = lambda x: jvp(lambda y: (y * 1).mul_(2), (x,), (torch.ones(3),))[1]  # noqa: E731
    return vmap(lambda v: jvp(slope, (x,), (v,))[1])(torch.eye(3))


def _captured() -> Any:
    buffer = torch.zeros(3)
    return gradient(lambda x: buffer.add_(x).sum())(torch.ones(3))


def _branching() -> Any:
    torch.compiler.reset()  # torch gives a different message the second time
    return gradient(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)).sum())(torch.ones(3))


def _of_inference_mode() -> Any:
    with torch.inference_mode():
        constant = torch.ones(3)
    return _x() * constant


def _without_data() -> Any:
    with FakeTensorMode():
        return torch.ones(2).numpy()


def _with_hooks(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        return x.sin().sum()


def _batched_differences() -> Any:
    # With batched gradients torch refuses to branch on a number, and gradcheck adds the context.
    class Branching(_Bare):
        @staticmethod
        def backward(ctx, cotangent):
            return cotangent if cotangent.sum().item() < 1e9 else None

    return gradcheck(Branching.apply, (_x().double().detach().requires_grad_(),), check_batched_grad=True)


def _batched_sparse_gradients() -> Any:
    return jacrev(lambda x: x.to_sparse() @ torch.ones(3, 3))(torch.eye(3))


def _jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)


def _of_jagged(f: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return a weight, and the gradient by it of a function of a jagged product."""
    w = _x(3, 3)
    return w, grad(f(F.linear(_jagged(), w).tanh()).sum(), w, create_graph=True)[0]


def _batched_jagged() -> Any:
    w, slope = _of_jagged(lambda y: y.values())
    return vmap(lambda rows: grad(slope, w, rows, retain_graph=True))(torch.ones(2, 3, 3))


def _padded() -> Any:
    return _of_jagged(lambda y: y.to_padded_tensor(0.0))


def _view_without_grad() -> None:
    with torch.no_grad():
        first, _ = _x(2).unbind()
    first.mul_(_x(1).sum())


def _nested_levels() -> Any:
    with torch.autograd.forward_ad.dual_level():
        return jvp(torch.sin, (torch.ones(3),), (torch.ones(3),))


# At least one case for each alternative of a pattern.
def _second_pass() -> None:
    compiled = torch.compile(lambda x: (x @ x).sin().sin().sum(), backend="aot_eager")
    x = _x(3, 3)
    grad(compiled(x), x)
    grad(compiled(x), x, retain_graph=True)


def _second_derivative() -> None:
    compiled = torch.compile(lambda x: x.sin().sum(), backend="aot_eager")
    x = _x()
    grad(grad(compiled(x) ** 2, x, create_graph=True)[0].sum(), x)


PROVOCATIONS: dict[Wording, tuple[Callable[[], Any], ...]] = {
    Wording.NOT_IMPLEMENTED: (
        lambda: _slope(F.hardsigmoid).sum().backward(),
        lambda: torch.heaviside(torch.ones(3, dtype=torch.complex64), torch.ones(3, dtype=torch.complex64)),
    ),
    Wording.NOT_SUPPORTED: (
        lambda: _jvp_at_ones(lambda x: torch.cdist(x, x)),
        _captured,
        lambda: gradient(_with_hooks)(torch.ones(3)),
        lambda: vmap(lambda x: x.sum().item())(_rows()),
        lambda: torch.from_numpy(torch.ones(3).numpy()[::-1]),
    ),
    Wording.NO_REVERSE_RULE: (lambda: _slope(F.hardsigmoid).sum().backward(),),
    Wording.NO_AUTOGRAD_FORMULA: (lambda: _doubled(_x()).sum().backward(),),
    Wording.NO_FORWARD_RULE: (lambda: _jvp_at_ones(lambda x: torch.cdist(x, x)),),
    Wording.SAMPLE_OF_GAMMA: (
        lambda: _slope(torch._standard_gamma).sum().backward(),
        lambda: _jvp_at_ones(torch._standard_gamma),
        lambda: _jvp_at_ones(torch._sample_dirichlet),
    ),
    Wording.ORDER_OF_FUNCTION: (
        lambda: torch.igamma(_x(), torch.ones(())).sum().backward(),
        lambda: torch.igammac(_x(), torch.ones(())).sum().backward(),
        lambda: torch.special.zeta(_x(), torch.ones(())).sum().backward(),
    ),
    Wording.EMBEDDING_BAG: (
        lambda: _slope(lambda x: F.embedding_bag(torch.tensor([[0]]), x.reshape(1, -1)).square()).sum().backward(),
        lambda: _jvp_at_ones(lambda x: F.embedding_bag(torch.tensor([[0]]), x.reshape(1, -1))),
    ),
    Wording.FORWARD_MODE: (
        lambda: _jvp_at_ones(lambda x: torch.cdist(x, x)),
        lambda: _jvp_at_ones(_Bare.apply),
        _nested_levels,
    ),
    Wording.NESTED_DUAL_LEVELS: (_nested_levels,),
    Wording.REENTRANT_CHECKPOINT: (lambda: grad(checkpoint(torch.sin, x := _x(), use_reentrant=True).sum(), x),),
    Wording.ONCE_DIFFERENTIABLE: (lambda: _slope(lambda x: _Old.apply(x).square()).sum().backward(),),
    Wording.NO_SETUP_CONTEXT: (lambda: vmap(_Old.apply)(_rows()), lambda: gradient(_Old.apply)(torch.ones(()))),
    Wording.NO_RULE: (lambda: _jvp_at_ones(_Bare.apply), lambda: _Bare.apply(_x()).sum().backward()),
    Wording.NO_JVP: (lambda: _jvp_at_ones(_Bare.apply), lambda: _jvp_at_ones(lambda x: _InPlace.apply(x.clone()))),
    Wording.NO_VMAP: (lambda: vmap(_Bare.apply)(_rows()),),
    Wording.NO_JVP_IN_BATCH: (lambda: _jvp_at_ones(vmap(_WithoutJvp.apply)),),
    Wording.TWO_VMAPS: (lambda: vmap(_TwoVmaps.apply)(_rows()),),
    Wording.BATCHING: (
        lambda: vmap(lambda x: x.sum().item())(_rows()),
        lambda: vmap(lambda x: torch.equal(x, x))(_rows()),
        _batched_differences,
        *([_batched_sparse_gradients] if torch.__version__ >= "2.14" else []),
    ),
    Wording.NO_BATCHING_RULE: (
        lambda: vmap(lambda x: torch.equal(x, x))(_rows()),
        lambda: vmap(lambda x: F.rrelu(x, training=True), randomness="same")(_rows()),
    ),
    Wording.NOT_IN_GRAPH: (lambda: grad(torch.ones((), requires_grad=True) * 2, torch.ones((), requires_grad=True)),),
    Wording.NO_GRAPH: (lambda: torch.autograd.grad(torch.ones(()), torch.ones(())),),
    Wording.CHANGES_UNBATCHED: (
        lambda: vmap(lambda x: torch.ones(3).mul_(x))(_rows()),
        lambda: vmap(lambda x: torch.zeros(3).fill_(x[0]))(_rows()),
    ),
    Wording.RANDOM: (lambda: vmap(lambda x: x * torch.rand(3))(_rows()), lambda: vmap(F.dropout)(_rows())),
    Wording.HIGHER_ORDER: (
        lambda: _jvp_at_ones(lambda x: torch.ops.higher_order.cond(x.sum() > 0, torch.sin, torch.cos, (x,))),
        _branching,
        lambda: _jvp_at_ones(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))),
    ),
    Wording.SPARSE: (
        lambda: torch.eye(2).to_sparse_csr().is_contiguous(),
        lambda: torch.eye(2).to_sparse_csc().stride(),
        lambda: torch.eye(2).to_sparse().expand(2, 2, 2),
        lambda: torch.eye(2).to_sparse_csr().is_coalesced(),
    ),
    Wording.JAGGED: (
        lambda: range(_jagged().shape[1]),
        lambda: torch.sym_max(_jagged().shape[1], 3),
        lambda: _jagged().shape[1] >= 10,
        _batched_jagged,
        _padded,
    ),
    Wording.VIEW_WITHOUT_GRAD: (_view_without_grad,),
    Wording.INFERENCE_TENSOR: (_of_inference_mode,),
    Wording.REQUIRES_GRAD_INSIDE: (lambda: gradient(lambda x: x.detach().requires_grad_().sum())(_x()),),
    Wording.MIXED_WITH_DTENSORS: (_mixed_with_dtensors,),
    Wording.NO_HOOK: (lambda: torch.ones(2).register_hook(lambda cotangent: cotangent),),
    Wording.CHANGES_CAPTURED: (_captured,),
    Wording.NO_NUMBERS: (
        lambda: vmap(lambda x: torch.from_numpy(x.numpy()))(_rows()),
        lambda: vmap(lambda x: x.data_ptr())(_rows()),
        lambda: _x().numpy(),
        _without_data,
    ),
    Wording.CHANGED_IN_PLACE: (_changed_in_place,),
    Wording.FREED_GRAPH: (_pulled_back_twice,),
    Wording.CHANGES_ZERO: (_zero_in_place,),
    Wording.OTHER_DEVICE: (
        lambda: torch.ones(2) + torch.ones(2, device="meta"),
        lambda: torch.ones(2).index_add_(0, torch.zeros(1, device="meta").long(), torch.ones(1)),
    ),
    Wording.NO_NUMBERS_TO_COPY: (lambda: torch.ones(2).copy_(torch.ones(2, device="meta")),),
    Wording.WRAPPER_WITHOUT_MEMORY: (
        lambda: jvp(lambda x: x * torch.ones(2), *[(TwoTensor(torch.ones(2), torch.ones(2)),)] * 2),
    ),
    Wording.COMPILED_GRADIENT: (_second_derivative,),
    Wording.DONATED_BUFFERS: (_second_pass,),
    Wording.BATCHES_BY_LOOP: (lambda: vmap(lambda x: x.set_(torch.ones(3)))(_rows()),),
    Wording.OUTPUT_RESIZED: (lambda: torch.add(_rows(), _rows(), out=torch.empty(1)),),
    Wording.TORCHSCRIPT: (lambda: torch.jit.script(_scripted),),
    Wording.FUNCTION_MADE: (_Bare,),
    Wording.READS_BATCHED: (
        lambda: vmap(lambda x: x if x.sum() > 0 else -x)(_rows()),
        lambda: vmap(lambda x: x.sum().item())(_rows()),
    ),
}


def _scripted(x: Tensor) -> Tensor:
    return x + 1


def _messages_of(provoke: Callable[[], Any]) -> str:
    """Return the messages of all errors and warnings of torch."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            provoke()
            lines = []
        except Exception as error:
            lines = [str(error)]
    return "\n".join([*lines, *(str(each.message) for each in caught)])


def _alternatives(pattern: str) -> list[str]:
    """Split a pattern at the bars outside of parentheses."""
    parts, depth = [""], 0
    for letter in pattern:
        depth += (letter == "(") - (letter == ")")
        if letter == "|" and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


# Messages that only newer versions of torch have, and the first version.
SINCE = {r"maybe_level\.has_value": "2.14"}
# Messages that only versions before 2.13 have, by hodiff's routes.
BEFORE = (
    "dispatch_on_subclass called with NO overloaded args",
    r"numel\(\) on tensor with symbolic sizes",
    "NestedTensor does not support directly calling",
)

# Importing the compiler takes seconds.
SLOW = {Wording.HIGHER_ORDER, Wording.COMPILED_GRADIENT, Wording.DONATED_BUFFERS}


@pytest.mark.parametrize(
    "wording", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW), id=each.name) for each in Wording]
)
def test_pattern_matches_the_message_of_torch(wording: Wording) -> None:
    texts = [_messages_of(each) for each in PROVOCATIONS[wording]]
    if wording == Wording.OTHER_DEVICE and torch.__version__ < "2.13":
        # In these versions, the meta device accepts indices of any other device.
        assert says(texts[0], wording)
        return
    if wording == Wording.WRAPPER_WITHOUT_MEMORY and torch.__version__ >= "2.14":
        assert texts == [""]
        return
    assert [text for text in texts if not says(text, wording)] == []
    for part in _alternatives(wording.value[0]):
        if torch.__version__ < SINCE.get(part, "") or part in BEFORE:
            continue
        assert any(re.search(part, text, re.IGNORECASE) for text in texts), f"torch does not say {part!r}: {texts}"


@pytest.mark.parametrize("wording", Wording, ids=lambda each: each.name)
def test_pattern_does_not_match_other_messages(wording: Wording) -> None:
    for harmless in (lambda: torch.ones(2) @ torch.ones(3), lambda: torch.ones(2, 3).view(7), lambda: torch.ones(2)[5]):
        assert not says(_messages_of(harmless), wording)


def test_pattern_of_several_wordings_matches_each() -> None:
    either = pattern_of(Wording.RANDOM, Wording.NO_VMAP)
    assert [bool(re.search(either, text)) for text in ("RANDOMNESS error mode", "no vmap support", "vmap")] == [1, 1, 0]


def test_nodes_that_raise_are_recognized() -> None:
    nodes = [_slope(f).grad_fn for f in (F.hardsigmoid, lambda x: _Old.apply(x).square())]
    assert [node.name() for node in nodes] == ["torch::autograd::NotImplemented", "torch::autograd::Error"]
    assert all(map(raises_when_run, nodes))
    assert not raises_when_run((2 * _x()).grad_fn)
