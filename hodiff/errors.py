"""The exceptions and warnings that hodiff raises."""


class HodiffError(Exception):
    """Base class of every error that hodiff raises on purpose."""


class InputError(HodiffError, ValueError):
    """An argument is not what the function needs; the message names it and says what to pass instead."""


class RouteError(HodiffError, RuntimeError):
    """A derivative does not exist by the asked route, or by any; the message lists what each route said."""


class CheckError(HodiffError, AssertionError):
    """A derivative disagrees with an independent route to it."""


class HodiffWarning(UserWarning):
    """A result was computed, but something about it deserves a look."""
