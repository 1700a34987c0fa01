"""What an operator is taken at and summed over: the point, batches, ranks; and that none of them changes."""
