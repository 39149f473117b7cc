"""`tengserve bench` against the real server: every dialect gives the same answers, and the files are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.server_process import ServerProcess, run_cli
from tengserve_adapter.bench import gate
from tengserve_adapter.bench.requests import Prompt
from tengserve_adapter.bench.systems import Target, connect, version
from tengserve_adapter.bench.workloads import Prompts
from tengserve_adapter.grpc.settings import GrpcSettings
from tengserve_backend.text.tokenizer import load_tokenizer

_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def word_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a token a word; its ids are ids of the tiny model too."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("words")
    found: set[str] = set()

    def letters(text: str) -> list[int]:
        found.update(text.split())
        return [0] * len(text.split())

    Prompts(letters)
    vocabulary = {"<unk>": 3} | {word: number for number, word in enumerate(sorted(found), 4) if number < 320}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    return folder


async def test_every_dialect_gives_the_same_answers(tiny_server: ServerProcess, tiny_repository: Path) -> None:
    tokenizer = load_tokenizer(tiny_repository / "tiny" / "1")
    texts = ("Once upon a time", "The scheduler hands out tokens: one to each running sequence")
    prompts = [Prompt(text, tuple(tokenizer.encode(text))) for text in texts]
    systems = {
        dialect: await connect(Target(dialect, dialect, tiny_server.url, {}), None)
        for dialect in ("infer_token", "infer", "generate_stream")
    }
    reference = await gate.own_answers(systems["infer_token"].ask, "tiny", prompts, timeout_s=_TIMEOUT_S)
    assert all(len(expected.ids) == gate.OUTPUT_TOKENS for expected in reference.answers)
    for system in systems.values():
        assert system.model == "tiny"
        verdict = await gate.check(system.ask, reference, timeout_s=_TIMEOUT_S)
        assert (verdict.agreement, verdict.difference) == (1.0, "")


async def test_a_server_says_its_version(tiny_server: ServerProcess) -> None:
    assert (await version(Target("ours", "infer", tiny_server.url, {}))).startswith("tengserve ")


def test_the_command_measures_in_turn_and_writes_its_files(
    tiny_server: ServerProcess, word_tokenizer: Path, tmp_path: Path
) -> None:
    result = run_cli(
        *("bench", "--url", tiny_server.url, "--tokenizer", str(word_tokenizer), "--out", str(tmp_path / "out")),
        *("--against", f"remote=grpc+http://{tiny_server.grpc_address}", "--workload", "prefill-512"),
        *("--concurrency", "2", "--rounds", "1", "--requests", "2", "--seed", "3"),
    )
    assert result.returncode == 0, result.stderr
    assert "remote answers as the reference, tengserve alone: agreement 1.000" in result.stderr
    data = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(row["system"], row["load"], row["valid"]) for row in data["rows"]] == [
        ("tengserve", "c2", True),
        ("remote", "c2", True),
    ]
    # The server counts prompts as the client does.
    assert {one["input_tokens"] for run in data["runs"] for one in run["requests"]} == {512}
    assert {one["output_tokens"] for run in data["runs"] for one in run["requests"]} == {16}
    assert [ratio["other"] for ratio in data["ratios"]] == ["remote"]
    assert (tmp_path / "out" / "results.md").read_text() == result.stdout
    assert (tmp_path / "out" / "results.svg").read_text().startswith("<svg ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "nothing"], "--url must have a URL"),
        (["--url", "http://h", "--rounds", "0"], "--rounds must be from 1 to 100, got 0"),
        (["--url", "http://h", "--workload", "tea"], "--workload must be of chat,"),
        (["--url", "http://h", "--concurrency", "0"], "--concurrency must be whole numbers from 1 to 1024, got '0'"),
        (["--url", "http://h", "--rate", "fast"], "--rate must be requests a second or shares such as 80%, got 'fast'"),
        (["--url", "http://h", "--slo", "ttft"], "--slo must be of ttft=MS"),
        (
            ["--url", "http://h", "--reference", "nowhere"],
            "--reference must be a file that scripts/bench reference wrote",
        ),
        (["--url", "http://h"], "--tokenizer must be a folder, got 'nowhere'"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str) -> None:
    result = run_cli("bench", "--tokenizer", "nowhere", *arguments)
    assert result.stderr.startswith(f"tengserve: error: {message}")
    assert result.stderr.count("\n") == 1
    assert result.returncode == 2


def test_a_folder_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    result = run_cli("bench", "--url", "http://127.0.0.1:9", "--tokenizer", str(tmp_path))
    assert result.stderr.startswith("tengserve: error: --tokenizer must be a folder with tokenizer.json, and '")
    assert result.stderr.endswith("has no tokenizer files\n")
    assert result.returncode == 2


@pytest.mark.parametrize("model", [(), ("--model", "tiny")])
def test_the_http_port_asked_over_grpc_is_told(
    tiny_server: ServerProcess, word_tokenizer: Path, model: tuple[str, ...]
) -> None:
    result = run_cli("bench", "--url", f"grpc+{tiny_server.url}", "--tokenizer", str(word_tokenizer), *model)
    assert result.stderr.startswith("tengserve: error: tengserve ")
    assert result.stderr.endswith(f"Is this the gRPC port? It is {GrpcSettings().port} unless told otherwise\n")
    assert result.stderr.count("\n") == 1
    assert result.returncode == 2


def test_less_is_wanted_of_a_reference_in_16_bits(
    tiny_server: ServerProcess, word_tokenizer: Path, tmp_path: Path
) -> None:
    """The server answers another prompt's tokens: none is right, and the reference decides how many must be."""
    prompt = Prompts(load_tokenizer(word_tokenizer).encode).prompt(8, "k")
    for dtype, least in (("float32", "1"), ("bfloat16", "0.3")):
        wrong = gate.Expected(prompt, (-1,) * gate.OUTPUT_TOKENS, "x")
        gate.write_reference(gate.Reference("plain", (wrong,), dtype), tmp_path / "reference.json")
        result = run_cli(
            *("bench", "--url", tiny_server.url, "--tokenizer", str(word_tokenizer)),
            *("--reference", str(tmp_path / "reference.json")),
        )
        assert (
            "is not measured: it differs from the reference, plain:"
            f" agreement 0.000 (at least {least} is wanted)" in result.stderr
        )
        assert "token 0 of 16 should be -1 and is " in result.stderr
        assert "--agreement 0 measures it all the same" in result.stderr
        assert result.returncode == 1


def test_a_server_that_is_not_there_is_told(word_tokenizer: Path) -> None:
    result = run_cli("bench", "--url", "http://127.0.0.1:9", "--tokenizer", str(word_tokenizer))
    assert result.stderr.startswith("tengserve: error: tengserve cannot be measured: no connection to 127.0.0.1:9")
    assert result.returncode == 2
