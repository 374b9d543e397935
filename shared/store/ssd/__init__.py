"""The SSD tier of one store agent: blocks in slot files that outlive the process.

``record`` is the layout of the index (pure), ``files`` the thin layer over the operating system, ``slots`` the two
files of a directory and what is in them, ``threads`` where their blocking calls run, ``tier`` what the agent uses:
which block lies where, reads with a deadline, writes parents first, a breaker.
"""
