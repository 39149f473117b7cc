"""The scheduling rule, in integers."""

import pytest

from tengserve_backend.kvcache.block_pool import BlockPool
from tengserve_backend.scheduling.budget import StepTokens
from tengserve_backend.scheduling.prefix import PrefixSharing
from tengserve_backend.scheduling.scheduler import Scheduler, SchedulerLimits
from tengserve_backend.scheduling.sequence import AGING_ARRIVALS, Sequence
from tengserve_backend.scheduling.step import Step


def make(
    *,
    budget: int = 32,
    running: int = 4,
    beside_streams: int | None = None,
    blocks: int = 64,
    block_size: int = 4,
    sharing: bool = False,
) -> Scheduler:
    pool = BlockPool(blocks, block_size)
    prefixes = PrefixSharing(pool, enabled=sharing)
    return Scheduler(SchedulerLimits(StepTokens(budget, beside_streams or budget), running), pool, prefixes)


def sequence(seq_id: int, prompt: int, priority: int = 5) -> Sequence:
    return Sequence(seq_id, priority, seq_id, prompt, list(range(100, 100 + prompt)))


def parts(step: Step | None) -> dict[int, tuple[int, int, bool]]:
    assert step is not None
    return {part.seq_id: (part.start, len(part.token_ids), part.samples) for part in step.sequences}


def run(scheduler: Scheduler) -> dict[int, tuple[int, int, bool]]:
    """One step whose samples are token 7."""
    step = scheduler.schedule()
    assert step is not None
    scheduler.apply(step, {part.seq_id: 7 for part in step.sequences if part.samples})
    scheduler.check()
    return parts(step)


def test_a_prompt_runs_in_chunks_and_then_decodes():
    scheduler = make(budget=8)
    scheduler.add(sequence(0, 18))
    assert [run(scheduler) for _ in range(4)] == [
        {0: (0, 8, False)},
        {0: (8, 8, False)},
        {0: (16, 2, True)},
        {0: (18, 1, True)},
    ]


def test_running_streams_come_before_prompt_chunks():
    scheduler = make(budget=8)
    for seq_id in (0, 1):
        scheduler.add(sequence(seq_id, 2))
    run(scheduler)
    scheduler.add(sequence(2, 100))
    for _ in range(3):
        step = run(scheduler)
        assert step[0][1:] == (1, True)
        assert step[1][1:] == (1, True)
        assert step[2][1:] == (6, False)


def test_prompts_alone_take_the_whole_step_and_less_beside_a_stream():
    scheduler = make(budget=32, beside_streams=6)
    scheduler.add(sequence(0, 40))
    assert run(scheduler) == {0: (0, 32, False)}
    assert run(scheduler) == {0: (32, 8, True)}
    scheduler.add(sequence(1, 40))
    assert run(scheduler) == {0: (40, 1, True), 1: (0, 6, False)}
    assert run(scheduler) == {0: (41, 1, True), 1: (6, 6, False)}


def test_the_more_wait_for_a_stream_the_more_of_their_prompts_are_computed_at_once():
    scheduler = make(budget=32, beside_streams=6, running=4)
    scheduler.add(sequence(0, 2))
    run(scheduler)
    for seq_id in (1, 2, 3):
        scheduler.add(sequence(seq_id, 8))
    assert run(scheduler) == {0: (2, 1, True), 1: (0, 8, True), 2: (0, 8, True), 3: (0, 2, False)}
    # Three run now, and one waits.
    assert run(scheduler) == {0: (3, 1, True), 1: (8, 1, True), 2: (8, 1, True), 3: (2, 6, True)}


def test_a_step_with_prompts_and_streams_has_no_more_than_any_other():
    scheduler = make(budget=16, beside_streams=6, running=4)
    scheduler.add(sequence(0, 2))
    run(scheduler)
    for seq_id in (1, 2, 3):
        scheduler.add(sequence(seq_id, 30))
    assert run(scheduler) == {0: (2, 1, True), 1: (0, 15, False)}


def test_those_who_may_not_run_yet_do_not_count():
    scheduler = make(budget=32, beside_streams=6, running=2)
    scheduler.add(sequence(0, 2))
    run(scheduler)
    for seq_id in range(1, 9):
        scheduler.add(sequence(seq_id, 30))
    assert run(scheduler) == {0: (2, 1, True), 1: (0, 6, False)}


def test_waiting_sequences_start_by_priority_then_arrival():
    scheduler = make(running=1)
    scheduler.add(sequence(0, 2, priority=5))
    run(scheduler)
    late_but_first = sequence(3, 2, priority=1)
    for waiting in (sequence(1, 2, priority=5), sequence(2, 2, priority=3), late_but_first):
        scheduler.add(waiting)
    assert scheduler.waiting == 3
    order = []
    current = 0
    for _ in range(3):
        scheduler.remove(next(s for s in scheduler._running.values() if s.seq_id == current))
        (current,) = run(scheduler)
        order.append(current)
    assert order == [3, 2, 1]


def test_urgent_requests_overtake_a_patient_one_so_many_times_and_no_more():
    scheduler = make(running=1)
    scheduler.add(sequence(0, 2))
    run(scheduler)
    patient = sequence(1, 2, priority=2)
    scheduler.add(patient)
    served = 0
    for seq_id in range(2, 200):
        scheduler.add(sequence(seq_id, 2, priority=1))
        (current,) = scheduler._running.values()
        if current is patient:
            break
        scheduler.remove(current)
        run(scheduler)
        served += 1
    assert served == AGING_ARRIVALS  # the one that ran already, and all but one of that many later ones


def test_without_blocks_the_newest_gives_way_and_comes_back_unchanged():
    scheduler = make(blocks=4, block_size=4)
    old, new = sequence(0, 7), sequence(1, 7)
    scheduler.add(old)
    scheduler.add(new)
    run(scheduler)  # both at 7 of 8 tokens, no block is free
    run(scheduler)  # both at 8 of 8
    assert run(scheduler) == {0: (8, 1, True)}
    assert (scheduler.preemptions, scheduler.running, scheduler.waiting) == (1, 1, 1)
    assert new.blocks == []
    known = list(new.token_ids)
    scheduler.remove(old)
    assert run(scheduler) == {1: (0, len(known), True)}
    assert new.token_ids == [*known, 7]


def test_a_low_priority_sequence_gives_way_even_if_it_is_older():
    scheduler = make(blocks=4, block_size=4)
    scheduler.add(sequence(0, 7, priority=5))
    scheduler.add(sequence(1, 7, priority=1))
    run(scheduler)
    run(scheduler)
    assert run(scheduler) == {1: (8, 1, True)}


def test_removing_in_every_state_gives_the_blocks_back():
    scheduler = make(budget=4, running=2)
    decoding, prefilling, waiting = sequence(0, 2), sequence(1, 30), sequence(2, 2)
    scheduler.add(decoding)
    run(scheduler)
    scheduler.add(prefilling)
    scheduler.add(waiting)
    run(scheduler)
    assert (scheduler.running, scheduler.waiting) == (2, 1)
    for member in (waiting, prefilling, decoding):
        scheduler.remove(member)
        scheduler.check()
    assert not scheduler.has_work
    assert scheduler.schedule() is None
    assert scheduler._pool.free == scheduler._pool.total


def test_a_result_for_a_sequence_removed_meanwhile_is_dropped():
    scheduler = make()
    first, second = sequence(0, 2), sequence(1, 2)
    scheduler.add(first)
    scheduler.add(second)
    step = scheduler.schedule()
    assert step is not None
    scheduler.remove(first)
    scheduler.apply(step, {0: 7, 1: 7})
    assert len(first.token_ids) == 2
    assert len(second.token_ids) == 3


def test_limits_that_would_starve_a_decode_are_refused():
    with pytest.raises(ValueError, match="room for one token of each running sequence"):
        SchedulerLimits(StepTokens(4, 4), max_running=5)


# Prefix sharing


@pytest.mark.parametrize(("prompt", "found"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_a_known_beginning_is_not_computed_again_but_its_last_token_is(prompt, found):
    scheduler = make(sharing=True)
    first = sequence(0, prompt)
    scheduler.add(first)
    run(scheduler)
    scheduler.remove(first)
    scheduler.add(sequence(1, prompt))
    assert run(scheduler) == {1: (found, prompt - found, True)}


def test_running_sequences_share_blocks_and_each_gives_them_back_once():
    scheduler = make(sharing=True, blocks=6)
    first, second = sequence(0, 9), sequence(1, 9)
    scheduler.add(first)
    run(scheduler)
    scheduler.add(second)
    run(scheduler)
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] != first.blocks[2]
    assert scheduler._pool.used == 4
    scheduler.remove(first)
    scheduler.check()
    assert scheduler._pool.used == 3
    scheduler.remove(second)
    scheduler.check()
    assert (scheduler._pool.used, scheduler._pool.cached) == (0, 2)


def test_only_computed_blocks_are_shared():
    scheduler = make(sharing=True, budget=4, running=2)
    scheduler.add(sequence(0, 20))
    run(scheduler)
    scheduler.add(sequence(1, 20))
    step = run(scheduler)
    assert step == {0: (4, 4, False)}
    scheduler.remove(next(s for s in scheduler._running.values() if s.seq_id == 0))
    assert run(scheduler) == {1: (8, 4, False)}


def test_a_preempted_sequence_finds_its_own_blocks_again():
    scheduler = make(blocks=4, block_size=4, sharing=True)
    old, new = sequence(0, 7), Sequence(1, 5, 1, 7, list(range(200, 207)))
    scheduler.add(old)
    scheduler.add(new)
    for _ in range(3):
        run(scheduler)
    assert scheduler.preemptions == 1
    scheduler.remove(old)
    (part,) = run(scheduler).values()
    assert part[0] > 0


def test_output_tokens_are_shared_too():
    scheduler = make(sharing=True)
    first = sequence(0, 3)
    scheduler.add(first)
    for _ in range(6):
        run(scheduler)
    scheduler.remove(first)
    follow_up = Sequence(1, 5, 1, 10, [*first.token_ids, 50])
    scheduler.add(follow_up)
    assert run(scheduler) == {1: (8, 2, True)}
