"""The program that builds the site: it lays out a tree of Markdown, of which Sphinx makes pages."""
