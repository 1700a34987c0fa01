"""When what is made of running averages is made anew."""


def is_due(count: int, every: int) -> bool:
    """Every so many counts, and after 1, 2, 4, 8 ... of them, as averages change the most at first."""
    return count % every == 0 or (count < every and count & (count - 1) == 0)
