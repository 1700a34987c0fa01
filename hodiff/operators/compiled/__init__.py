"""Products as compiled graphs."""
