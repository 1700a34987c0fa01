"""The names of the routes: how reverse and forward passes are composed to a second derivative."""

# Reverse mode inside first: torch's own rules are right there for nearly every operator, while its forward rules for
# layer_norm, batch_norm, solve, det and others are constants to a second derivative, silently.
ROUTES = (
    "reverse-over-reverse",
    "forward-over-reverse",
    "reverse-over-forward",
    "forward-over-forward",
)
REVERSE_INSIDE = ROUTES[:2]
FORWARD_INSIDE = ROUTES[2:]
