"""GGUF conversion: a tiny file that we write ourselves, and the model of the quick start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.gguf_files import write_tiny_llama_gguf
from tengserve_backend.errors import ConfigurationError
from tengserve_backend.execution.gguf import convert_gguf
from tengserve_backend.repository.scan import scan_repository
from tengserve_backend.repository.weights import resolve_weights

ROOT = Path(__file__).resolve().parents[3]


def ignore(_stage: str, _fraction: float) -> None:
    pass


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, np.ndarray[Any, Any]], Path]:
    """The tensors that went into a GGUF file, and the folder that came out."""
    folder = tmp_path_factory.mktemp("gguf")
    tensors = write_tiny_llama_gguf(folder / "tiny.gguf")
    (folder / "out").mkdir()
    seen: list[float] = []
    convert_gguf(folder / "tiny.gguf", folder / "out", lambda _stage, fraction: seen.append(fraction))
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    return tensors, folder / "out"


def test_a_tiny_file_becomes_a_folder_that_transformers_loads(
    tiny: tuple[dict[str, np.ndarray[Any, Any]], Path],
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tensors, folder = tiny
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype is torch.float32
    np.testing.assert_array_equal(model.model.embed_tokens.weight.detach().numpy(), tensors["token_embd.weight"])
    np.testing.assert_array_equal(
        model.model.layers[0].mlp.up_proj.weight.detach().numpy(), tensors["blk.0.ffn_up.weight"]
    )


def test_every_end_token_of_the_file_ends_an_answer(tiny: tuple[dict[str, np.ndarray[Any, Any]], Path]) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    _, folder = tiny
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = GenerationConfig.from_pretrained(folder).eos_token_id
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|im_end|>", "<|eot|>", "<|endoftext|>"]


def test_digits_stand_alone_as_the_smollm_split_wants(tiny: tuple[dict[str, np.ndarray[Any, Any]], Path]) -> None:
    from transformers import AutoTokenizer

    _, folder = tiny
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # The file has a merge of two blanks; GPT-2's split would tear them apart in front of a digit.
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    assert tokenizer.decode(tokenizer.encode("a  12 é")) == "a  12 é"


def test_a_damaged_file_is_an_error_in_one_sentence(tmp_path: Path) -> None:
    write_tiny_llama_gguf(tmp_path / "tiny.gguf")
    data = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "tiny.gguf").write_bytes(data[: len(data) // 2])
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigurationError, match="cannot be converted") as caught:
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out", ignore)
    assert str(tmp_path) not in caught.value.message


def test_a_folder_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    write_tiny_llama_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"Not a directory|File exists|Input/output error"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "file" / "out", ignore)


def test_a_stop_ends_the_converting_process(tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    calls = 0

    def stop(_stage: str, _fraction: float) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:  # The first call comes before the process is started.
            raise StopError

    write_tiny_llama_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "out").mkdir()
    with pytest.raises(StopError):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out", stop)
    assert list((tmp_path / "out").iterdir()) == []


def test_the_model_of_the_quick_start_has_the_right_tokenizer_and_ends() -> None:
    from transformers import AutoTokenizer, GenerationConfig

    (source,) = scan_repository(ROOT / "model_repository")
    # In the user's own cache, where the server tests and the next run find it again.
    folder = resolve_weights(source, ignore)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [2, 0]
    for text in ("Hello  world\n\nx=1 + 22\t3", "中文 🙂 é", " lead", "a\n\n12  345"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not set(ids) & {0, 1, 2}
    assert tokenizer.tokenize("a\n\n12  3") == ["a", "ĊĊ", "1", "2", "ĠĠ", "3"]
    chat = tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n")
    assert (chat[0], chat[-2]) == (1, 2)
    assert tokenizer.decode(chat, skip_special_tokens=True) == "user\nhi\n"


SERVER = """
import os, signal, sys
from pathlib import Path
from tengserve_backend.execution import gguf

def die_when_it_converts(stage, fraction):
    if fraction == 0.5:
        os.kill(os.getpid(), signal.SIGKILL)

gguf.__name__ = "endless_converter"
gguf.convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]), die_when_it_converts)
"""

ENDLESS_CONVERTER = """
import sys, threading
from pathlib import Path
from tengserve_backend.execution import gguf

def convert(file, target, report):
    ended = (target / "ended").open("w")
    report(0.5)
    threading.Event().wait()

gguf._convert = convert
gguf._main(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_the_converter_ends_with_a_server_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "endless_converter.py").write_text(ENDLESS_CONVERTER)
    os.mkfifo(tmp_path / "ended")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", SERVER, str(tmp_path / "model.gguf"), str(tmp_path)]
    with subprocess.Popen(command, env=environment) as server, (tmp_path / "ended").open() as ended:
        assert server.wait() == -signal.SIGKILL
        # The other end of it closes when the converter has ended; else pytest's timeout ends the test.
        assert ended.read() == ""
