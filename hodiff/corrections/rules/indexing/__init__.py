"""Rules for scattering, reducing by index, embeddings, and cumulative products."""
