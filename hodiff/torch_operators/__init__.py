"""Data on torch's operators: one record for each operator, in one table, and queries on it."""
