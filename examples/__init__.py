"""Examples that run, alone and under torchrun; each has a function that returns (model, kwargs)."""
