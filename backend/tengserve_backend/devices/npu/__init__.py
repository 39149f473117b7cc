"""Ascend NPUs through torch-npu."""
