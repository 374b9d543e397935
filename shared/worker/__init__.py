"""What prefill and decode workers have in common: their settings, their presence on the bus, and how one is opened.

A worker is an engine with a block pool, a transfer engine and a store agent; what differs is what it computes.
"""
