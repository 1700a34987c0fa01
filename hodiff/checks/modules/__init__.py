"""Checks of modules that find the submodule at fault."""
