"""The table of operators, and queries on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hodiff.torch_internals.operators import built_in_functions
from hodiff.torch_operators.operator import Kind, Operator, Pieces, operators

# Elementwise.
_SMOOTH = """
    exp exp2=special.exp2 expm1=special.expm1 log log2 log10 log1p=special.log1p sqrt rsqrt reciprocal square
    pow=__pow__=__ipow__ float_power
    sin cos tan asin=arcsin acos=arccos atan=arctan sinc=special.sinc deg2rad rad2deg
    sinh cosh tanh asinh=arcsinh acosh=arccosh atanh=arctanh
    sigmoid=special.expit logit=special.logit nn.logsigmoid nn.softplus nn.silu nn.gelu nn.mish nn.tanhshrink
    erf=special.erf erfc=special.erfc erfinv=special.erfinv special.erfcx special.ndtr special.ndtri
    special.log_ndtr
    lgamma=special.gammaln digamma=special.digamma=special.psi
    i0=special.i0 special.i0e special.i1 special.i1e special.bessel_j0 special.bessel_j1
"""
_LINES = """
    abs=absolute=__abs__ relu nn.relu nn.relu6 nn.leaky_relu nn.hardtanh nn.hardsigmoid clamp=clip clamp_min clamp_max
    hardshrink nn.hardshrink nn.softshrink threshold nn.threshold
"""
_CURVES = "nn.elu selu nn.selu celu nn.celu nn.hardswish"
_OF_ONE = """
    frac nan_to_num special.entr polygamma=special.polygamma mvlgamma=special.multigammaln
    native_dropout dropout nn.dropout frexp nn.softsign
"""
_OF_SEVERAL = """
    add=__add__=__radd__=__iadd__ sub=subtract=__sub__=__isub__ rsub=__rsub__ mul=multiply=__mul__=__rmul__=__imul__
    div=divide=true_divide=__truediv__=__itruediv__ rdiv=__rtruediv__=__rdiv__ rpow=__rpow__ remainder fmod
    addcmul addcdiv lerp atan2=arctan2 hypot ldexp nextafter complex polar
    logaddexp logaddexp2 xlogy=special.xlogy special.xlog1py special.zeta
"""
_COMPARING = "maximum minimum fmax fmin copysign"
_LINEAR_POINTWISE = """
    pos=positive=__pos__ neg=negative=__neg__ clone contiguous to float double half bfloat16 type type_as
    where(condition, input!, other!) masked_fill(input!, mask, value!)
"""
# Parts of functions and of gradients, without torch's tag.
_PARTS = """
    aten.to_copy aten.lift_fresh_copy aten.conj_physical aten.prelu_kernel aten.prelu_kernel_backward
    aten.log_sigmoid_forward aten.log_sigmoid_backward aten.logit_backward aten.softplus_backward aten.elu_backward
    aten.mish_backward aten.hardswish_backward aten.rrelu_with_noise
"""

POINTWISE = (
    *operators(Kind.POINTWISE, _SMOOTH, smooth=True),
    *operators(Kind.POINTWISE, _LINES, pieces=Pieces.LINES),
    *operators(Kind.POINTWISE, _CURVES, pieces=Pieces.CURVES),
    *operators(Kind.POINTWISE, _COMPARING, pieces=Pieces.ARGUMENTS),
    *operators(Kind.POINTWISE, _OF_ONE + _OF_SEVERAL + _PARTS),
    *operators(Kind.POINTWISE, _LINEAR_POINTWISE, linear=True),
)

# Each element of the result is an element of an argument, or a constant.
_MOVING_VIEWS = """
    view view_as expand expand_as permute transpose t adjoint movedim=moveaxis swapaxes=swapdims
    squeeze unsqueeze unflatten narrow select diagonal unfold split chunk unbind tensor_split hsplit vsplit dsplit
    split_with_sizes unsafe_split unsafe_chunk unsafe_split_with_sizes broadcast_to linalg.diagonal alias
"""
_MOVES = """
    reshape reshape_as flatten ravel getitem=__getitem__
    expand_copy alias_copy view_copy narrow_copy permute_copy transpose_copy t_copy squeeze_copy unsqueeze_copy
    diagonal_copy unfold_copy unbind_copy split_copy split_with_sizes_copy slice_copy select_copy
    flip fliplr flipud roll rot90 diag diag_embed diagflat tril triu atleast_1d(*tensors!) atleast_2d atleast_3d
    index_select gather take take_along_dim masked_select repeat tile repeat_interleave
    nn.pixel_shuffle nn.pixel_unshuffle nn.unfold nn.channel_shuffle
    cat=concat=concatenate(tensors!) stack(tensors!) hstack(tensors!) vstack=row_stack(tensors!) dstack(tensors!)
    column_stack(tensors!) block_diag(*tensors!) broadcast_tensors(*tensors!) meshgrid(*tensors!)
    cartesian_prod(*tensors!) combinations
    nn.pad(input!, pad, mode, value!) constant_pad_nd(input!, pad, value!)
    index_copy(input!, dim, index, source!) index_fill(input!, dim, index, value!) masked_scatter(input!, mask, source!)
    select_scatter(input!, src!) slice_scatter(input!, src!) diagonal_scatter(input!, src!)
"""
_MOVING_OPERATORS = """
    aten.index aten.unsafe_index aten.embedding aten.im2col aten.as_strided_copy aten.as_strided_scatter
    aten.slice_backward aten.select_backward aten.diagonal_backward
    aten.reflection_pad1d aten.reflection_pad2d aten.reflection_pad3d
    aten.replication_pad1d aten.replication_pad2d aten.replication_pad3d
    aten.upsample_nearest1d aten.upsample_nearest2d aten.upsample_nearest3d
"""

MOVEMENT = (
    *operators(Kind.MOVES, _MOVING_VIEWS, linear=True, view=True),
    *operators(Kind.MOVES, _MOVES, linear=True),
    *operators(Kind.MOVES, _MOVING_OPERATORS),
)

# Linear in the marked parameters.
_LINEAR_VIEWS = "real imag view_as_real view_as_complex conj"
_LINEAR = """
    resolve_conj resolve_neg cpu cfloat cdouble chalf to_dense cumsum trace sum_to_size gradient
    diff(input!, n, dim, prepend!, append!)
    fft.fft fft.ifft fft.rfft fft.irfft fft.hfft fft.ihfft fft.hfft2 fft.ihfft2 fft.hfftn fft.ihfftn
    fft.fft2 fft.ifft2 fft.rfft2 fft.irfft2 fft.fftn fft.ifftn
    fft.rfftn fft.irfftn fft.fftshift fft.ifftshift
    nn.avg_pool1d nn.avg_pool2d nn.avg_pool3d nn.adaptive_avg_pool1d nn.adaptive_avg_pool2d nn.adaptive_avg_pool3d
    nn.fold nn.interpolate nn.upsample nn.affine_grid
    bincount(input, weights!, minlength)
    index_add(input!, dim, index, source!) index_put(input!, indices, values!)
    scatter(input!, dim, index, src!) scatter_add(input!, dim, index, src!)
"""

LINEAR = (
    *operators(Kind.LINEAR, _LINEAR_VIEWS, linear=True, view=True),
    *operators(Kind.LINEAR, _LINEAR, linear=True),
)

# Constant between jumps, and functions that tell properties of a tensor.
STEPS = operators(
    Kind.STEP,
    """
    eq ne lt le gt ge isnan isinf isfinite isposinf isneginf isreal isclose allclose equal logical_and logical_or
    logical_not logical_xor argmax argmin argsort nonzero count_nonzero searchsorted bucketize all any signbit isin
    round floor ceil trunc fix sign floor_divide heaviside histc multinomial bernoulli
    __floordiv__ __rfloordiv__ __invert__ one_hot nn.one_hot int long short bool byte char detach
    zeros_like ones_like empty_like full_like rand_like randn_like randint_like
    new_zeros new_ones new_empty new_empty_strided new_full zero
    size dim numel nelement ndimension stride storage_offset element_size data_ptr get_device result_type can_cast
    promote_types is_floating_point is_complex is_contiguous is_same_size is_nonzero is_signed is_inference is_conj
    is_neg is_tensor is_storage has_names
    aten.is_all_true aten.is_any_true
    """,
)

# Reductions, functions of matrices, and others with several names.
_REDUCTIONS = """
    nansum nanmean prod var std var_mean std_mean norm linalg.vector_norm logsumexp=special.logsumexp
    aminmax mode
"""
_SELECTIONS = "max min amax amin median nanmedian kthvalue"
_SELECTIONS_OF_SEVERAL = """
    sort msort topk cummax cummin quantile nanquantile
    max_pool1d max_pool2d max_pool3d nn.adaptive_max_pool1d nn.adaptive_max_pool2d nn.adaptive_max_pool3d
"""
_MATRICES = """
    linalg.det=det linalg.slogdet=slogdet linalg.inv=inverse linalg.inv_ex linalg.pinv
    linalg.solve_ex linalg.solve_triangular triangular_solve
    cholesky linalg.cholesky_ex cholesky_inverse cholesky_solve
    linalg.lu linalg.lu_factor_ex linalg.lu_solve lu_unpack linalg.ldl_factor_ex linalg.qr geqrf
    linalg.eig linalg.eigvals linalg.eigh linalg.svd linalg.matrix_exp=matrix_exp linalg.matrix_power=matrix_power
"""
_WITH_ALIASES = """
    setitem=__setitem__ matmul=__matmul__=linalg.matmul rmatmul=__rmatmul__ outer=ger trapezoid=trapz
    softmax=special.softmax log_softmax=special.log_softmax linalg.householder_product=orgqr
"""

OTHERS = (
    *operators(Kind.REDUCES, "sum mean", linear=True),
    *operators(Kind.REDUCES, _REDUCTIONS),
    *operators(Kind.REDUCES, _SELECTIONS, pieces=Pieces.ELEMENTS),
    *operators(Kind.OTHER, _SELECTIONS_OF_SEVERAL, pieces=Pieces.ELEMENTS),
    *operators(Kind.OTHER, "prelu nn.prelu", pieces=Pieces.ARGUMENTS),
    *operators(Kind.MATRIX, _MATRICES),
    *operators(Kind.OTHER, _WITH_ALIASES),
)

OPERATORS = (*POINTWISE, *MOVEMENT, *LINEAR, *STEPS, *OTHERS)
_BY_NAME = {each.name: each for each in OPERATORS}
# Other names of each operator.
ALIASES = {each.name: each.aliases for each in OPERATORS if each.aliases}

_SPACES: dict[str, Any] = {
    "linalg": torch.linalg,
    "fft": torch.fft,
    "special": torch.special,
    "nn": functional,
}


def functions_of_kind(kind: Kind) -> Iterator[Operator]:
    """Yield the operators of a kind that have functions."""
    return (each for each in OPERATORS if each.kind is kind and not each.name.startswith("aten."))


def short_names(kind: Kind, *, views: bool = True) -> set[str]:
    """Names of the functions and of the operators in `torch.ops.aten` of a kind, perhaps without views."""
    found = (each for each in OPERATORS if each.kind is kind and (views or not each.view))
    return {name for each in found for name in each.short_names}


def with_aliases(names: str) -> set[str]:
    """Names of functions and of their aliases, as Python functions have them."""
    return {short for each in names.split() for short in _BY_NAME.get(each, Operator(each)).short_names}


def functions_named(name: str, *, operators: bool = True) -> Iterator[Any]:
    """Yield torch's functions and methods of a given name, and operators in `torch.ops.aten`."""
    room, _, short = name.rpartition(".")
    spaces = (_SPACES[room],) if room else (torch, built_in_functions, Tensor, functional, torch.ops.aten)
    for space in spaces if operators or room else spaces[:-1]:
        found = getattr(space, short, None)
        if callable(found):
            yield found


def forms_of(name: str) -> list[Any]:
    """Functions and methods of an operator under all of its names, or of its in-place variant, torch's own last."""
    ending = "_" if name.endswith("_") else ""
    names = (name, *(each + ending for each in ALIASES.get(name.removesuffix("_"), ()) if not each.startswith("__")))
    return [*reversed(dict.fromkeys(found for each in names for found in functions_named(each, operators=False)))]
