"""Correct and faulty modules and Functions, for checks of whole modules."""

from custom_functions import custom, squared_slope
from torch import nn

from hodiff.functions import nestable_jvp

Square = custom("Square", lambda x: x**2, squared_slope, nestable_jvp(squared_slope), vmap=True)
# x², whose second derivative is zero in reverse mode because the gradient is detached
CutSquare = custom(
    "CutSquare",
    lambda x: x**2,
    lambda ctx, g: 2 * ctx.saved_tensors[0].detach() * g,
    nestable_jvp(squared_slope),
    vmap=True,
)
DoubledTangent = custom(
    "DoubledTangent", lambda x: x**2, squared_slope, nestable_jvp(lambda ctx, t: 2 * squared_slope(ctx, t)), vmap=True
)


class Applied(nn.Module):
    """A module that applies a Function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function.apply(x)


class Gate(nn.Module):
    """A module with a fault in its own forward, and a correct submodule."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * x.detach()


class Language(nn.Module):
    """A model with integer tokens, tied weights, a ModuleList, a mask of -inf and outputs that are not tensors."""

    def __init__(self, norm=nn.Identity):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"mix": nn.Linear(4, 4), "act": nn.Tanh(), "norm": norm()}) for _ in range(2)
        )
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, mask=None):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block["norm"](hidden + block["act"](block["mix"](hidden)))
        scores = hidden @ hidden.mT + (0 if mask is None else mask)
        return {"logits": self.head(scores.softmax(-1) @ hidden), "layers": len(self.blocks)}


class Twice(nn.Module):
    """A module with one submodule under two names, and two outputs."""

    def __init__(self, shared):
        super().__init__()
        self.first = shared
        self.linear = nn.Linear(4, 4)
        self.second = shared

    def forward(self, x):
        return self.second(self.linear(self.first(x))), x.sum()


class Counter(nn.Module):
    """A module that writes into a constant input."""

    def forward(self, x, count):
        count += 1
        return x.sin() * count
