"""What is stored: full blocks whose tokens are known and computed, each once."""

import pytest

pytest.importorskip("vllm")

from pool_scheduling import BLOCK_TOKENS, RecordingPins, Scheduling, names_of, prompt

from kvpp_connect.connectors.ascend_store.orders import PutReport


@pytest.fixture
def engine():
    return Scheduling()


def fresh(engine, tokens, request_id="r", **facts):
    """A request that the pool has nothing of, with its blocks."""
    request = engine.arrive(request_id, tokens, **facts)
    engine.admit(request)
    return request


def put_of(orders):
    """The only put of a step."""
    (order,) = orders.puts
    return order


def stored_places(engine, request, orders):
    """Places in the request of the blocks that a step stores."""
    if not orders.puts:
        return []
    order = put_of(orders)
    places = [engine.tables[request.request_id].index(block) for block in order.blocks.block_ids]
    names = names_of(request.all_token_ids)
    assert list(order.blocks.hashes) == [names[place] for place in places]
    return places


def test_each_chunk_of_a_prompt_stores_the_blocks_that_it_completes(engine):
    request = fresh(engine, prompt(4, 2))
    seen = [stored_places(engine, request, engine.step({request: n})) for n in (3, 6, 1, 8)]
    assert seen == [[], [0, 1], [], [2, 3]]


def test_a_block_is_stored_when_decoding_has_filled_it(engine):
    request = fresh(engine, prompt(1, 2))
    assert stored_places(engine, request, engine.step({request: 6})) == [0]
    seen = []
    for token in range(7):
        request.output.append(token)
        seen.append(stored_places(engine, request, engine.step({request: 1})))
    assert seen == [[], [1], [], [], [], [2], []]


def test_tokens_that_are_only_drafted_are_never_stored(engine):
    request = fresh(engine, prompt(1, 3))
    engine.step({request: 7})
    request.output.append(70)
    # Position 7, and four drafts behind it that would fill another block.
    assert stored_places(engine, request, engine.step({request: 5})) == [1]
    # Two of the four were right; one more token came with them.
    request.output += [71, 72, 73]
    request.num_computed_tokens -= 2
    assert stored_places(engine, request, engine.step({request: 5})) == []
    request.output += [74]
    request.num_computed_tokens -= 4
    assert stored_places(engine, request, engine.step({request: 5})) == [2]


def test_tokens_that_are_sampled_but_not_known_yet_are_never_stored():
    engine = Scheduling(ordered=False)
    request = fresh(engine, prompt(1, 3))
    engine.step({request: 7})
    # Steps ahead of their results: vLLM counts tokens that it does not have.
    assert stored_places(engine, request, engine.step({request: 1})) == []
    assert stored_places(engine, request, engine.step({request: 1})) == []
    request.output += [70]
    assert stored_places(engine, request, engine.step({request: 1})) == [1]


def test_what_came_from_the_pool_is_not_stored_again(engine):
    request = engine.arrive(tokens=prompt(6))
    engine.admit(request, hit=3)
    engine.step()
    engine.report(received=["r"])
    assert stored_places(engine, request, engine.step({request: 12})) == [3, 4, 5]


def test_what_vllm_has_itself_and_the_pool_has_not_is_stored(engine):
    request = engine.arrive(tokens=prompt(6))
    engine.admit(request, hit=1, local=4)
    assert stored_places(engine, request, engine.step({request: 8})) == [1, 2, 3, 4, 5]


def test_a_step_stores_the_blocks_of_all_its_requests_in_one_order(engine):
    a, b = fresh(engine, prompt(2), "a"), fresh(engine, prompt(1, seed=1), "b")
    order = put_of(engine.step({a: 8, b: 4}))
    assert order.blocks.hashes == (*names_of(prompt(2)), *names_of(prompt(1, seed=1)))
    assert order.blocks.block_ids == (*engine.tables["a"][:2], engine.tables["b"][0])


def test_a_node_that_does_not_store_orders_nothing():
    engine = Scheduling(puts=False)
    request = fresh(engine, prompt(4))
    assert engine.step({request: 16}).puts == ()
    assert not engine.side.has_pending_work


def test_nothing_is_stored_before_the_workers_have_described_themselves():
    engine = Scheduling(described=False)
    request = engine.arrive(tokens=prompt(2))
    engine.allocate(request)
    assert engine.step({request: 8}).puts == ()


def test_a_prompt_of_embeddings_and_a_streamed_one_are_not_stored(engine):
    request = engine.arrive(tokens=prompt(2), resumable=True)
    engine.allocate(request)
    assert engine.step({request: 8}).puts == ()


# Failing stores, and how much is held


def test_while_the_store_fails_nothing_is_held_and_afterwards_all_is_stored(engine):
    request = fresh(engine, prompt(4))
    engine.lookups.is_good = False
    assert engine.step({request: 8}).puts == ()
    assert engine.pins.pinned == {}
    engine.lookups.is_good = True
    assert stored_places(engine, request, engine.step({request: 8})) == [0, 1, 2, 3]


def test_at_most_a_quarter_of_all_blocks_is_held_and_the_rest_waits(engine):
    limit = RecordingPins.num_blocks // 4
    a, b = fresh(engine, prompt(20), "a"), fresh(engine, prompt(20, seed=1), "b")
    first = put_of(engine.step({a: 80, b: 80}))
    assert len(first.blocks) == sum(engine.pins.pinned.values()) == limit
    a.output, b.output = [1], [1]
    assert engine.step({a: 1, b: 1}).puts == ()
    engine.stored(first)
    second = put_of(engine.step({a: 1, b: 1}))
    assert len(second.blocks) == 40 - limit
    assert not set(first.blocks.hashes) & set(second.blocks.hashes)


def test_steps_are_asked_for_while_ranks_store(engine):
    request = fresh(engine, prompt(1))
    order = put_of(engine.step({request: 4}))
    engine.side.finished(request)
    assert engine.side.has_pending_work
    engine.report(puts={order.job: PutReport(copied=2, ended=1)})
    assert engine.pins.pinned == {}
    assert engine.side.has_pending_work
    engine.report(puts={order.job: PutReport(ended=1)})
    assert not engine.side.has_pending_work


@pytest.mark.parametrize("end", ["finished", "preempted"])
def test_blocks_are_held_until_all_ranks_have_copied_whatever_becomes_of_the_request(engine, end):
    request = fresh(engine, prompt(2))
    order = put_of(engine.step({request: 8}))
    if end == "finished":
        engine.side.finished(request)
    else:
        request.num_computed_tokens = 0
    engine.report(puts={order.job: PutReport(copied=1, ended=1)})
    assert sum(engine.pins.pinned.values()) == 2
    engine.report(puts={order.job: PutReport(copied=1, ended=1)})
    assert engine.pins.pinned == {}


def test_a_preempted_request_does_not_store_again_what_it_stored(engine):
    request = fresh(engine, prompt(3))
    engine.stored(put_of(engine.step({request: 8})))
    request.num_computed_tokens = 0
    engine.admit(request)
    assert stored_places(engine, request, engine.step({request: 12})) == [2]


def test_stored_and_failed_blocks_are_counted(engine):
    request = fresh(engine, prompt(4))
    engine.stored(put_of(engine.step({request: 16})), failed=[1])
    assert engine.side.take_counts() == {"pool_stored_blocks": 3, "pool_unstored_blocks": 1}
    assert engine.side.take_counts() == {}


def test_blocks_that_were_lost_on_the_way_are_stored_again(engine):
    request = engine.arrive(tokens=prompt(6))
    engine.admit(request, hit=5)
    engine.step()
    lost = names_of(prompt(6))[2]
    # One rank says so before the other one's load has ended.
    engine.report(lost={lost}, invalid=engine.tables["r"][2:5])
    engine.report(received=["r"], invalid=engine.tables["r"][2:5])
    request.num_computed_tokens = 2 * BLOCK_TOKENS
    assert stored_places(engine, request, engine.step({request: 16})) == [2, 3, 4, 5]


def test_blocks_that_only_could_not_be_read_are_still_there(engine):
    request = engine.arrive(tokens=prompt(6))
    engine.admit(request, hit=5)
    engine.step()
    engine.report(received=["r"], invalid=engine.tables["r"][2:5])
    request.num_computed_tokens = 2 * BLOCK_TOKENS
    assert stored_places(engine, request, engine.step({request: 16})) == [5]


# Loads of the step


@pytest.fixture
def sync():
    return Scheduling(load_mode="sync")


def loading_step(sync, hit=2, blocks=4):
    """A step that loads some blocks and computes the others of a prompt."""
    request = sync.arrive(tokens=prompt(blocks))
    sync.admit(request, hit=hit)
    orders = sync.step({request: (blocks - hit) * BLOCK_TOKENS}, sync_loads=True)
    return request, orders


def test_what_is_computed_from_loads_of_the_step_is_stored_when_they_have_succeeded(sync):
    request, orders = loading_step(sync)
    assert orders.puts == ()
    assert sum(sync.pins.pinned.values()) == 2, "its blocks are held meanwhile"
    assert sync.side.has_pending_work
    sync.report()
    assert stored_places(sync, request, sync.step()) == [2, 3]


def test_a_request_that_ends_with_such_a_step_is_stored_all_the_same(sync):
    request, _ = loading_step(sync)
    sync.side.finished(request)
    sync.report()
    assert stored_places(sync, request, sync.step()) == [2, 3]


def test_nothing_is_stored_of_what_was_computed_from_blocks_that_were_not_loaded(sync):
    request, _ = loading_step(sync)
    table = sync.tables["r"]
    sync.report(invalid=[table[1]])
    assert sync.pins.pinned == {}
    assert not sync.side.has_pending_work
    assert sync.pins.forgotten == set(table[1:]), "nobody else may find them"
    request.num_computed_tokens = BLOCK_TOKENS
    # Computed anew, it is stored.
    assert stored_places(sync, request, sync.step({request: 12})) == [1, 2, 3]


def test_a_request_that_read_anothers_block_is_not_stored_either(sync):
    request = sync.arrive("a", prompt(4))
    sync.admit(request, hit=2)
    other = sync.arrive("b", prompt(3, seed=1))
    sync.lookups.answer(0)
    sync.admit(other, local=2)
    # vLLM gave it the loading request's blocks.
    sync.tables["b"][:2] = sync.tables["a"][:2]
    sync.step({request: 8, other: 4}, sync_loads=True)
    sync.report(invalid=[sync.tables["a"][0]])
    assert sync.pins.forgotten == {*sync.tables["a"], *sync.tables["b"]}
    assert sync.step().puts == ()


def test_a_bystander_of_a_failed_load_is_stored_a_step_later(sync):
    request = sync.arrive("a", prompt(4))
    sync.admit(request, hit=2)
    bystander = fresh(sync, prompt(2, seed=1), "b")
    sync.step({request: 8, bystander: 8}, sync_loads=True)
    sync.report(invalid=[sync.tables["a"][0]])
    request.num_computed_tokens = 0
    bystander.output = [1]
    assert stored_places(sync, bystander, sync.step({bystander: 1})) == [0, 1]


def test_a_request_that_ended_with_a_failed_step_is_found_by_nobody(sync):
    request, _ = loading_step(sync)
    sync.side.finished(request)
    sync.report(invalid=[sync.tables["r"][0]])
    assert sync.pins.forgotten == set(sync.tables["r"])
    assert sync.step().puts == ()


def test_a_later_step_is_not_judged_by_an_earlier_ones_loads(sync):
    request, _ = loading_step(sync)
    sync.report()
    request.output = [1]
    sync.step({request: 1})
    sync.report(invalid=[sync.tables["r"][0]])  # of another load, in the background
    assert sync.pins.forgotten == set()


def test_where_steps_run_ahead_of_their_results_a_loading_step_stores_nothing():
    engine = Scheduling(ordered=False)
    request = fresh(engine, prompt(2))
    assert engine.step({request: 8}, sync_loads=True).puts == ()
    assert engine.pins.pinned == {}


def test_the_blocks_that_are_held_are_told_when_their_number_changes(engine):
    request = fresh(engine, prompt(4, 2))
    assert "pool_pinned_blocks" not in engine.side.take_counts()
    order = put_of(engine.step({request: 18}))
    assert engine.side.take_counts()["pool_pinned_blocks"] == 4
    assert "pool_pinned_blocks" not in engine.side.take_counts()
    engine.stored(order)
    assert engine.side.take_counts()["pool_pinned_blocks"] == 0


def test_what_another_connector_loads_in_steps_that_overlap_is_stored_when_it_is_known():
    """Its failure is known one step later than the blocks would be stored."""
    engine = Scheduling(ordered=False)
    request = fresh(engine, prompt(6))
    assert engine.step({request: 8}, sync_loads=True).puts == ()
    assert engine.step({request: 8}).puts == ()
    assert stored_places(engine, request, engine.step({request: 8})) == [0, 1, 2, 3, 4, 5]
