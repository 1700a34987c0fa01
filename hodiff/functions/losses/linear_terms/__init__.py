"""Terms of a cross-entropy of linear logits, computed without a matrix of all logits."""
