"""Build the stand-in for Ascend's runtime: libascendcl and five companions, from the sources beside this file.

Whatever the installed torch-npu needs and no source defines becomes a stub that fails when it is called: a kernel entry
point that did nothing and said "done" would leave garbage behind. Run with the Python of .venv-npu:

    python build.py FOLDER

The libraries go into FOLDER, unless those there are already made of the same sources and the same wheel.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from elf import undefined_symbols

_SOURCES = Path(__file__).parent
_COMPANIONS = ("hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")
_RUNTIME_NAME = re.compile(r"(acl[a-z]*[A-Z]|Msprof|rt[A-Z])\w+")
_DEFINITION = re.compile(r"^[a-z][\w ]*?[ *](\w+)\([^;]*?\)\s*\{", re.MULTILINE | re.DOTALL)
_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra")

# ACL_ERROR_RT_FEATURE_NOT_SUPPORT; a function that makes something returns its address, so there is 0 for "none".
_STUB = """long {name}(void) {{
    sim_count_stub("{name}");
    return {answer};
}}
"""


def build(folder: Path) -> None:
    """Make the libraries in a folder, or leave them as they are when nothing they are made of has changed.

    Raises:
        FileNotFoundError: there is no C compiler.
        subprocess.CalledProcessError: it failed; its words are in `stderr`.
    """
    wheel = _wheel()
    key = _key()
    stamp = folder / "key"
    if stamp.exists() and stamp.read_text() == key:
        return
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("there is no C compiler (on Debian: apt install gcc libc6-dev)")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        new = Path(made) / "new"
        new.mkdir()
        _compile(compiler, new, wheel)
        (new / "key").write_text(key)
        if folder.exists():
            folder.rename(Path(made) / "old")
        new.rename(folder)


def _wheel() -> Path:
    """The folder of the installed torch_npu, which is not imported."""
    found = importlib.util.find_spec("torch_npu")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("torch-npu is not installed here")
    return Path(found.origin).parent


def _key() -> str:
    digest = hashlib.sha256(importlib.metadata.version("torch-npu").encode())
    for source in sorted(path for path in _SOURCES.iterdir() if path.suffix in {".c", ".h", ".py"}):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _stubs(wheel: Path) -> str:
    libraries = [
        *wheel.glob("_C.*.so"),
        *(wheel / "lib").glob("libtorch_npu.so"),
        *(wheel / "lib").glob("libtensorpipe.so"),
    ]
    needed = {name for library in libraries for name in undefined_symbols(library) if _RUNTIME_NAME.fullmatch(name)}
    defined = {name for source in _SOURCES.glob("*.c") for name in _DEFINITION.findall(source.read_text())}
    lines = ["void sim_count_stub(const char *name);\n"]
    for name in sorted(needed - defined):
        answer = 0 if "Create" in name or name.startswith("Msprof") else 207000
        lines.append(_STUB.format(name=name, answer=answer))
    return "\n".join(lines)


def _compile(compiler: str, folder: Path, wheel: Path) -> None:
    stubs = folder / "stubs.c"
    stubs.write_text(_stubs(wheel))
    headers = wheel / "include" / "third_party" / "acl" / "inc"
    sources = [*sorted(_SOURCES.glob("*.c")), stubs]
    _run(
        [
            compiler,
            *_FLAGS,
            "-isystem",
            str(headers),
            "-I",
            str(_SOURCES),
            *map(str, sources),
            *_named(folder, "ascendcl"),
        ]
    )
    empty = folder / "companion.c"
    # Something to export, so that no linker takes the library for one that nobody needs.
    empty.write_text("int npu_sim_companion;\n")
    for name in _COMPANIONS:
        # The wheel asks for symbols through the handles of these libraries: the runtime must be among what they need.
        link = ["-Wl,--no-as-needed", "-L", str(folder), "-lascendcl", "-Wl,-rpath,$ORIGIN"]
        _run([compiler, *_FLAGS, str(empty), *_named(folder, name), *link])


def _named(folder: Path, name: str) -> list[str]:
    return ["-o", str(folder / f"lib{name}.so"), f"-Wl,-soname,lib{name}.so"]


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


if __name__ == "__main__":
    try:
        build(Path(sys.argv[1]))
    except FileNotFoundError as error:
        sys.exit(str(error))
    except subprocess.CalledProcessError as error:
        sys.exit(f"the stand-in for Ascend's runtime does not compile\n{error.stderr}")
