"""The scheduler without a model: budgets, order, fairness, deadlines and cancels, by example and under random use."""

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from models.decoder.window import Window
from services.contracts.access import places_for
from services.errors import Overloaded
from services.llm.engine.config import EngineConfig
from services.llm.engine.plan import StepPlan
from services.llm.engine.sampling_parameters import SampledToken
from services.llm.engine.scheduler import Scheduler
from services.llm.engine.sequence import Sequence
from tests.support.training.sequences import sequence_of

CONFIG = EngineConfig(
    block_tokens=4,
    num_blocks=12,
    max_num_batched_tokens=16,
    max_chunk_tokens=10,
    max_beam_rows=8,
    max_running=5,
    max_waiting=6,
    tile_tokens=16,
)


def build_sequence(name: str, order: int = 0, *, tokens: list[int] | None = None, **fields) -> Sequence:
    """Build a sequence, by default a depth-1 ranking of 5 tokens."""
    return sequence_of(tokens or [1, 2, 3, 4, 5], request_id=name, order=order, **{"num_levels": 1, **fields})


def build_scheduler(window: Window | None = None, **knobs) -> Scheduler:
    return Scheduler(replace(CONFIG, **knobs), "v1", window)


def run_step(scheduler: Scheduler, now_s: float = 0.0, max_rows: int | None = None) -> tuple[StepPlan, list[Sequence]]:
    """Apply a plan like the engine, with token 7 for text; return the plan and the finished sequences."""
    plan = scheduler.schedule(now_s, max_rows)
    assert all(sequence.block_table for sequence in plan.sequences), "a planned sequence was preempted"
    ending = [chunk.sequence for chunk in plan.chunks if chunk.is_last]
    scheduler.advance(plan)
    done = []
    for sequence in ending + plan.beam_steps:
        if not sequence.num_levels:
            sequence.append_token(SampledToken(7))
        if sequence.num_levels_done == sequence.num_levels and sequence.num_new_tokens == sequence.max_new_tokens:
            scheduler.finish(sequence)
            done.append(sequence)
    scheduler.check_integrity()
    return plan, done


def ids_of(sequences: list[Sequence]) -> list[str]:
    return [sequence.request_id for sequence in sequences]


def test_a_planned_text_keeps_its_blocks_beside_another_tenants_urgent_text() -> None:
    """A less urgent text is planned first in its tenant's turn; the urgent one then finds no block for its token."""
    scheduler = build_scheduler()
    about = {"num_levels": 0, "max_new_tokens": 20}
    scheduler.add(build_sequence("first", 0, tokens=[1] * 13, tenant="acme", weight=1_000.0, priority=3, **about))
    scheduler.add(build_sequence("urgent", 1, tokens=[2] * 15, tenant="bolt", weight=1.0, priority=0, **about))

    ended = [sequence for _ in range(100) for sequence in run_step(scheduler)[1]]

    assert sorted(ids_of(ended)) == ["first", "urgent"]


class SchedulerMachine(RuleBasedStateMachine):
    """Random rankings and texts with deadlines and cancels; each must end exactly once and free its blocks."""

    window: Window | None = None
    longest, most_held = 48, 12
    tenants: tuple[str, ...] = ("",)

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(CONFIG, "v1", self.window)
        self.now_s = 0.0
        self.added: list[Sequence] = []
        self.ended: list[str] = []

    @rule(
        length=st.integers(1, 40) | st.integers(41, 120),
        alphabet=st.integers(1, 2),
        depth=st.integers(0, 3),
        rows=st.integers(1, 8),
        new_tokens=st.integers(1, 9) | st.integers(10, 60),
        priority=st.integers(0, 3),
        lasts_s=st.none() | st.integers(1, 20),
        levels_at_once=st.sampled_from([1, 3]),
    )
    def add(self, length, alphabet, depth, rows, new_tokens, priority, lasts_s, levels_at_once) -> None:
        """A sequence that fits the memory is admitted until the queue is full."""
        sequence = build_sequence(
            str(len(self.added)),
            len(self.added),
            tokens=[index % alphabet for index in range(length)],
            priority=priority,
            tenant=self.tenants[priority % len(self.tenants)],
            weight=1.0 + length,
            arrival_s=self.now_s,
            deadline_s=None if lasts_s is None else self.now_s + lasts_s,
            num_levels=depth,
            rows_by_level=(rows,) * max(0, depth - 1),
            levels_at_once=levels_at_once,
            max_new_tokens=0 if depth else new_tokens,
        )
        if length + sequence.max_new_tokens > self.longest:  # `assume` would end the whole example
            return
        if self.scheduler.num_waiting >= places_for(priority, CONFIG.max_waiting):  # preempted sequences may exceed it
            with pytest.raises(Overloaded) if len(self.tenants) == 1 else suppress(Overloaded):
                self.scheduler.add(sequence)
                self.added.append(sequence)
        else:
            self.scheduler.add(sequence)
            self.added.append(sequence)

    @rule(passes_s=st.integers(0, 3), max_rows=st.none() | st.integers(1, 20))
    def step(self, passes_s: int, max_rows: int | None = None) -> None:
        """A step keeps to its budgets, runs each sequence once, and ends only late sequences."""
        self.now_s += passes_s

        plan, done = run_step(self.scheduler, self.now_s, max_rows)

        assert plan.num_batched_tokens <= CONFIG.max_num_batched_tokens
        assert all(chunk.num_tokens <= CONFIG.max_chunk_tokens for chunk in plan.chunks)
        rows = [s.rows_by_level[s.num_levels_done - 2] for s in plan.beam_steps]
        assert sum(rows) <= CONFIG.max_beam_rows
        touched = ids_of([chunk.sequence for chunk in plan.chunks] + plan.beam_steps)
        assert len(set(touched)) == len(touched) == plan.num_requests
        assert all(s.deadline_s is not None and s.deadline_s <= self.now_s for s in plan.late)
        assert all(len({*s.block_table} - {CONFIG.num_blocks}) <= self.most_held for s in self.added)
        self.ended += ids_of(plan.late + done)

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """A cancelled sequence frees its blocks immediately."""
        sequence = data.draw(st.sampled_from(self.added))
        if self.scheduler.find(sequence.request_id) is not None:
            self.scheduler.finish(sequence)
            self.ended.append(sequence.request_id)

            assert sequence.block_table == []

    @invariant()
    def nothing_is_lost(self) -> None:
        """Every added sequence is live or has ended once, and the scheduler is consistent."""
        self.scheduler.check_integrity()
        live = [s.request_id for s in self.added if self.scheduler.find(s.request_id) is not None]
        assert sorted(live + self.ended) == sorted(ids_of(self.added))

    def teardown(self) -> None:
        """The remaining sequences end within a bounded number of steps, and then all blocks are free."""
        for _ in range(4_000):
            if not self.scheduler.num_running + self.scheduler.num_waiting:
                break
            self.step(0)
        assert self.scheduler.num_running + self.scheduler.num_waiting == 0
        assert self.scheduler.pool.num_free == CONFIG.num_blocks


class WindowedSchedulerMachine(SchedulerMachine):
    """The same with a window: any length is accepted, and a sequence holds at most sinks, window and a chunk."""

    window = Window(6, frozenset({0}), num_sinks=2)
    longest, most_held = 10_000, 1 + 4 + 1


class TenantsSchedulerMachine(SchedulerMachine):
    """The same with two tenants of any weights."""

    tenants = ("acme", "bolt")


@pytest.mark.parametrize("machine", [SchedulerMachine, WindowedSchedulerMachine, TenantsSchedulerMachine])
def test_every_sequence_ends_once_and_frees_its_blocks(machine) -> None:
    """Sequences end once for any adds, cancels and deadlines, with and without a window."""
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=30))


def test_the_urgent_go_first_and_waiting_makes_urgent() -> None:
    """The lowest priority number goes first, but a sequence that waited long enough overtakes newer urgent ones."""
    scheduler = build_scheduler(max_running=1)
    scheduler.add(build_sequence("old and low", 0, priority=3, arrival_s=0.0))
    scheduler.add(build_sequence("new and high", 1, priority=0, arrival_s=2.0))
    scheduler.add(build_sequence("newest and high", 2, priority=0, arrival_s=4.0))

    finished = [ids_of(run_step(scheduler, now_s=4.0)[1]) for _ in range(3)]

    assert finished == [["new and high"], ["old and low"], ["newest and high"]]


def test_a_flood_of_long_prompts_does_not_delay_short_ones() -> None:
    """Under a flood of long prompts, short prompts end at most a step late, and the token budget is fully used."""
    scheduler = build_scheduler(num_blocks=5_000, max_waiting=10_000, max_running=8)
    arrivals, done = {}, {}

    for step in range(120):
        scheduler.add(build_sequence(f"long {step}", 2 * step, tokens=[step] * 100, arrival_s=step * 0.01))
        if step % 2 == 0:
            arrivals[f"short {step}"] = step
            scheduler.add(build_sequence(f"short {step}", 2 * step + 1, arrival_s=step * 0.01))
        _, ended = run_step(scheduler, step * 0.01)
        done |= dict.fromkeys(ids_of(ended), step)

    assert max(done[name] - step for name, step in arrivals.items()) <= 1
    assert sum(name.startswith("long") for name in done) >= 120 * (16 - 5 / 2) // 100 - 2


def test_a_flood_of_short_prompts_does_not_starve_a_long_one() -> None:
    """While short prompts arrive faster than they are computed, a long prompt gets half of the tokens."""
    scheduler = build_scheduler(num_blocks=5_000, max_waiting=10_000, max_running=8)
    scheduler.add(build_sequence("long", 0, tokens=[1] * 400, arrival_s=0.0))
    done = {}

    for step in range(200):
        for order in range(4):
            scheduler.add(build_sequence(f"{step} {order}", 1 + 4 * step + order, arrival_s=step * 0.01))
        _, ended = run_step(scheduler, step * 0.01)
        done |= dict.fromkeys(ids_of(ended), step)

    assert done["long"] <= 400 / 8


def test_short_prompts_of_a_low_class_do_not_slow_a_high_one() -> None:
    """The half for the shortest prompts goes to the most urgent class; the rest of the step to all others."""
    scheduler = build_scheduler()
    scheduler.add(build_sequence("high", 0, tokens=list(range(40))))
    scheduler.add(build_sequence("low", 1, priority=2))

    plan, _ = run_step(scheduler)

    assert {chunk.sequence.request_id: chunk.num_tokens for chunk in plan.chunks} == {"high": 10, "low": 5}


def test_a_large_prompt_is_not_overtaken_by_small_ones() -> None:
    """While the most urgent sequence waits for memory, no other sequence is admitted."""
    scheduler = build_scheduler(num_blocks=12, max_waiting=1_000)
    scheduler.add(build_sequence("runs", 0, tokens=list(range(40))))
    run_step(scheduler)
    scheduler.add(build_sequence("large", 1, tokens=list(range(50, 90))))
    finished = []

    for step in range(12):
        scheduler.add(build_sequence(f"small {step}", 2 + step, tokens=[step] * 8))
        finished += ids_of(run_step(scheduler)[1])

    assert finished.index("large") < 6


def test_text_that_outgrows_memory_preempts_the_least_urgent() -> None:
    """Without free blocks the least urgent sequence is preempted and recomputed later, and both finish."""
    scheduler = build_scheduler(num_blocks=6)
    first = build_sequence("first", 0, tokens=[1] * 8, num_levels=0, max_new_tokens=12)
    second = build_sequence("second", 1, tokens=[2] * 8, num_levels=0, max_new_tokens=12)
    scheduler.add(first)
    scheduler.add(second)

    finished = [name for _ in range(60) for name in ids_of(run_step(scheduler)[1])]

    assert finished == ["first", "second"]
    assert first.num_preemptions == 0
    assert second.num_preemptions > 0
    assert second.num_new_tokens == 12


@pytest.mark.parametrize(("length", "chunk"), [(10, (8, 2)), (8, (4, 4))])
def test_the_cached_prefix_is_shared_by_running_requests(length: int, chunk: tuple[int, int]) -> None:
    """Requests with the same prompt share full blocks; only the rest is computed, at least the last token's block."""
    scheduler = build_scheduler()
    first, second = (
        build_sequence(name, order, tokens=list(range(length)), num_levels=2, rows_by_level=(1,))
        for order, name in enumerate(("one", "two"))
    )
    scheduler.add(first)
    run_step(scheduler)
    scheduler.add(second)

    plan = scheduler.schedule(0.0)

    num_shared = chunk[0] // 4
    assert second.block_table[:num_shared] == first.block_table[:num_shared]
    assert [(chunk.start, chunk.num_tokens) for chunk in plan.chunks] == [chunk]


def test_blocks_behind_the_window_are_free() -> None:
    """A prompt of 12 blocks runs in 5 blocks (sinks, window, chunk), then holds 2, and all 12 are cached."""
    scheduler = build_scheduler(Window(4, frozenset({0}), num_sinks=1), max_chunk_tokens=8)
    long = build_sequence("long", 0, tokens=list(range(48)), num_levels=2, rows_by_level=(1,))
    scheduler.add(long)

    held = [scheduler.pool.num_held for _ in range(6) if run_step(scheduler)]

    assert held == [5, 3, 3, 3, 3, 2]
    assert scheduler.pool.num_cached == 12
    assert long.block_table[1:11] == [CONFIG.num_blocks] * 10


def test_measured_rows_bound_prompts_and_beams() -> None:
    """A row limit bounds prompt tokens, but not decode tokens or a request's beams, and prompts still progress."""
    scheduler = build_scheduler(num_blocks=200, max_num_batched_tokens=64, max_chunk_tokens=64, max_beam_rows=64)
    long = list(range(60))
    scheduler.add(build_sequence("text", tokens=[1], num_levels=0, max_new_tokens=20))
    for name in ("a", "b"):
        scheduler.add(build_sequence(name, tokens=[1], num_levels=2, rows_by_level=(30,)))
    scheduler.advance(scheduler.schedule(0.0, 20))
    scheduler.add(build_sequence("long", tokens=long, num_levels=0, max_new_tokens=5))
    scheduler.find("text").append_token(SampledToken(7))

    some, fewest = scheduler.schedule(0.0, 20), scheduler.schedule(0.0, 1)

    assert [sum(chunk.num_tokens for chunk in plan.chunks) for plan in (some, fewest)] == [20, 17]
    assert [plan.num_beam_rows for plan in (some, fewest)] == [30, 30]
    assert scheduler.schedule(0.0).num_batched_tokens == 61


def test_tenants_share_the_steps_by_weight_and_none_waits_for_the_flood_of_another() -> None:
    """A tenant's prompts end as if the flood of the other were not there; twice the weight gets twice the tokens."""
    scheduler = build_scheduler(num_blocks=5_000, max_waiting=1_000, max_running=100)
    for number in range(100):
        scheduler.add(build_sequence(f"a{number}", number, tokens=[7] * 8, tenant="acme"))
        scheduler.add(build_sequence(f"b{number}", 1_000 + number, tokens=[8] * 8, tenant="bolt", weight=2.0))
    run_step(scheduler)

    finished = [name[0] for _ in range(30) for name in ids_of(run_step(scheduler)[1])]

    assert finished.count("b") / finished.count("a") == pytest.approx(2.0, rel=0.2)
    scheduler.add(build_sequence("late", 2_000, tenant="other"))
    assert "late" in ids_of(run_step(scheduler)[1])


def test_a_full_queue_keeps_a_tenant_s_share_for_it() -> None:
    """When another tenant's requests fill the queue, a tenant may still add its share, and no more."""
    scheduler = build_scheduler(max_waiting=6)
    for number in range(6):
        scheduler.add(build_sequence(f"a{number}", number, tenant="acme"))

    added = []
    for number, tenant in enumerate(["acme", *["bolt"] * 5]):
        with suppress(Overloaded):
            scheduler.add(build_sequence(f"{tenant} {number}", 10 + number, tenant=tenant))
            added.append(tenant)

    assert added == ["bolt"] * 3
