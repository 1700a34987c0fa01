"""What a check found, as data, text, HTML and JSON."""
