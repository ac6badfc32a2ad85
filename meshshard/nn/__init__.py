"""nn: layers that run on one sharded mesh as on a whole one, the same class for any world size.

They take ShardTensors, or plain tensors, and give back the same kind. Each says what it sends.
"""

__all__: list[str] = []
