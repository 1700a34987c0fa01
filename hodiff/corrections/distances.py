"""Rules for distances."""
