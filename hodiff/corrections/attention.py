"""Rules for attention."""
