"""The device seam: everything above it sees plain torch."""
