"""Small helpers that every other folder may import."""
