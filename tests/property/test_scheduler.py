"""Whatever arrives, ends and is cancelled: no block is lost, everybody is served, and preemption does not show."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tengserve_backend.kvcache.block_pool import BlockPool
from tengserve_backend.scheduling.budget import StepTokens
from tengserve_backend.scheduling.prefix import PrefixSharing
from tengserve_backend.scheduling.scheduler import Scheduler, SchedulerLimits
from tengserve_backend.scheduling.sequence import Sequence

requests = st.lists(
    st.tuples(
        st.integers(0, 12),  # arrives before this step
        st.integers(1, 30),  # prompt tokens
        st.integers(1, 12),  # output tokens
        st.integers(1, 5),  # priority
        st.one_of(st.none(), st.integers(0, 20)),  # cancelled before this step
    ),
    min_size=1,
    max_size=8,
)


def next_token(known: list[int]) -> int:
    """A "model": depends on everything known."""
    return (sum(known) * 31 + len(known)) % 1009


@settings(max_examples=200, deadline=None)
@given(requests, st.integers(4, 24), st.integers(1, 4), st.integers(1, 24), st.sampled_from([1, 3, 16]), st.booleans())
def test_every_request_gets_its_tokens_and_every_block_comes_back(
    plan, budget, running, beside_streams, block_size, sharing
) -> None:
    longest = max(prompt + output for _, prompt, output, _, _ in plan)
    pool = BlockPool(-(-longest // block_size), block_size)  # just enough for the largest one alone
    prefixes = PrefixSharing(pool, enabled=sharing)
    scheduler = Scheduler(SchedulerLimits(StepTokens(budget, min(budget, beside_streams)), running), pool, prefixes)
    # What a real cache would hold: the tokens whose keys and values were written to each slot.
    written: dict[int, list[int]] = {}
    live: dict[int, tuple[Sequence, int]] = {}
    finished: dict[int, list[int]] = {}
    cancelled: set[int] = set()
    for number in range(5000):
        for seq_id, (arrives, prompt, output, priority, _) in enumerate(plan):
            if arrives == number:
                member = Sequence(seq_id, priority, seq_id, prompt, [seq_id % 3 * 7 + n for n in range(prompt)])
                live[seq_id] = (member, prompt + output)
                scheduler.add(member)
        for seq_id, (arrives, *_, cancel) in enumerate(plan):
            if cancel is not None and max(cancel, arrives) == number and seq_id in live:
                scheduler.remove(live.pop(seq_id)[0])
                cancelled.add(seq_id)
        scheduler.check()
        step = scheduler.schedule()
        if step is None:
            assert not live
            if number > 20:
                break
            continue
        assert step.total_tokens <= budget
        assert scheduler.running <= running
        tokens = {}
        for part in step.sequences:
            member, _ = live[part.seq_id]
            assert part.start == member.computed
            assert part.token_ids == tuple(member.token_ids[part.start : part.start + len(part.token_ids)])
            assert len(part.blocks) * block_size >= part.start + len(part.token_ids)
            for position, token in enumerate(part.token_ids, part.start):
                slot = part.blocks[position // block_size] * block_size + position % block_size
                written[slot] = member.token_ids[: position + 1]
                assert written[slot][-1] == token
            context = part.start + len(part.token_ids)
            for position in range(context):
                slot = part.blocks[position // block_size] * block_size + position % block_size
                assert written[slot] == member.token_ids[: position + 1]
            if part.samples:
                tokens[part.seq_id] = next_token(member.token_ids)
        scheduler.apply(step, tokens)
        scheduler.check()
        for seq_id in tokens:
            member, total = live[seq_id]
            if len(member.token_ids) == total:
                finished[seq_id] = member.token_ids
                scheduler.remove(live.pop(seq_id)[0])
    else:
        raise AssertionError("somebody was never served")
    assert pool.available == pool.total
    for seq_id, (_, prompt, output, _, _) in enumerate(plan):
        if seq_id in cancelled:
            continue
        expected = [seq_id % 3 * 7 + n for n in range(prompt)]
        for _ in range(output):
            expected.append(next_token(expected))
        assert finished[seq_id] == expected
