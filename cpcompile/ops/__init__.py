"""The operators of rewritten graphs: importing this package registers them."""

from cpcompile.ops import collectives, markers, neutral

__all__ = ["collectives", "markers", "neutral"]
