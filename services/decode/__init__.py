"""decode: generates tokens in a continuous batch.

Owns its block pool, into which prefill workers write. Consumes ``DecodeJob``, ``Handover`` and ``PushBlocks``; emits
``TokenBatch`` to gateways, KV events and ``Progress``. Never emits a token of a prompt whose every block it has not
verified.
"""
