"""Rules of what networks and their training are made of."""
