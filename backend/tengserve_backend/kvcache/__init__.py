"""Which block of the KV cache belongs to whom: integers only."""
