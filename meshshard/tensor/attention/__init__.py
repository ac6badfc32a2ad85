"""Attention over sharded rows."""

__all__: list[str] = []
