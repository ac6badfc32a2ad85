"""The command `meshshard`."""

from meshshard.cli.main import build_parser, main

__all__ = ["build_parser", "main"]
