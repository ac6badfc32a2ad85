"""`python -m meshshard` is the command `meshshard`."""

from meshshard.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
