"""Tensors as they stand on the wire, whatever carries them."""
