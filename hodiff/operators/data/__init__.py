"""The data of an operator: its point, batches and ranks, and checks that they do not change."""
