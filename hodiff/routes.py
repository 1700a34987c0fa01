"""The names of the routes: compositions of reverse and forward passes to a second derivative."""

# Routes with reverse mode inside come first: torch's own rules are right there for nearly every operator. Its forward
# rules for layer_norm, batch_norm, solve, det and others are silently constants to a second derivative.
ROUTES = (
    "reverse-over-reverse",
    "forward-over-reverse",
    "reverse-over-forward",
    "forward-over-forward",
)
REVERSE_INSIDE = ROUTES[:2]
FORWARD_INSIDE = ROUTES[2:]
