"""The passes: one pass, one file, one verb. Each takes a graph and a decision made before it, and does one thing."""

# Imported as the top-level name "passes" (from a checkout's root), this would be a second copy of every pass.
if __name__ != "cpcompile.passes":
    raise ImportError("the passes are a part of cpcompile: import cpcompile.passes, not passes")
