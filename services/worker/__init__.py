"""worker: puts a prefill worker, a decode worker, or one that is both together.

An *elastic* worker is one process with one engine, one pool and one incarnation, and a shell for each role. It has a
home role; the conductors decide which of the two it is given work for. Owns nothing itself.
"""
