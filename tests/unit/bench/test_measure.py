"""A whole measurement in virtual time: order, gate, ratios, rates, and what the reports say."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from support.bench_servers import Schedule, server, token
from support.virtual_time import run
from tengserve_adapter.bench import gate
from tengserve_adapter.bench.dialects import Ask
from tengserve_adapter.bench.figures import Slo
from tengserve_adapter.bench.gate import Expected, Reference, Verdict, read_reference, write_reference
from tengserve_adapter.bench.load import Arrivals
from tengserve_adapter.bench.measure import Measurement
from tengserve_adapter.bench.picture import draw
from tengserve_adapter.bench.plan import Plan, RateOf, Results, Run, System
from tengserve_adapter.bench.report import to_json, to_markdown
from tengserve_adapter.bench.requests import Chunk, Request
from tengserve_adapter.bench.summary import comparisons, rows
from tengserve_adapter.bench.workloads import WORKLOADS, Prompts

ABOUT = {
    "command": "tengserve bench",
    "machine": {"cpu": "some", "cores": 2, "load_average_before": 0.1, "load_average_after": 0.2},
    "versions": {"fast": "tengserve 1"},
}


def encode(text: str) -> list[int]:
    return [sum(word.encode()) for word in text.split()]


def answers(delay: float, *, wrong: bool = False, short: bool = False) -> Callable[[Request], Schedule]:
    """Token n of an answer is n, one after each delay."""

    def schedule(request: Request) -> Schedule:
        count = request.output_tokens - (short and request.output_tokens != gate.OUTPUT_TOKENS)
        numbers = [9 if wrong and number == 6 else number for number in range(count)]
        return [(delay, token(number)) for number in numbers]

    return schedule


class Told:
    """Notes what a measurement tells."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.answers = 0

    def gate(self, system: str, verdict: Verdict, least: float) -> None:
        self.begun.append(f"gate {system} {verdict.agreement >= least}")

    def begin(self, what: str, requests: int) -> None:
        self.begun.append(what)

    def answered(self) -> None:
        self.answers += 1

    def end(self, run: Run | None) -> None:
        pass


def measured(schedules: dict[str, Callable[[Request], Schedule]], **changes: object) -> tuple[Plan, Results, Told]:
    async def main(now: Callable[[], float]) -> tuple[Plan, Results, Told]:
        plan = Plan(
            systems=[System(name, "infer", "http://h", "m", server(one)) for name, one in schedules.items()],
            workloads=[WORKLOADS["chat"]],
            concurrency=[1, 2],
            rates=[],
            arrivals=Arrivals.FIXED,
            rounds=2,
            requests=None,
            slo=Slo(ttft=1.0),
            seed=0,
            timeout_s=100.0,
            agreement=1.0,
            reference=None,
            prompts=Prompts(encode),
        )
        plan = replace(plan, **changes)
        told = Told()
        return plan, await Measurement(plan, told, now).run(), told

    return run(main)


FAST_SLOW = {"fast": answers(0.125), "slow": answers(0.25)}


def test_systems_take_turns_after_the_gate() -> None:
    _, _, told = measured(FAST_SLOW)
    assert told.begun == [
        "gate fast True",
        "gate slow True",
        "chat, warming up, fast",
        "chat, warming up, slow",
        *(
            f"chat {load}, round {number} of 2, {name}"
            for load in ("c1", "c2")
            for number in (1, 2)
            for name in ("fast", "slow")
        ),
    ]
    assert told.answers == 2 * 2 + 4 * 8 + 4 * 8


def test_rows_and_ratios_are_those_of_the_delays() -> None:
    _, results, _ = measured(FAST_SLOW)
    found = rows(results.runs)
    assert [(row.load, row.system, row.valid) for row in found] == [
        ("c1", "fast", True),
        ("c1", "slow", True),
        ("c2", "fast", True),
        ("c2", "slow", True),
    ]
    assert [row.median(lambda one: one.output_per_s) for row in found] == pytest.approx([8.0, 4.0, 16.0, 8.0])
    assert [row.median(lambda one: one.tpot.p50) for row in found] == pytest.approx([0.125, 0.25, 0.125, 0.25])
    for one in comparisons(found, "fast"):
        assert (one.output_per_s, one.ttft, one.tpot) == pytest.approx((2.0, 0.5, 0.5))
        assert one.rounds == pytest.approx((2.0, 2.0))


def test_every_system_gets_the_same_prompts_and_each_round_others() -> None:
    seen: dict[str, list[str]] = {"a": [], "b": []}

    def noting(name: str) -> Callable[[Request], Schedule]:
        def schedule(request: Request) -> Schedule:
            if request.output_tokens == 64:
                seen[name].append(request.prompt.text)
            return answers(0.125)(request)

        return schedule

    measured({name: noting(name) for name in seen}, concurrency=[1])
    assert seen["a"] == seen["b"]
    assert len(set(seen["a"])) == len(seen["a"]) == 1 + 2 * 8


def test_a_system_that_answers_wrong_is_not_measured() -> None:
    _, results, told = measured({"fast": answers(0.125), "wrong": answers(0.01, wrong=True)})
    assert "gate wrong False" in told.begun
    assert {one.system for one in results.runs} == {"fast"}
    verdict = results.verdicts["wrong"]
    assert verdict.agreement == pytest.approx(6 / 16)
    assert verdict.reference == "fast alone"
    assert verdict.difference == "a prompt of 8 tokens, alone: token 6 of 16 should be 6 and is 9"


def test_a_lower_bar_lets_it_in() -> None:
    systems = {"fast": answers(0.125), "wrong": answers(0.25, wrong=True)}
    _, results, _ = measured(systems, agreement=0.25)
    assert {one.system for one in results.runs} == {"fast", "wrong"}


def test_a_reference_may_void_everybody() -> None:
    prompt = Prompts(encode).prompt(8, "k")
    reference = Reference("plain", (Expected(prompt, (5,) * 16, "x" * 16),))
    _, results, told = measured(FAST_SLOW, reference=reference)
    assert results.runs == []
    assert told.begun == ["gate fast False", "gate slow False"]


def test_batches_are_judged_too() -> None:
    """A server that is right alone and wrong beside others."""
    running = 0

    def make() -> Ask:
        async def ask(request: Request) -> AsyncIterator[Chunk]:
            nonlocal running
            running += 1
            try:
                async for chunk in server(answers(0.125, wrong=running > 1))(request):
                    yield chunk
            finally:
                running -= 1

        return ask

    async def main(_: Callable[[], float]) -> Verdict:
        ask = make()
        prompts = gate.gate_prompts(Prompts(encode))
        reference = await gate.own_answers(ask, "it", prompts, timeout_s=100.0)
        return await gate.check(ask, reference, timeout_s=100.0)

    verdict = run(main)
    assert 0.5 < verdict.agreement < 0.75
    assert ", at once: token 6 of 16 should be" in verdict.difference


def test_texts_are_compared_where_there_are_no_ids() -> None:
    def words(request: Request) -> Schedule:
        return [(0.125, Chunk(text="ab")), (0.125, Chunk(text="c", output_tokens=16))]

    async def main(_: Callable[[], float]) -> Verdict:
        reference = Reference("plain", (Expected(Prompts(encode).prompt(8, "k"), (1, 2), "abd"),))
        return await gate.check(server(words), reference, timeout_s=100.0)

    verdict = run(main)
    assert verdict.agreement == pytest.approx(2 / 3)
    assert verdict.difference == "a prompt of 8 tokens, alone: from character 2 of 3 it should be 'd' and is 'c'"


def test_a_reference_survives_its_file(tmp_path: Path) -> None:
    reference = Reference("plain", (Expected(Prompts(encode).prompt(8, "k"), (1, 2), "é"),), "bfloat16")
    write_reference(reference, tmp_path / "r.json")
    assert read_reference(tmp_path / "r.json") == reference


@pytest.mark.parametrize(("dtype", "least"), [("float32", 1.0), ("bfloat16", 0.3), ("float16", 0.3), ("", 1.0)])
def test_less_is_wanted_of_a_reference_in_16_bits(dtype: str, least: float) -> None:
    assert Reference("plain", (), dtype).least_agreement == least


def test_rates_are_shares_of_the_first_system_s_best() -> None:
    # Two clients get 2 answers in 64 * 0.125 s = 8 s.
    _, results, _ = measured(FAST_SLOW, rates=[RateOf(0.8), 0.5], requests=4)
    loads = {one.system: [str(each.load) for each in results.runs if each.system == one.system] for one in results.runs}
    assert loads["fast"] == loads["slow"] == ["c1"] * 2 + ["c2"] * 2 + ["0.2/s"] * 2 + ["0.5/s"] * 2
    fixed = next(one for one in results.runs if str(one.load) == "0.2/s")
    assert [record.sent - fixed.records[0].sent for record in fixed.records] == pytest.approx([0.0, 5.0, 10.0, 15.0])


def test_short_answers_void_a_row_and_its_ratio() -> None:
    plan, results, _ = measured({"fast": answers(0.125), "slow": answers(0.25, short=True)}, concurrency=[1])
    assert [row.valid for row in rows(results.runs)] == [True, False]
    assert comparisons(rows(results.runs), "fast") == []
    assert "| slow (void) |" in to_markdown(plan, results, ABOUT)
    assert "slow" not in [row["system"] for row in to_json(plan, results, ABOUT)["rows"] if row["valid"]]


def lines(page: str, first: str) -> Sequence[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith(first)
    ]


def test_the_page_has_the_figures() -> None:
    plan, results, _ = measured(FAST_SLOW)
    page = to_markdown(plan, results, ABOUT)
    assert lines(page, "| fast |") == [["fast", "tengserve 1", "infer", "m", "fast alone", "1.000", ""]]
    assert lines(page, "| chat | c2 | fast |") == [
        [
            "chat",
            "c2",
            "fast",
            "16.0 (16.0 to 16.0)",
            "16.0",
            "0.25",
            "125.0 / 125.0 / 125.0",
            "125.0 / 125.0 / 125.0",
            "125.0 / 125.0 / 125.0",
            "8000.0 / 8000.0 / 8000.0",
            "0.25 (100%)",
        ]
    ]
    assert lines(page, "| chat | c2 | slow | 2") == [["chat", "c2", "slow", "2.00", "2.00, 2.00", "0.50", "0.50"]]
    assert "TTFT 1000 ms" in page


def test_the_json_has_everything() -> None:
    plan, results, _ = measured(FAST_SLOW)
    data = json.loads(json.dumps(to_json(plan, results, ABOUT)))
    assert [one["name"] for one in data["systems"]] == ["fast", "slow"]
    assert data["rows"][0]["tpot"] == pytest.approx({"p50": 0.125, "p90": 0.125, "p99": 0.125})
    first = data["runs"][0]
    assert first["aisbench"]["per_request"]["TPOT"]["Median"] == pytest.approx(125.0)
    assert first["aisbench"]["end_to_end"]["Max Concurrency"] == 1
    assert len(first["requests"]) == 8
    assert first["requests"][1]["sent"] == pytest.approx(8.0)
    assert first["requests"][1]["arrivals"][:2] == pytest.approx([8.125, 8.25])


def test_the_picture_has_a_curve_a_system_and_a_point_a_load() -> None:
    _, results, _ = measured(FAST_SLOW, rates=[0.1], requests=4, rounds=1)
    picture = ElementTree.fromstring(draw(rows(results.runs)))
    name = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in picture.iter(f"{name}text")]
    assert texts.count("c1") == texts.count("c2") == texts.count("0.1/s") == 4
    assert {"fast", "slow", "chat: TTFT p50, ms", "chat: TPOT p50, ms"} <= set(texts)
    curves = [element.get("points") or "" for element in picture.iter(f"{name}polyline")]
    assert [len(points.split()) for points in curves] == [2, 2, 2, 2]
    # More throughput is to the right.
    (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in curves[0].split())
    assert x2 > x1
    assert y1 == y2


def test_a_picture_of_nothing_is_one_too() -> None:
    assert ElementTree.fromstring(draw([])).tag.endswith("svg")
