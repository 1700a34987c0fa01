"""Rules for linear algebra."""
