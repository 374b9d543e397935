"""Decides which cache specs a store lends for. Pure."""
