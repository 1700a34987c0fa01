"""Schedule for recomputing preconditioners from running averages."""


def is_due(count: int, every: int) -> bool:
    """Return True every `every` counts, and before that after 1, 2, 4, 8 ... counts, when averages change most."""
    return count % every == 0 or (count < every and count & (count - 1) == 0)
