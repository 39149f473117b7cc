"""A torch_npu to install in front of the tests' environment: a package that does what a test says on import."""

from __future__ import annotations

from pathlib import Path

NO_CANN = 'raise ImportError("libhccl.so: cannot open shared object file: No such file or directory")'
"""What the real package does without CANN."""


def write_torch_npu(folder: Path, code: str = NO_CANN, *, version: str = "") -> Path:
    """Write the package as pip would, so that torch loads it by itself; the folder is for PYTHONPATH.

    Args:
        folder: an empty one.
        code: the package's own.
        version: of torch-npu; that of the installed torch when empty.
    """
    if not version:
        from importlib import metadata

        version = metadata.version("torch").partition("+")[0]
    package = folder / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text(f"{code}\ndef _autoload(): pass\n", encoding="utf-8")
    described = folder / f"torch_npu-{version}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torch-npu\nVersion: {version}\n", encoding="utf-8"
    )
    (described / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n", encoding="utf-8")
    return folder
