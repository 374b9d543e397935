"""What the services share.

``ids units errors clock settings`` are the floor; ``messages`` and ``kv`` are the vocabulary; ``machine`` is
the shape of every decision maker and ``driver`` runs one; ``bus transfer store catalog engine telemetry`` are
the hands. Nothing here imports ``services`` or ``load``.
"""
