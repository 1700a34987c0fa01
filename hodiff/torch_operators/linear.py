"""Operators that are linear, with the parameters in which they are."""

from hodiff.torch_operators.operator import Kind, operators

_VIEWS = "real imag view_as_real view_as_complex conj"
_OTHERS = """
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
    *operators(Kind.LINEAR, _VIEWS, linear=True, view=True),
    *operators(Kind.LINEAR, _OTHERS, linear=True),
)
