"""Capture of functions as graphs: traced once, with the numbers that a function reads as conditions in the graph."""
