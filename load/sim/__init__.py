"""A cluster under virtual time, driven by the conductor that runs in production.

The conductor's machine (``services.conductor.core``) and the store's block pool (``shared.store.blocks``) are imported
as they are; what is modelled is cost: how long a prefill, a decode step, a transfer takes. ``loop`` is time,
``driver`` runs a machine in it, ``network`` shares links, ``cache`` is a node's DRAM and SSD, ``prefill``, ``decode``
and ``coupled`` are the nodes, ``cluster`` puts them together, ``faults`` breaks them, ``outcome`` counts.
``experiment`` is one run; ``compare``, ``knee`` and ``paper`` are many. See docs/simulator.md.
"""
