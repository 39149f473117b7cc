"""Model repositories for tests: folders with a config.pbtxt and a version folder."""

from __future__ import annotations

from pathlib import Path


def add_model(repository: Path, name: str, *, version: str = "1", parameters: dict[str, str] | None = None) -> Path:
    """Add a model without weights to a repository; its version folder."""
    lines = [f'name: "{name}"', 'backend: "tengserve"']
    for key, value in (parameters or {}).items():
        lines.append(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')
    version_dir = repository / name / version
    version_dir.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text("\n".join(lines) + "\n")
    return version_dir
