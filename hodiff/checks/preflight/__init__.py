"""Lists the torch functions that a model calls, and which of its second derivatives exist."""
