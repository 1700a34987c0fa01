"""Checks of whole modules, down to the submodule at fault."""
