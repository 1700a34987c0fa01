"""Rules for losses."""
