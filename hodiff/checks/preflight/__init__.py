"""What a model calls, and which of its second derivatives exist."""
