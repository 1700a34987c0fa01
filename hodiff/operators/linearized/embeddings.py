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
        # Names of parameters are known to functions alone, but a smaller leaf cannot be the weight, nor contain it.
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or not any(
            leaf.numel() >= module.weight.numel() for leaf in leaves
        ):
            continue
        for option, effect in _OPTIONS.items():
            if getattr(module, option):
                raise InputError(
                    f"{caller}: {argument}: expected embeddings without {option}, got "
                    f"{type(module).__name__}({module.num_embeddings}, {module.embedding_dim}, {option}="
                    f"{getattr(module, option)}), which {effect}; set the module's {option} to "
                    f"{'None' if option == 'max_norm' else 'False'}."
                )
