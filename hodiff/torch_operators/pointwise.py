"""Elementwise operators."""

from hodiff.torch_operators.operator import Kind, Pieces, operators

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
_LINEAR = """
    pos=positive=__pos__ neg=negative=__neg__ clone contiguous to float double half bfloat16 type type_as
    where(condition, input!, other!) masked_fill(input!, mask, value!)
"""
# Parts of functions and of gradients, without torch's tag.
_OPERATORS = """
    aten.to_copy aten.lift_fresh_copy aten.conj_physical aten.prelu_kernel aten.prelu_kernel_backward
    aten.log_sigmoid_forward aten.log_sigmoid_backward aten.logit_backward aten.softplus_backward aten.elu_backward
    aten.mish_backward aten.hardswish_backward aten.rrelu_with_noise
"""

POINTWISE = (
    *operators(Kind.POINTWISE, _SMOOTH, smooth=True),
    *operators(Kind.POINTWISE, _LINES, pieces=Pieces.LINES),
    *operators(Kind.POINTWISE, _CURVES, pieces=Pieces.CURVES),
    *operators(Kind.POINTWISE, _COMPARING, pieces=Pieces.ARGUMENTS),
    *operators(Kind.POINTWISE, _OF_ONE + _OF_SEVERAL + _OPERATORS),
    *operators(Kind.POINTWISE, _LINEAR, linear=True),
)
