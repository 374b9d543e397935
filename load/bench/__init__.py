"""Benchmarks of single parts: `moonbus load bench-*` and `soak-*`.

``rounds`` measures everything side by side and compares, ``child`` and ``processes`` hold and look at other processes,
``transfer`` is the table of the transfer engine, ``soak`` its endurance. ``peers`` are programs that run in the
environment of the software we compare with, and import nothing of ours.
"""
