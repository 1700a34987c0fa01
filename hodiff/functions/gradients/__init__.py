"""Functions with chosen derivatives: changed, watched, clipped, or taken from a surrogate."""
