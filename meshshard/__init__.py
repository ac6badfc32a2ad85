"""meshshard: one mesh, many shards."""

from meshshard.mesh import Mesh

__all__ = ["Mesh"]
