"""Functions whose derivatives are chosen: changed, watched, clipped, or those of a surrogate."""
