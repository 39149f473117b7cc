"""The python_backend API: what `import triton_python_backend_utils` gives a user's model."""
