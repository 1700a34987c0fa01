"""Operators that move elements, with parameters in which they are linear."""

from hodiff.torch_operators.operator import Kind, operators

_VIEWS = """
    view view_as expand expand_as permute transpose t adjoint movedim=moveaxis swapaxes=swapdims
    squeeze unsqueeze unflatten narrow select diagonal unfold split chunk unbind tensor_split hsplit vsplit dsplit
    split_with_sizes unsafe_split unsafe_chunk unsafe_split_with_sizes broadcast_to linalg.diagonal alias
"""
_OTHERS = """
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
_OPERATORS = """
    aten.index aten.unsafe_index aten.embedding aten.im2col aten.as_strided_copy aten.as_strided_scatter
    aten.slice_backward aten.select_backward aten.diagonal_backward
    aten.reflection_pad1d aten.reflection_pad2d aten.reflection_pad3d
    aten.replication_pad1d aten.replication_pad2d aten.replication_pad3d
    aten.upsample_nearest1d aten.upsample_nearest2d aten.upsample_nearest3d
"""

MOVEMENT = (
    *operators(Kind.MOVES, _VIEWS, linear=True, view=True),
    *operators(Kind.MOVES, _OTHERS, linear=True),
    *operators(Kind.MOVES, _OPERATORS),
)
