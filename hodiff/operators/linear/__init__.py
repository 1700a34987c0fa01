"""Linear maps between spaces of pytrees: products, algebra, other forms, estimates; and matrices as such maps."""
