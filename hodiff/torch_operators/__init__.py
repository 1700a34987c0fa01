"""Data on torch's operators: one record for each operator, one file for each kind."""
