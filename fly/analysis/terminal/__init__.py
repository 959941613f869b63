"""`fly trace`: one generation in the terminal, every token marked by where it came from."""
