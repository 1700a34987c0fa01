"""The defects that a check can name, and how it recognises them."""
