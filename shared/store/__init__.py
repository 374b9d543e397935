"""The store agent of a worker: which KV blocks it holds, and everybody's way to learn of them and get them.

``blocks`` decides (pure): slots, keys, pins, leaf-first eviction. ``events`` numbers what happened and answers
"what did I miss?" (pure). ``agent`` acts: it announces on the bus and pushes blocks to those who ask.
"""
