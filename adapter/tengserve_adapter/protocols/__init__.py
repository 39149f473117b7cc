"""Dialects: each parses a body into one typed call and formats the answer. Pure functions; no HTTP, no engine."""
