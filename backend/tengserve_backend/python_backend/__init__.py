"""The host of a user's own model.py: Triton's python_backend API, in this process.

Each instance of a model is a thread with its own copies of the model's modules. The model's code has all rights of the
server, and what it raises ends its requests only.
"""

from tengserve_backend.python_backend.bls import Peers
from tengserve_backend.python_backend.load import load_python_model
from tengserve_backend.python_backend.model import PythonModel

__all__ = ["Peers", "PythonModel", "load_python_model"]
