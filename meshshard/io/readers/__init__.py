"""Readers: one module for each family of formats, from a path to a list of `Dataset`."""

__all__: list[str] = []
