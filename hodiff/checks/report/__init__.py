"""Reports of a check, as data, text, HTML and JSON."""
