"""Projections on convex sets, proximal maps, and soft sorting."""
