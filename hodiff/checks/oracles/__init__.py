"""Routes to a derivative that share no code with the function's own rules."""
