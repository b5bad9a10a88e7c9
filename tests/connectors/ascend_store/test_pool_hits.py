"""What of a prompt is loaded, from when it arrives until its load has ended."""

import pytest

pytest.importorskip("vllm")

from pool_scheduling import BLOCK_TOKENS, Scheduling, names_of, prompt, stage_shards


@pytest.fixture
def engine():
    return Scheduling()


def test_a_prompt_is_looked_up_when_it_arrives_and_is_answered_when_the_store_has(engine):
    request = engine.arrive(tokens=prompt(3, 1))
    (lookup,) = engine.lookups.asked
    assert lookup.hashes == tuple(names_of(prompt(3)))
    assert engine.side.matched_tokens(request, 0) == (None, False)
    engine.lookups.answer(2)
    assert engine.side.matched_tokens(request, 0) == (2 * BLOCK_TOKENS, True)
    assert engine.lookups.asked == [lookup], "one question"


@pytest.mark.parametrize(
    ("tokens", "asked"), [(0, 0), (1, 0), (3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2)]
)
def test_the_last_token_is_never_loaded(engine, tokens, asked):
    engine.arrive(tokens=range(tokens))
    assert len(engine.lookups.asked[0].hashes) == asked


@pytest.mark.parametrize(
    ("found", "local", "loaded"),
    [(5, 0, 5), (5, 2, 3), (5, 5, 0), (3, 4, 0), (0, 0, 0), (0, 3, 0)],
)
def test_only_what_vllm_does_not_have_itself_is_loaded(engine, found, local, loaded):
    request = engine.arrive(tokens=prompt(6))
    engine.lookups.answer(found)
    tokens, in_background = engine.side.matched_tokens(request, local * BLOCK_TOKENS)
    assert (tokens, in_background) == (loaded * BLOCK_TOKENS, loaded > 0)


def test_the_order_names_the_blocks_behind_those_that_vllm_has(engine):
    request = engine.arrive(tokens=prompt(6))
    engine.admit(request, hit=5, local=2)
    (load,) = engine.step().loads
    assert load.request_id == "r"
    assert load.blocks.hashes == tuple(names_of(prompt(6))[2:5])
    assert load.blocks.block_ids == tuple(engine.tables["r"][2:5])
    assert not load.in_step
    assert engine.side.take_counts()["pool_hit_tokens"] == 3 * BLOCK_TOKENS


def test_a_load_is_ordered_once(engine):
    request = engine.arrive(tokens=prompt(6))
    engine.admit(request, hit=5)
    assert len(engine.step().loads) == 1
    assert engine.step().loads == ()
    engine.report(received=["r"])
    # vLLM says so again when the request is scheduled after its load.
    engine.side.allocated(request, engine.tables["r"], 0)
    assert engine.step({request: 4}).loads == ()


def test_nothing_is_ordered_when_another_connector_loads(engine):
    request = engine.arrive(tokens=prompt(6))
    engine.lookups.answer(5)
    engine.side.matched_tokens(request, 0)
    engine.side.allocated(request, [], 0)
    assert engine.step().loads == ()


@pytest.mark.parametrize("mode", ["sync", "layerwise"])
def test_a_load_of_the_step_is_ordered_for_the_step(mode):
    engine = Scheduling(load_mode=mode)
    request = engine.arrive(tokens=prompt(6))
    assert engine.admit(request, hit=5) == (5 * BLOCK_TOKENS, False)
    (load,) = engine.step({request: 4}, sync_loads=True).loads
    assert load.in_step


# Questions


def test_a_question_without_an_answer_is_given_up_in_time(engine):
    request = engine.arrive(tokens=prompt(6))
    engine.clock.advance(1)
    assert engine.side.matched_tokens(request, 0) == (None, False)
    engine.clock.advance(0.01)
    assert engine.side.matched_tokens(request, 0) == (0, False)
    assert engine.lookups.given_up == engine.lookups.asked
    assert engine.side.matched_tokens(request, 0) == (0, False)
    assert len(engine.lookups.given_up) == 1


def test_an_old_answer_is_asked_for_again(engine):
    request = engine.arrive(tokens=prompt(6))
    engine.lookups.answer(5)
    engine.clock.advance(3)
    assert engine.side.matched_tokens(request, 0)[0] == 5 * BLOCK_TOKENS
    engine.clock.advance(0.01)
    assert engine.side.matched_tokens(request, 0) == (None, False)
    engine.lookups.answer(2)
    assert engine.side.matched_tokens(request, 0)[0] == 2 * BLOCK_TOKENS
    assert len(engine.lookups.asked) == 2


def test_a_preempted_request_is_looked_up_with_all_that_it_has_generated(engine):
    request = engine.arrive(tokens=prompt(2))
    engine.admit(request, hit=1)
    engine.step()
    engine.report(received=["r"])
    request.output = list(range(50, 59))
    request.num_computed_tokens = 0
    assert engine.side.matched_tokens(request, 0) == (None, False)
    assert engine.lookups.asked[-1].hashes == tuple(names_of(request.all_token_ids))
    engine.lookups.answer(4)
    assert engine.side.matched_tokens(request, 0) == (4 * BLOCK_TOKENS, True)
    engine.side.allocated(request, engine.tables["r"], 4 * BLOCK_TOKENS)
    assert len(engine.step().loads) == 1, "an admission of its own"


def test_an_aborted_request_needs_no_answer(engine):
    request = engine.arrive(tokens=prompt(6))
    engine.side.finished(request)
    assert engine.lookups.asked[0].cancelled
    assert engine.step().cancelled == frozenset()


@pytest.mark.parametrize(
    "facts",
    [
        {"kv_transfer_params": {"do_remote_prefill": True}},
        {"skip_reading_prefix_cache": True},
        {"resumable": True},
    ],
    ids=["a prefill node has it", "the user wants it computed", "a streamed prompt"],
)
def test_prompts_that_are_not_loaded_are_not_looked_up(engine, facts):
    request = engine.arrive(tokens=prompt(6), **facts)
    assert engine.lookups.asked == []
    assert engine.side.matched_tokens(request, 0) == (0, False)


def test_a_prompt_of_embeddings_is_left_alone(engine):
    request = engine.arrive(tokens=prompt(6))
    request.prompt_token_ids, request.request_id = None, "embeddings"
    engine.side.arrived(request)
    assert engine.side.matched_tokens(request, 0) == (0, False)
    engine.side.finished(request)


def test_a_node_that_only_stores_looks_nothing_up():
    engine = Scheduling(loads=False)
    request = engine.arrive(tokens=prompt(6))
    assert engine.side.matched_tokens(request, 0) == (0, False)
    assert engine.lookups.asked == []


def test_prompts_are_told_apart_by_more_than_tokens(engine):
    engine.arrive("a", prompt(3, 1))
    engine.arrive("b", prompt(3, 1), cache_salt="tenant b")
    plain, salted = (lookup.hashes for lookup in engine.lookups.asked)
    assert not set(plain) & set(salted)


# Before all stages have described themselves


def test_nothing_is_asked_before_every_stage_has_described_itself():
    engine = Scheduling(stages=2, described=False)
    request = engine.arrive(tokens=prompt(6))
    engine.report(stages=[stage_shards(1)])
    assert engine.side.matched_tokens(request, 0) == (None, False)
    assert engine.lookups.asked == []
    engine.report(stages=[stage_shards(0)])
    assert sorted(engine.lookups.shards) == ["s0-0", "s0-1", "s1-0", "s1-1"]
    assert engine.side.matched_tokens(request, 0) == (None, False)
    engine.lookups.answer(5)
    assert engine.side.matched_tokens(request, 0)[0] == 5 * BLOCK_TOKENS


def test_orders_carry_the_scope_that_was_asked_about(engine):
    engine.arrive(tokens=prompt(6))
    assert engine.lookups.asked[0].scope == engine.step().scope
    assert engine.step().scope.startswith("kvpp1:model:")


def test_the_order_in_which_stages_describe_themselves_does_not_matter():
    a = Scheduling(stages=2, described=False)
    b = Scheduling(stages=2, described=False)
    a.report(stages=[stage_shards(0), stage_shards(1)])
    b.report(stages=[stage_shards(1)])
    b.report(stages=[stage_shards(0)])
    assert a.step().scope == b.step().scope != ""


# Loads that end


def test_an_abort_in_mid_load_is_told_once(engine):
    request = engine.arrive(tokens=prompt(6))
    engine.admit(request, hit=5)
    engine.step()
    engine.side.finished(request)
    assert engine.step().cancelled == {"r"}
    assert engine.step().cancelled == frozenset()
    engine.report(received=["r"])


def test_an_abort_after_the_load_is_not_told(engine):
    request = engine.arrive(tokens=prompt(6))
    engine.admit(request, hit=5)
    engine.step()
    engine.report(received=["r"])
    engine.side.finished(request)
    assert engine.step().cancelled == frozenset()


def test_a_request_whose_load_failed_is_computed_and_not_loaded_again_and_again(engine):
    request = engine.arrive(tokens=prompt(6))
    engine.admit(request, hit=5)
    engine.step()
    engine.report(invalid=engine.tables["r"][:5], received=["r"])
    # Nothing of it is there, so vLLM asks as for a fresh one; the store has what cannot be read.
    request.num_computed_tokens = 0
    assert engine.side.matched_tokens(request, 0) == (0, False)
    assert len(engine.lookups.asked) == 1


def test_a_failed_load_keeps_other_requests_from_nothing(engine):
    request = engine.arrive("a", prompt(6))
    other = engine.arrive("b", prompt(6, seed=1))
    engine.lookups.answer(5, which=0)
    engine.lookups.answer(5, which=1)
    engine.admit(request)
    engine.step()
    engine.report(invalid=engine.tables["a"][:5], received=["a"])
    assert engine.side.matched_tokens(other, 0) == (5 * BLOCK_TOKENS, True)


def test_closing_leaves_the_store(engine):
    engine.side.close()
    assert engine.lookups.closed == 1
