"""A load client for servers of language models: who asks, what is measured, and what becomes of the numbers."""
