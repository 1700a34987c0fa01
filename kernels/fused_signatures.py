"""Argument and result types of the C functions of all kernels, so that ctypes raises for wrong calls."""

from __future__ import annotations

import ctypes

_POINTER, _LONG, _FLOAT, _DOUBLE = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_double
_TEXT = ctypes.c_char_p

# Argument types of functions that return nothing, by name.
_ARGUMENTS = {
    "hodiff_elementwise": (_LONG, _POINTER, _POINTER, _POINTER, _LONG),
    "hodiff_pullback": (_LONG, *(_POINTER,) * 5, _LONG),
    "hodiff_gate_curvature": (*(_POINTER,) * 8, _LONG),
    "hodiff_logsumexp": (_POINTER, _POINTER, _LONG, _LONG),
    "hodiff_softmax": (_POINTER, _POINTER, _POINTER, _LONG, _LONG, _FLOAT),
    "hodiff_softmax_product": (*(_POINTER,) * 5, _LONG, _LONG, _FLOAT),
    "hodiff_weighted": (*(_POINTER,) * 3, _LONG, _LONG),
    "hodiff_weighted_pullback": (*(_POINTER,) * 5, _LONG, _LONG),
    "hodiff_softmax_curvature": (*(_POINTER,) * 7, _LONG, _LONG),
    "hodiff_normalization_curvature": (*(_POINTER,) * 9, _LONG, _LONG, _LONG, _DOUBLE, _LONG),
    "hodiff_add_relu": (*(_POINTER,) * 4, _LONG),
    "hodiff_masked": (*(_POINTER,) * 3, _LONG),
    "hodiff_collapsed_float": (*(_POINTER,) * 6, _LONG, _LONG),
    "hodiff_collapsed_double": (*(_POINTER,) * 6, _LONG, _LONG),
    "hodiff_turn": (_POINTER, _POINTER, _LONG, _LONG),
    "hodiff_average_float": (_POINTER, _LONG, _LONG, _POINTER),
    "hodiff_average_double": (_POINTER, _LONG, _LONG, _POINTER),
    **{
        f"hodiff_logits_{name}_{dtype}": (*(_POINTER,) * pointers, _LONG, _LONG)
        for name, pointers in {"cotangent": 6, "curvature": 10}.items()
        for dtype in ("float", "double")
    },
    "hodiff_attention_float": (_POINTER, _POINTER, _LONG, _LONG),
    "hodiff_attention_double": (_POINTER, _POINTER, _LONG, _LONG),
    "hodiff_color_order": (_LONG, *(_POINTER,) * 5, *(_LONG,) * 3, *(_POINTER,) * 6),
    "hodiff_color_degrees": (_LONG, *(_POINTER,) * 6),
    "hodiff_color_forest": (_LONG, _LONG, *(_POINTER,) * 8),
}

# Result type and argument types, by name.
SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    **{name: (None, arguments) for name, arguments in _ARGUMENTS.items()},
    "hodiff_formulas": (_LONG, ()),
    "hodiff_formula": (_TEXT, (_LONG,)),
    "hodiff_pullbacks": (_LONG, ()),
    "hodiff_pullback_formula": (_TEXT, (_LONG,)),
    "hodiff_attention_problem": (_LONG, ()),
    "hodiff_attention_memory_float": (_LONG, (_POINTER,)),
    "hodiff_attention_memory_double": (_LONG, (_POINTER,)),
    "hodiff_color_distance2": (_LONG, (_LONG, *(_POINTER,) * 3, _LONG, *(_POINTER,) * 5)),
    "hodiff_color_star": (_LONG, (_LONG, *(_POINTER,) * 3, _LONG, _LONG, *(_POINTER,) * 6)),
    "hodiff_color_acyclic": (_LONG, (_LONG, *(_POINTER,) * 12)),
    "hodiff_color_pairs": (_LONG, (_LONG, *(_POINTER,) * 6)),
}
