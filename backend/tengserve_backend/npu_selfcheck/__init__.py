"""`tengserve npu-selfcheck`: what can be seen of an NPU on the machine that has it, as a report for an issue."""
