"""Embeddings with options that make their gradients no derivatives, or that change the point."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from hodiff.errors import InputError

_OPTIONS = {
    "scale_grad_by_freq": "divides gradients by counts of rows, so that they are no derivatives",
    "max_norm": "changes the weight in place, outside of the graph",
}


def require_differentiable_embeddings(
    caller: str, argument: str, modules: Sequence[nn.Module], leaves: Sequence[Tensor]
) -> None:
    """Raise if a function calls an embedding with such an option, whose weight x may hold."""
    for module in modules:
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        # Only the function knows the names of parameters; the weight is a leaf of its shape, or part of a vector.
        weight = module.weight
        if not any(x.shape == weight.shape or (x.dim() == 1 and len(x) >= weight.numel()) for x in leaves):
            continue
        for option, effect in _OPTIONS.items():
            if getattr(module, option):
                raise InputError(
                    f"{caller}: {argument}: expected embeddings without {option}, got "
                    f"{type(module).__name__}({module.num_embeddings}, {module.embedding_dim}, {option}="
                    f"{getattr(module, option)}), which {effect}; set the module's {option} to "
                    f"{'None' if option == 'max_norm' else 'False'}."
                )
