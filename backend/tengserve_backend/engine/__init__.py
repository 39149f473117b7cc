"""The engine: one protocol, and the native engine that is its embedded default."""
