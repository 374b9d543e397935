"""store: lends DRAM and SSD to the cluster's pool, without an engine.

Owns the blocks it was given. Consumes hellos and heartbeats of engine workers (which specs are there to lend for),
``PushBlocks``, the store-manager's orders and clients at its doors; emits KV events and heartbeats. Takes no request;
the conductor uses it as an owner of blocks only. One process is one worker per cache spec.
"""
