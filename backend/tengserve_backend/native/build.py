"""Compiling the operators with the system's compiler: once for each state of the sources, of torch and of the compiler.

The library is kept in the cache that `artifact_cache` describes, as `native/<sources and torch>-<compiler>/`. It does
not depend on the machine's own instruction set: each file of the sources is compiled for the one that its name ends
with, and the library chooses when it runs. So one cache serves different machines of an architecture, and an image that
was built with a compiler runs without one.

`python -m tengserve_backend.native.build` builds it now.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tengserve_backend.artifact_cache import ArtifactBusyError, artifact, cache_root, is_whole
from tengserve_backend.errors import ConfigurationError
from tengserve_backend.native.compilers import BuildError, compilers

SOURCES = Path(__file__).parent / "src"
LIBRARY = "libtengserve_cpu.so"

_BUILD_TIMEOUT_S = 1800.0
"""For all of it: two idle cores take half a minute; at a low priority beside a busy server it is minutes."""
_VERSION_TIMEOUT_S = 30.0
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wno-psabi"),
    *("-fno-math-errno", "-fno-trapping-math"),
    # A product and a sum are fused only where the sources say so: the same bits from every compiler.
    "-ffp-contract=off",
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16")
_ISA_FLAGS = {
    "_avx2": _AVX2,
    "_avx512": _AVX512,
    "_avx512_bf16": _AVX512_BF16,
    "_amx": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16"),
}
"""By the end of a source file's name, on x86. Elsewhere these files are compiled without, and guard themselves."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        command: how it is called.
        version: what it says of itself.
    """

    command: str
    version: str


def find_compiler() -> Compiler | None:
    """The compiler that CXX names, else the system's; None when there is none that runs."""
    chosen = os.environ.get("CXX")
    for name in [chosen] if chosen else _COMPILERS:
        command = shutil.which(name)
        version = None if command is None else compilers.version(command, _VERSION_TIMEOUT_S)
        if command is not None and version is not None:
            return Compiler(command, version)
    return None


def find_library(compiler: Compiler | None) -> Path | None:
    """The library, when it has been built: by this compiler, or, where there is none, by any."""
    root = cache_root() / "native"
    if compiler is not None:
        entries: Iterator[Path] | list[Path] = [root / _key(compiler)]
    else:
        entries = (entry for entry in sorted(root.glob(f"{_sources_key()}-*")) if entry.suffix == "")
    return next((entry / LIBRARY for entry in entries if is_whole(entry)), None)


def build_library(compiler: Compiler, *, jobs: int = 1) -> Path:
    """The library, from the cache or built now; waits while another process builds it.

    Args:
        compiler: what to build with.
        jobs: files compiled at once.

    Raises:
        BuildError: it cannot be had.
    """
    try:
        entry = artifact(
            cache_root() / "native" / _key(compiler),
            lambda folder: compile_library(compiler, folder, jobs=jobs),
            lock_timeout_s=_BUILD_TIMEOUT_S,
        )
    except ArtifactBusyError:
        raise BuildError("another process has been building it for too long") from None
    except OSError as error:
        raise BuildError(
            f"the cache cannot be written ({error.strerror or type(error).__name__}): "
            "set TENGSERVE_CACHE_DIR to a writable folder"
        ) from error
    except ConfigurationError as error:
        raise BuildError(error.message) from error
    return entry / LIBRARY


def _key(compiler: Compiler) -> str:
    digest = hashlib.sha256(f"{compiler.command}\n{compiler.version}".encode()).hexdigest()
    return f"{_sources_key()}-{digest[:16]}"


def _sources_key() -> str:
    """Of everything that decides what comes out, but for the compiler."""
    digest = hashlib.sha256()
    for part in (torch.__version__, platform.machine(), repr((_FLAGS, _ISA_FLAGS))):
        digest.update(part.encode() + b"\0")
    for file in sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"))):
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:32]


def compile_library(compiler: Compiler, folder: Path, *, jobs: int = 1, flags: Sequence[str] = ()) -> None:
    """Compile the library into a folder, past the cache.

    Args:
        compiler: what to build with.
        folder: an existing one.
        jobs: files compiled at once.
        flags: more of them, for compiling and linking.

    Raises:
        BuildError: it cannot be built.
    """
    files = sorted(SOURCES.glob("*.cpp"))
    if not files:
        raise BuildError("there are no sources")
    objects = folder / "objects"
    objects.mkdir()
    torch_dir = Path(torch.__file__).parent
    include = (f"-I{torch_dir / 'include'}", f"-I{torch_dir / 'include/torch/csrc/api/include'}")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"

    made = [objects / f"{file.stem}.o" for file in files]
    compilers.run(
        [
            [
                *(compiler.command, *_FLAGS, *_isa_flags(file.stem), *flags, abi, *include),
                *("-c", str(file), "-o", str(target)),
            ]
            for file, target in zip(files, made, strict=True)
        ],
        objects,
        jobs=jobs,
        timeout_s=_BUILD_TIMEOUT_S,
    )
    link = [
        *(compiler.command, "-shared", *flags, "-o", str(folder / LIBRARY), *map(str, made)),
        # Without OpenMP's library: torch brings its own, and a second one in the process would have other threads.
        *(f"-L{torch_dir / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_dir / 'lib'}"),
    ]
    compilers.run([link], objects, jobs=1, timeout_s=_BUILD_TIMEOUT_S)
    shutil.rmtree(objects)


def _isa_flags(stem: str) -> tuple[str, ...]:
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    ending = max((name for name in _ISA_FLAGS if stem.endswith(name)), key=len, default=None)
    return () if ending is None else _ISA_FLAGS[ending]


def main(say: Callable[[str], object] = sys.stdout.write) -> int:
    """Build it now, or say why not; an exit status. A machine without a compiler is no failure: see load.py."""
    compiler = find_compiler()
    if compiler is None:
        say("no C++ compiler: the CPU will compute without kernels of its own, at less than half the speed\n")
        return 0
    try:
        build_library(compiler, jobs=os.cpu_count() or 1)
    except BuildError as error:
        say(f"the CPU kernels cannot be built: {error}\n{error.said}\n")
        return 1
    say("the CPU kernels are built\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
