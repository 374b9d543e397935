"""The model runner: the only place with torch.

``libraries`` imports torch and transformers quietly, ``pull`` puts models on disk, ``kv_pool`` holds KV blocks,
``attention`` reads and writes them, ``runtime`` runs a ragged batch through the model, ``sampler`` chooses tokens,
``profile`` measures what all this costs on this machine.

Nothing is imported here: :mod:`shared.engine.pull` makes ``tiny-random`` without torch.
"""
