"""What a process that computes has in its environment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tengserve_backend.process import SPINS, prepare


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"GOMP_SPINCOUNT": SPINS, "TOKENIZERS_PARALLELISM": "false"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7", "TOKENIZERS_PARALLELISM": "false"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE", "TOKENIZERS_PARALLELISM": "false"}),
        ({"TOKENIZERS_PARALLELISM": "true"}, {"GOMP_SPINCOUNT": SPINS, "TOKENIZERS_PARALLELISM": "true"}),
    ],
)
def test_what_the_operator_set_stays(before: dict[str, str], after: dict[str, str]) -> None:
    prepare(before)
    assert before == after


def test_torchs_threads_take_it() -> None:
    code = (
        "import sys, tengserve_adapter.cli; from tengserve_backend.process import prepare;"
        " assert 'torch' not in sys.modules; prepare(); import torch"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("GOMP_", "OMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("torch's OpenMP library is not GNU's")
    assert f"GOMP_SPINCOUNT = '{SPINS}'" in done.stderr
