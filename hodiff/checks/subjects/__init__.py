"""What is checked: calls of modules and of torch functions, as problems of a few numbers whose routes are compared."""
