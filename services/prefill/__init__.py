"""prefill: computes a prompt's KV and writes it into the decode worker's memory.

Owns its block pool. Consumes ``PrefillJob`` and ``PushBlocks``; emits ``Handover`` to the decode worker, KV events,
``Progress``, and ``JobFailed`` to the gateway. Never streams tokens to a client and never reads anybody's memory.
"""
