"""Readers: a file of one format to data sets, one module a family of formats."""

__all__: list[str] = []
