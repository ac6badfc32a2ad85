"""Store: a folder of shards on disk, its manifest, and its export for ParaView."""

from meshshard.store.folder import Folder, load, write
from meshshard.store.shard_files import sha256

__all__ = ["Folder", "load", "sha256", "write"]
