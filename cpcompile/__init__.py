"""Context parallelism as a compiler pass on torch.fx graphs."""
