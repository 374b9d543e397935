"""How the parts talk: subjects as values, one protocol (``bus``), two buses that keep it (``nats``, ``memory``).

``subjects`` and ``streams`` are data; ``listen`` is the receiving half that
both buses share. Import the bus you open from its module, so that nobody loads a client they do not use.
"""
