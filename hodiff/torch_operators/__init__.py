"""What hodiff knows of torch's operators, as data: one record for each operator, one file for each kind."""
