"""Rules for scattering, reducing by index, and cumulative products."""
