"""Where models come from, and whether they can be decoded with."""
