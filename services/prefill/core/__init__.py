"""Decides what a prefill worker computes next. Pure."""
