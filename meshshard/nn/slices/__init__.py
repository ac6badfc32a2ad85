"""slices: attention of many rows through a few slices, processed in tiles."""

from meshshard.nn.slices.slice_attention import CrossSliceAttention, SliceAttention

__all__ = ["CrossSliceAttention", "SliceAttention"]
