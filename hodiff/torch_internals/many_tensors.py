"""Operators on lists of tensors, with the order and arguments of the operators on one tensor."""

from __future__ import annotations

import torch

abs_of = torch._foreach_abs
add = torch._foreach_add
add_ = torch._foreach_add_
addcmul_ = torch._foreach_addcmul_
clamp_max_ = torch._foreach_clamp_max_
clamp_min_ = torch._foreach_clamp_min_
copy_ = torch._foreach_copy_
div = torch._foreach_div
div_ = torch._foreach_div_
lerp_ = torch._foreach_lerp_
mul = torch._foreach_mul
mul_ = torch._foreach_mul_
norm = torch._foreach_norm
pow_ = torch._foreach_pow_
sub_ = torch._foreach_sub_
