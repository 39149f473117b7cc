"""The operators with every instruction set of this CPU, and under the sanitizers: the same tests in other processes."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from support.cpu_operators import EXAMPLES_VARIABLE, LIBRARY_VARIABLE, cpu_operators
from tengserve_backend.artifact_cache import artifact, cache_root
from tengserve_backend.native.build import LIBRARY, Compiler, build_library, compile_library, find_compiler

HERE = Path(__file__).parent
OPERATORS = [
    str(HERE / name)
    for name in ("test_attention.py", "test_decoder.py", "test_linear.py", "test_linear_integers.py", "test_rows.py")
]
X86_LEVELS = ("amx", "avx512_bf16", "avx512", "avx2")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-O1")


def run(arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def run_tests(*options: str, **variables: str) -> None:
    cache = ("-p", "no:cacheprovider")
    variables[EXAMPLES_VARIABLE] = "15"
    tested = run(["-m", "pytest", "-q", "-x", *cache, *options, *OPERATORS], **variables)
    assert tested.returncode == 0, (tested.stdout + tested.stderr)[-6000:]
    assert "passed" in tested.stdout
    assert "skipped" not in tested.stdout


def chosen(level: str) -> subprocess.CompletedProcess[str]:
    code = "from support.cpu_operators import cpu_operators; print(cpu_operators().isa())"
    return run(["-c", code], TENGSERVE_CPU_ISA=level, PYTHONPATH=os.pathsep.join(sys.path))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("level", [*X86_LEVELS, "portable"])
def test_the_operators_with_an_instruction_set(level: str) -> None:
    if level == cpu_operators().isa():
        pytest.skip("the tests of this process are with it")
    answer = chosen(level)
    if "this CPU does not have" in answer.stderr:
        pytest.skip(f"this CPU does not have {level}")
    if level != "portable" and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"{level} is of other machines")
    assert answer.stdout.strip() == level, answer.stderr[-2000:]
    run_tests(TENGSERVE_CPU_ISA=level)


def test_an_unknown_instruction_set_is_refused_by_name() -> None:
    assert 'TENGSERVE_CPU_ISA is "mmx"; it must be one of ' in chosen("mmx").stderr


def _runtime(compiler: Compiler) -> str:
    """What a sanitized library needs to be loaded before all others; the test is skipped without.

    The C++ library comes with it: exceptions are intercepted in what is there when the sanitizer starts.
    """
    found = []
    for name in ("libasan.so", "libubsan.so", "libstdc++.so"):
        command = [compiler.command, f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
        # A compiler that does not have it says the name alone.
        if not Path(path).is_absolute():
            pytest.skip(f"the compiler has no {name}, which the sanitizers need")
        found.append(path)
    return " ".join(found)


@pytest.mark.timeout(900)
def test_nothing_is_read_or_written_outside_its_tensor() -> None:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    runtime = _runtime(compiler)
    # Kept like the library itself, in another place, where no server looks for one.
    key = hashlib.sha256(f"{build_library(compiler).parent.name} {SANITIZERS}".encode()).hexdigest()[:32]

    def compile_into(folder: Path) -> None:
        compile_library(compiler, folder, jobs=os.cpu_count() or 1, flags=SANITIZERS)

    library = artifact(cache_root() / "native-sanitized" / key, compile_into, lock_timeout_s=800) / LIBRARY
    run_tests(
        # pytest's own handler of a crash would hide the sanitizer's report.
        *("-p", "no:faulthandler"),
        # torch and Python free little at their end; the operators keep nothing between calls.
        ASAN_OPTIONS="detect_leaks=0",
        UBSAN_OPTIONS="print_stacktrace=1",
        LD_PRELOAD=runtime,
        **{LIBRARY_VARIABLE: str(library)},
    )
