"""A whole engine around a scripted model: ends, text, cancellation, limits, failures."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from support.scripted_model import ByteTokenizer, says, scripted_engine
from tengserve_backend.devices.cpu import CpuDevice
from tengserve_backend.engine.native import NativeEngine
from tengserve_backend.errors import (
    DeadlineExceededError,
    DeviceLostError,
    EngineFailedError,
    GenerationFailedError,
    InvalidRequestError,
    InvalidTokenIdError,
    OverloadedError,
    PromptTooLongError,
    RequestAbortedError,
    ShuttingDownError,
)
from tengserve_backend.generation import FinishReason, GenerationRequest, TokenEvent
from tengserve_backend.inference.llm import LlmTensorModel

EOS = 299


@pytest.fixture
def start():
    engines: list[NativeEngine] = []

    def build(*args, **kwargs) -> NativeEngine:
        engines.append(scripted_engine(*args, **kwargs))
        return engines[-1]

    yield build
    for engine in engines:
        engine.stop()


class Gate:
    """Holds the engine's thread at the start of a step."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self._entered = threading.Semaphore(0)
        self._allowed = threading.Semaphore(0)
        self._open = False

    def __call__(self, ids: Sequence[int]) -> None:
        self.steps.append(list(ids))
        self._entered.release()
        if not self._open:
            assert self._allowed.acquire(timeout=60)

    async def entered(self) -> list[int]:
        """Wait until a step begins; its input ids."""
        assert await asyncio.to_thread(self._entered.acquire, True, 60)
        return self.steps[-1]

    def allow(self) -> None:
        """Let the step that is held go on."""
        self._allowed.release()

    def open(self) -> None:
        """Hold nothing any more."""
        self._open = True
        self._allowed.release()


async def read(generation) -> list[TokenEvent]:
    return [event async for event in generation]


async def run(engine: NativeEngine, prompt: str = "p", **fields) -> list[TokenEvent]:
    return await read(await engine.submit(GenerationRequest("r", prompt, **fields)))


def text(events: list[TokenEvent]) -> str:
    return "".join(event.text for event in events)


def end(events: list[TokenEvent]) -> tuple[FinishReason, int]:
    assert [event.finish is None for event in events] == [True] * (len(events) - 1) + [False]
    finish = events[-1].finish
    assert finish is not None
    return finish.reason, finish.generated_tokens


# Ends


async def test_eos_is_counted_and_not_shown(start):
    events = await run(start(says("hi", 1, then=EOS), eos_ids=[EOS]))
    assert text(events) == "hi"
    assert end(events) == (FinishReason.EOS, 3)


async def test_every_eos_id_ends(start):
    events = await run(start(says("hi", 1, then=298), eos_ids=[EOS, 298]))
    assert end(events) == (FinishReason.EOS, 3)


async def test_eos_on_the_last_allowed_token_is_eos(start):
    events = await run(start(says("hi", 1, then=EOS), eos_ids=[EOS]), max_new_tokens=3)
    assert end(events) == (FinishReason.EOS, 3)


async def test_length(start):
    events = await run(start(says("hello", 1, then=EOS), eos_ids=[EOS]), max_new_tokens=2)
    assert text(events) == "he"
    assert end(events) == (FinishReason.LENGTH, 2)


async def test_max_iter_times_and_the_room_left_lower_the_length(start):
    engine = start(lambda position, last: 97, max_iter_times=7, max_seq_len=12)
    assert end(await run(engine, "p", max_new_tokens=100)) == (FinishReason.LENGTH, 7)
    assert end(await run(engine, "p" * 8, max_new_tokens=100)) == (FinishReason.LENGTH, 4)


async def test_ignored_eos_goes_on_and_is_skipped_in_the_text(start):
    tokenizer = ByteTokenizer(special={EOS: "<end>"})
    engine = start(says("hi", 1, then=EOS), tokenizer=tokenizer, eos_ids=[EOS])
    events = await run(engine, ignore_eos=True, max_new_tokens=5)
    assert text(events) == "hi"
    assert end(events) == (FinishReason.LENGTH, 5)
    shown = await run(engine, ignore_eos=True, max_new_tokens=4, skip_special_tokens=False)
    assert text(shown) == "hi<end><end>"


async def test_stop_string_across_tokens(start):
    engine = start(says("one two three", 1, then=EOS))
    events = await run(engine, stop=("wo t",), max_new_tokens=13)
    assert text(events) == "one t"
    assert end(events) == (FinishReason.STOP, 9)
    assert [event.text for event in events][-4:] == ["", "", "", ""]


async def test_stop_string_inside_a_word_token(start):
    words = {"Paris": 280}
    engine = start(says("is Paris!", 1, then=EOS, words=words), tokenizer=ByteTokenizer({280: "Paris"}))
    events = await run(engine, stop=("Pari",))
    assert text(events) == "is "
    assert end(events)[0] is FinishReason.STOP


async def test_stop_string_wins_over_the_length_on_the_same_token(start):
    events = await run(start(says("abc", 1, then=EOS)), stop=("bc",), max_new_tokens=3)
    assert text(events) == "a"
    assert end(events) == (FinishReason.STOP, 3)


async def test_text_held_back_for_a_stop_string_comes_at_the_end(start):
    engine = start(says("abXY", 1, then=EOS), eos_ids=[EOS])
    for fields in ({"max_new_tokens": 4}, {}):
        assert text(await run(engine, stop=("XYZ",), **fields)) == "abXY"


async def test_min_new_tokens_holds_off_eos_and_stop_strings(start):
    engine = start(lambda position, last: EOS if position % 3 == 0 else 97, eos_ids=[EOS])
    assert end(await run(engine, max_new_tokens=20)) == (FinishReason.EOS, 3)
    events = await run(engine, max_new_tokens=20, min_new_tokens=4)
    assert end(events) == (FinishReason.EOS, 6)
    assert EOS not in [event.token_id for event in events[:4]]
    stopped = await run(start(lambda position, last: 97), stop=("aa",), min_new_tokens=3, max_new_tokens=20)
    assert end(stopped) == (FinishReason.STOP, 5)


# Text


async def test_no_event_holds_half_a_character(start):
    events = await run(start(says("歪😀é!", 1, then=EOS)), max_new_tokens=10)
    assert [event.text for event in events] == ["", "", "歪", "", "", "", "😀", "", "é", "!"]


async def test_an_incomplete_character_at_the_end_is_replaced(start):
    events = await run(start(says("歪", 1, then=EOS), eos_ids=[EOS]), max_new_tokens=2)
    assert text(events) == "\ufffd"


async def test_events_carry_ids_latencies_and_the_seed(start):
    engine = start(says("abc", 1, then=EOS))
    events = await run(engine, max_new_tokens=3)
    assert [event.token_id for event in events] == [97, 98, 99]
    assert all(event.latency_ms >= 0 for event in events)
    first, second = events[-1].finish, (await run(engine, max_new_tokens=1))[-1].finish
    assert first is not None
    assert second is not None
    assert first.seed != second.seed
    assert 0 < first.seed < 2**32


# Cancellation and deadlines


async def test_cancelling_in_every_state_ends_within_a_step_and_spares_the_others(start):
    gate = Gate()
    engine = start(
        lambda position, last: last,
        before_step=gate,
        max_batch_size=2,
        max_batched_tokens=4,
        max_seq_len=400,
        total_blocks=64,
    )
    decoding = await engine.submit(GenerationRequest("d", "d", max_new_tokens=300))
    await gate.entered()
    gate.allow()
    assert (await anext(decoding)).text == "d"
    prefilling = await engine.submit(GenerationRequest("p", "p" * 100, max_new_tokens=300))
    queued = await engine.submit(GenerationRequest("q", "q", max_new_tokens=300))
    while "p" not in bytes(await gate.entered()).decode():
        gate.allow()
    for generation in (queued, prefilling):
        generation.abort()
        with pytest.raises(RequestAbortedError):
            await anext(generation)
    gate.allow()
    # The step that was running when they were cancelled is the last that has them.
    for _ in range(3):
        assert bytes(await gate.entered()) == b"d"
        assert engine.status().running_requests == 1
        gate.allow()
    decoding.abort()
    gate.open()
    assert await engine.drain(60)
    status = engine.status()
    assert (status.running_requests, status.waiting_requests, status.waiting_tokens) == (0, 0, 0)
    assert status.free_blocks + status.cached_blocks == status.total_blocks


async def test_a_neighbour_is_untouched_by_a_cancelled_request(start):
    engine = start(lambda position, last: (last + 1) % 100)
    alone = [event.token_id for event in await run(engine, "a", max_new_tokens=60)]
    keeper = await engine.submit(GenerationRequest("k", "a", max_new_tokens=60))
    for number in range(6):
        victim = await engine.submit(GenerationRequest("v", "v" * (number + 1) * 20, max_new_tokens=400))
        if number % 2:
            await anext(victim)
        victim.abort()
    assert [event.token_id for event in await read(keeper)] == alone


async def test_abort_is_harmless_after_the_end(start):
    engine = start(says("hi", 1, then=EOS))
    generation = await engine.submit(GenerationRequest("r", "p", max_new_tokens=2))
    assert text(await read(generation)) == "hi"
    generation.abort()
    with pytest.raises(StopAsyncIteration):
        await anext(generation)


async def test_the_deadline_ends_running_and_queued_requests_within_a_step(start):
    gate, clock = Gate(), [0.0]
    engine = start(lambda position, last: 97, before_step=gate, max_batch_size=2, now=lambda: clock[0])
    keeper = await engine.submit(GenerationRequest("k", "p", max_new_tokens=300, timeout_s=10.5))
    await gate.entered()
    running = await engine.submit(GenerationRequest("r", "p", max_new_tokens=300, timeout_s=10.0))
    queued = await engine.submit(GenerationRequest("q", "p", max_new_tokens=300, timeout_s=10.0))
    gate.allow()
    assert await gate.entered() == [97, 112]
    clock[0] = 10.0
    gate.allow()
    for generation in (running, queued):
        with pytest.raises(DeadlineExceededError):
            await read(generation)
    assert await gate.entered() == [97]
    keeper.abort()
    gate.open()
    assert await engine.drain(60)


# Limits


async def test_prompts_that_do_not_fit_are_refused_with_the_numbers(start):
    engine = start(lambda position, last: 97, max_seq_len=32, total_blocks=2)
    with pytest.raises(InvalidRequestError, match="at least one token"):
        await run(engine, "")
    with pytest.raises(PromptTooLongError, match="cannot be greater than 31, the input ids length is 32"):
        await run(engine, "p" * 32)
    with pytest.raises(PromptTooLongError, match="greater than 10, the input ids length is 11"):
        await run(engine, "p" * 11, max_prompt_tokens=10)
    with pytest.raises(InvalidTokenIdError, match="Token id 300 at index 2 is outside the vocabulary of 300 tokens"):
        await engine.submit(GenerationRequest("r", (1, 299, 300)))
    with pytest.raises(InvalidTokenIdError, match="Token id -1 at index 0"):
        await engine.submit(GenerationRequest("r", (-1,)))
    assert end(await run(engine, "p" * 31)) == (FinishReason.LENGTH, 1)


async def test_a_text_that_is_surely_too_long_is_refused_before_it_is_tokenized(start):
    class Untouched(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            raise AssertionError("a long text reached the tokenizer")

    engine = start(lambda position, last: 97, tokenizer=Untouched())
    with pytest.raises(PromptTooLongError, match="greater than 511, the input ids length is at least 5000"):
        await run(engine, "p" * 5000)
    assert await engine.drain(60)


async def test_a_request_that_the_cache_can_never_hold_is_refused(start):
    engine = start(lambda position, last: 97, max_seq_len=400, total_blocks=4)
    with pytest.raises(PromptTooLongError, match="need 5 blocks of the KV cache, which has 4"):
        await run(engine, "p" * 60, max_new_tokens=20)
    assert end(await run(engine, "p" * 60, max_new_tokens=4)) == (FinishReason.LENGTH, 4)


async def test_exactly_the_excess_is_refused_at_once(start):
    gate = Gate()
    engine = start(lambda position, last: 97, before_step=gate, max_batch_size=2, max_waiting_requests=4)
    outcomes = await asyncio.gather(
        *(engine.submit(GenerationRequest("r", "p", max_new_tokens=2)) for _ in range(50)), return_exceptions=True
    )
    refused = [outcome for outcome in outcomes if isinstance(outcome, OverloadedError)]
    accepted = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    assert (len(accepted), len(refused)) == (6, 44)
    assert refused[0].retry_after_s >= 1
    gate.open()
    for generation in accepted:
        assert len(await read(generation)) == 2


async def test_waiting_tokens_are_bounded_and_counted_down(start):
    gate = Gate()
    engine = start(lambda position, last: 97, before_step=gate, max_batch_size=1, max_waiting_tokens=50)
    first = await engine.submit(GenerationRequest("r", "p" * 40, max_new_tokens=1))
    await gate.entered()
    second = await engine.submit(GenerationRequest("r", "p" * 40, max_new_tokens=1))
    with pytest.raises(OverloadedError, match="40 prompt tokens are waiting and this request has 11"):
        await engine.submit(GenerationRequest("r", "p" * 11, max_new_tokens=1))
    assert engine.status().waiting_tokens == 40
    second.abort()
    gate.open()
    await read(first)
    assert await engine.drain(60)
    assert engine.status().waiting_tokens == 0


# Failures


def poison(token: str) -> Callable[[Sequence[int]], None]:
    """A model that fails whenever this token is in its input."""

    def fail(ids: Sequence[int]) -> None:
        if ord(token) in ids:
            raise RuntimeError("broken /secret/path")

    return fail


async def test_a_request_that_makes_the_model_raise_fails_alone(start):
    engine = start(lambda position, last: last, before_step=poison("x"))
    keepers = [await engine.submit(GenerationRequest("k", "ab"[n], max_new_tokens=50)) for n in range(2)]
    for _ in range(5):
        with pytest.raises(GenerationFailedError) as caught:
            await run(engine, "x")
        assert "secret" not in str(caught.value)
    assert [text(await read(keeper)) for keeper in keepers] == ["a" * 50, "b" * 50]
    assert engine.status().alive
    assert await engine.drain(60)
    assert engine.status().running_requests == 0


async def test_logits_that_are_not_finite_fail_their_request_alone_and_are_not_shared(start):
    engine = start(lambda position, last: 1000 if last == ord("x") else last)
    prompt = "y" * 40 + "x"
    for _ in range(2):
        keeper = await engine.submit(GenerationRequest("k", "a", max_new_tokens=30))
        with pytest.raises(GenerationFailedError, match="no finite scores"):
            await run(engine, prompt)
        assert text(await read(keeper)) == "a" * 30
    assert engine.status().prefix_hit_tokens == 0


async def test_an_engine_that_cannot_run_at_all_is_dead_and_everybody_hears(start):
    def fail(ids: Sequence[int]) -> None:
        raise RuntimeError("broken /secret/path")

    engine = start(lambda position, last: 97, before_step=fail, max_batch_size=1)
    outcomes = await asyncio.gather(*(run(engine) for _ in range(6)), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {EngineFailedError}
    status = engine.status()
    assert not status.alive
    assert status.failure is not None
    assert "secret" not in status.failure
    with pytest.raises(EngineFailedError):
        await run(engine)


class LosableDevice(CpuDevice):
    """A CPU that can be lost; `released` counts how often it was used afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.released = 0

    def is_fault(self, error: BaseException) -> bool:
        return "lost" in str(error)

    def explain(self, error: BaseException) -> str:
        return "Buy a new one."

    def release_memory(self) -> None:
        self.released += 1


async def test_a_lost_device_ends_the_engine_at_once_and_everybody_hears(start, caplog):
    steps = []

    def lose(ids: Sequence[int]) -> None:
        steps.append(len(ids))
        if ord("x") in ids:
            raise RuntimeError("lost at /secret/path")

    device = LosableDevice()
    engine = start(lambda position, last: last, before_step=lose, device=device)
    keeper = await engine.submit(GenerationRequest("k", "a", max_new_tokens=500))
    outcomes = await asyncio.gather(read(keeper), run(engine, "x"), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {DeviceLostError}
    assert {outcome.message for outcome in outcomes} == {"The device cpu of model scripted failed."}
    assert "Buy a new one." in caplog.text
    status = engine.status()
    assert not status.alive
    assert status.device_lost
    tried = len(steps)
    engine.stop()
    assert len(steps) == tried, "nothing is tried again"
    assert device.released == 0, "a lost device might never answer"


async def test_out_of_memory_makes_the_batch_smaller_and_nobody_fails(start):
    def too_much(ids: Sequence[int]) -> None:
        if len(ids) > 3:
            raise MemoryError

    engine = start(lambda position, last: last, before_step=too_much)
    answers = await asyncio.gather(*(run(engine, letter, max_new_tokens=20) for letter in "abcdef"))
    assert [text(answer) for answer in answers] == [letter * 20 for letter in "abcdef"]
    assert engine.status().preemptions > 0


async def test_a_request_that_does_not_fit_into_memory_alone_fails_alone(start):
    def too_much(ids: Sequence[int]) -> None:
        if ord("x") in ids:
            raise MemoryError

    engine = start(lambda position, last: last, before_step=too_much)
    keeper = await engine.submit(GenerationRequest("k", "a", max_new_tokens=50))
    with pytest.raises(GenerationFailedError):
        await run(engine, "x")
    assert text(await read(keeper)) == "a" * 50


async def test_a_step_that_hangs_is_seen(start):
    gate = Gate()
    engine = start(lambda position, last: 97, before_step=gate)
    assert engine.status().seconds_since_step == 0.0
    generation = await engine.submit(GenerationRequest("r", "p", max_new_tokens=1))
    await gate.entered()
    assert engine.status().seconds_since_step > 0.0
    gate.open()
    await read(generation)


# Drain and stop


async def test_drain_finishes_what_runs_and_admits_nothing(start):
    gate = Gate()
    engine = start(says("hi", 1, then=EOS), before_step=gate)
    generation = await engine.submit(GenerationRequest("r", "p", max_new_tokens=2))
    await gate.entered()
    assert not await engine.drain(0.0)
    with pytest.raises(ShuttingDownError):
        await run(engine)
    gate.open()
    assert await engine.drain(60)
    assert text(await read(generation)) == "hi"


async def test_stop_ends_everybody(start):
    engine = start(lambda position, last: 97, max_batch_size=1)
    generations = [await engine.submit(GenerationRequest("r", "p", max_new_tokens=500)) for _ in range(3)]
    await anext(generations[0])
    await asyncio.to_thread(engine.stop)
    for generation in generations:
        with pytest.raises(RequestAbortedError):
            await read(generation)
    with pytest.raises(ShuttingDownError):
        await run(engine)
    engine.stop()


async def test_long_texts_are_tokenized_off_the_event_loop(start):
    class Slow(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            threads.append(threading.current_thread())
            return super().encode(text)

    threads: list[threading.Thread] = []
    engine = start(lambda position, last: 97, tokenizer=Slow(), max_seq_len=8000, total_blocks=512)
    await run(engine, "p", max_new_tokens=1)
    await run(engine, "p" * 5000, max_new_tokens=1)
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threading.current_thread()


async def test_statistics_tell_what_was_done(start):
    clock = [100.0]

    def tick(ids: Sequence[int]) -> None:
        clock[0] += 0.25

    engine = start(
        says("hello", 4, then=EOS),
        tokenizer=ByteTokenizer(special={EOS: "<end>"}),
        eos_ids=[EOS],
        before_step=tick,
        now=lambda: clock[0],
    )
    model = LlmTensorModel(engine)
    assert model.statistics().last_inference_ms == 0
    began_ms = time.time_ns() // 1_000_000
    await run(engine, "abcd")
    assert began_ms <= model.statistics().last_inference_ms <= time.time_ns() // 1_000_000
    await run(engine, "abcd", max_new_tokens=2)
    aborted = await engine.submit(GenerationRequest("r", "abcd", max_new_tokens=400, ignore_eos=True))
    await anext(aborted)
    aborted.abort()
    assert await engine.drain(60)
    statistics = engine.status().statistics
    assert statistics.prompt_tokens == 12
    assert statistics.finished == {FinishReason.EOS: 1, FinishReason.LENGTH: 1, FinishReason.STOP: 0}
    assert (statistics.failed, statistics.aborted) == (0, 1)
    assert statistics.generated_tokens >= 6 + 2 + 1
    assert (statistics.queue_seconds.count, statistics.queue_seconds.total) == (3, 0.0)
    assert (statistics.first_token_seconds.count, statistics.first_token_seconds.total) == (3, 0.75)
    tokens = statistics.token_seconds
    assert tokens.count == statistics.generated_tokens - 3
    assert tokens.total == 0.25 * tokens.count
    assert tokens.counts[tokens.bounds.index(0.3)] == tokens.count
    assert statistics.step_tokens.total == statistics.generated_tokens + 9
    assert statistics.step_sequences.total == statistics.step_seconds.count == engine.status().steps


async def test_a_tokenizer_that_raises_fails_its_request_alone(start):
    class Broken(ByteTokenizer):
        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
            if 120 in token_ids:
                raise ValueError("unknown token")
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    engine = start(lambda position, last: last, tokenizer=Broken())
    keeper = await engine.submit(GenerationRequest("k", "a", max_new_tokens=50))
    with pytest.raises(GenerationFailedError, match="text of the answer"):
        await run(engine, "x")
    assert text(await read(keeper)) == "a" * 50
