"""The LLM engine as a python_backend model: `model.py` of this folder, for our own host and for a real Triton."""
