"""What the operator sees: log records and metrics."""
