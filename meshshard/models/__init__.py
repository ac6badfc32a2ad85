"""models: complete surrogates built from `nn`; the same code serial and sharded."""

__all__: list[str] = []
