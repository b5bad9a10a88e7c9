"""Whatever requests, ranks and the store do, in any order: right KV is stored, no block is lost."""

import random

import pytest

pytest.importorskip("vllm")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pool_machine import PoolMachine

CHANCE = st.randoms(use_true_random=False)
KINDS = ("in the background", "in the step", "in the background, steps ahead")


class Interleavings(RuleBasedStateMachine):
    machine = None

    @initialize(kind=st.sampled_from(KINDS), world_size=st.integers(1, 3), events=st.booleans())
    def start(self, kind, world_size, events):
        self.machine = PoolMachine(
            load_mode="sync" if kind == "in the step" else "async",
            ordered=kind != "in the background, steps ahead",
            world_size=world_size,
            events=events,
        )

    @rule(seed=st.integers(0, 1), tokens=st.integers(1, 22), wanted=st.integers(1, 9))
    def arrive(self, seed, tokens, wanted):
        self.machine.arrive(seed, tokens, wanted)

    @rule(rng=CHANCE)
    def step(self, rng):
        self.machine.step(rng)

    @rule(rng=CHANCE, steps=st.integers(1, 6))
    def all_goes_on(self, rng, steps):
        for _ in range(steps):
            self.machine.answer(rng)
            self.machine.step(rng)
            self.machine.rank_works(rng)

    @rule()
    def results_come(self):
        self.machine.collect()

    @rule(rng=CHANCE)
    def rank_works(self, rng):
        self.machine.rank_works(rng)

    @rule(rng=CHANCE)
    def abort(self, rng):
        self.machine.abort(rng)

    @rule(rng=CHANCE)
    def store_answers(self, rng):
        self.machine.answer(rng)

    @rule(rng=CHANCE)
    def store_loses(self, rng):
        self.machine.lose(rng)

    @rule(is_good=st.booleans())
    def store_works_or_not(self, is_good):
        self.machine.lookups.is_good = is_good

    @rule(seconds=st.sampled_from((0.5, 1.5, 4)))
    def time_passes(self, seconds):
        self.machine.clock.advance(seconds)

    @rule()
    def reset(self):
        self.machine.reset()

    @rule(rng=CHANCE)
    def a_prompt_comes_back_and_a_reset_right_behind_it(self, rng):
        for tokens in (14, 22):
            self.machine.arrive(0, tokens, 1)
            for _ in range(5):
                self.machine.answer(rng)
                if self.machine.step(rng):
                    break
                for _ in range(6):
                    self.machine.rank_works(rng)
        self.machine.reset()

    @invariant()
    def blocks_are_held(self):
        if self.machine is not None:
            self.machine.check()

    def teardown(self):
        if self.machine is not None:
            self.machine.finish(random.Random(0))


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=100, stateful_step_count=40)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(8))
def test_long_lives_of_many_requests(kind, seed):
    rng = random.Random(f"{kind} {seed}")
    machine = PoolMachine(
        load_mode="sync" if kind == "in the step" else "async",
        ordered=kind != "in the background, steps ahead",
        world_size=rng.randint(1, 3),
        events=True,
    )
    for _ in range(400):
        action = rng.choices(
            ["arrive", "step", "works", "answer", "abort", "lose", "reset", "tick"],
            [2, 8, 6, 4, 0.4, 0.4, 0.15, 0.5],
        )[0]
        if action == "arrive":
            machine.arrive(rng.randint(0, 1), rng.randint(1, 22), rng.randint(1, 9))
        elif action == "reset":
            machine.reset()
        elif action == "tick":
            machine.clock.advance(2)
        elif action == "step":
            if machine.step(rng) and rng.random() < 0.3:
                machine.reset()  # while what the step computed may be held back
        else:
            calls = {
                "works": machine.rank_works,
                "answer": machine.answer,
                "abort": machine.abort,
                "lose": machine.lose,
            }
            calls[action](rng)
        machine.check()
    machine.finish(rng)
