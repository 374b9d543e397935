"""The conductor's decisions, pure: events in, effects out.

``machine`` is the door; it keeps ``prefix_index`` (who holds which block), ``promises`` (who soon will),
``cluster`` (workers and the work in flight) and ``estimate`` (what work costs), and asks ``placement``, which looks at
all workers side by side on a ``board``. ``policies`` are other ways to place.
"""
