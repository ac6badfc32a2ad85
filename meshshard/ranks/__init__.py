"""Ranks: how they start, and what each of them loads."""

__all__: list[str] = []
