"""What papers claim, and what hodiff measures of it."""
