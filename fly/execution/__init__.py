"""Forward passes: models with their caches, and what makes them fast."""
