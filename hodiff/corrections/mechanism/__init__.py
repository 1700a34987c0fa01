"""Interception of torch calls: which of them run a rule, with which arguments, and what happens if a rule declines."""
