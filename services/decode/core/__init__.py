"""Decides what a decode worker computes next, who waits, and when an answer is over. Pure."""
