"""torch's operator database by every route."""
