"""Rules for embedding bags."""
