"""Measurements: distributed attention of this package beside that of others, on the machine at hand."""
