"""ranks: how the ranks of a machine are started, and what each of them loads."""

__all__: list[str] = []
