"""The only access to torch's private names, by one function for each question; `names` lists the names."""
