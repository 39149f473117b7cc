"""The execution engine of tengserve: a Triton-style backend that knows no web framework."""
