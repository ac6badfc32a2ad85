"""Store: a folder of shards on disk, its manifest, and its export for ParaView."""

from meshshard.store.folder import Folder, load, save, sha256

__all__ = ["Folder", "load", "save", "sha256"]
