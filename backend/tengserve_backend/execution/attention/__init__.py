"""Attention over the paged KV cache, one file a tier, reached through transformers' attention registry."""
