"""The steps, in order of their number."""
