"""The only door to torch's private names: one function a question; what it uses of torch stands in `names`."""
