"""Operators whose results are constant between jumps, and functions that tell properties of a tensor."""

from hodiff.torch_operators.operator import Kind, operators

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
