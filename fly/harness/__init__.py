"""lm-eval's side: its requests in, its results out."""
