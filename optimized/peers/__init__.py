"""Other people's kernels behind our signatures."""
