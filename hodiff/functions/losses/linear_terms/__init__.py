"""What a cross-entropy of linear logits is made of, without a matrix of all logits."""
