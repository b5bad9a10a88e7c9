"""A put copies what is missing, lets go of its blocks as soon as it can, and tells what failed."""

import pytest
from pool_rank import PAGES, SCOPE, Rank, hashes, key, sealed, store_blocks, until

from kvpp_connect.connectors.ascend_store.orders import PutOrder, PutReport, block_list

HASHES = hashes(5)
PLACES = [7, 2, 9, 4, 1]
SHARDS = ("s0-0", "s0-d")


@pytest.fixture
def rank():
    """A rank that writes two shards, with five blocks in its caches."""
    rank = Rank(*SHARDS)
    rank.fill(dict(zip(HASHES, PLACES, strict=True)))
    yield rank
    rank.close()


def order(job=0, blocks=5):
    return PutOrder(job=job, blocks=block_list(HASHES[:blocks], PLACES[:blocks]))


def report_of(putter, job=0):
    """Everything that is told of a job, until its end."""
    whole = PutReport()

    def is_ended():
        for number, report in putter.take_reports().items():
            assert number == job
            whole.add(report)
        return whole.ended

    until(is_ended)
    return whole


def put_all(rank, putter=None, job=0, blocks=5):
    putter = putter or rank.putter()
    putter.begin(order(job, blocks), SCOPE)
    return report_of(putter, job)


def test_every_block_of_every_shard_is_stored_sealed_under_its_key(rank):
    assert put_all(rank) == PutReport(copied=1, ended=1)
    assert rank.pool.objects == {
        key(name, block): sealed(name, block) for name in SHARDS for block in HASHES
    }
    counts = rank.counts()
    assert (counts.put_objects, counts.put_bytes) == (10, 10 * sum(PAGES))


def test_what_is_present_is_neither_copied_nor_written_again(rank):
    store_blocks(rank.pool, SHARDS, HASHES[:3])
    gathered, real = [], rank.copier.gather
    rank.copier.gather = lambda caches, ids, rows, after: (
        gathered.extend(ids),
        real(caches, ids, rows, after),
    )
    assert put_all(rank) == PutReport(copied=1, ended=1)
    assert sorted(gathered) == sorted(2 * PLACES[3:])
    assert rank.store.keys["put"] == 4
    assert len(rank.pool.objects) == 10
    counts = rank.counts()
    assert (counts.present_objects, counts.put_objects) == (6, 4)


def test_a_job_of_which_all_is_present_takes_no_staging(rank):
    store_blocks(rank.pool, SHARDS, HASHES)
    for _ in range(2):
        rank.staging.take(0)
    assert put_all(rank) == PutReport(copied=1, ended=1)
    assert rank.store.calls["put"] == 0


def test_a_rank_that_writes_no_shard_is_through_at_once():
    rank = Rank()
    putter = rank.putter()
    putter.begin(order(), SCOPE)
    assert putter.take_reports() == {0: PutReport(copied=1, ended=1)}
    assert putter.take_reports() == {}
    rank.close()


def test_blocks_are_let_go_while_the_store_still_writes():
    rank = Rank("s0-0")
    rank.fill(dict(zip(HASHES, PLACES, strict=True)))
    rank.store.block("put")
    putter = rank.putter()
    putter.begin(order(blocks=2), SCOPE)
    assert rank.store.waiting.wait(30)
    assert until(putter.take_reports) == {0: PutReport(copied=1)}
    assert putter.take_reports() == {}, "it is told once"
    for view in rank.views["s0-0"]:
        view.fill_(0)  # another request has the blocks
    rank.store.release()
    assert report_of(putter) == PutReport(ended=1)
    assert rank.pool.objects == {key("s0-0", b): sealed("s0-0", b) for b in HASHES[:2]}
    rank.close()


def test_blocks_are_not_let_go_before_every_batch_is_copied(rank):
    slots = [rank.staging.take(0) for _ in range(2)]
    rank.store.block("put")
    putter = rank.putter()
    putter.begin(order(), SCOPE)
    until(lambda: rank.store.calls["exists"] == 2)
    assert putter.take_reports() == {}
    rank.staging.give_back(slots.pop())
    assert rank.store.waiting.wait(30), "one batch of six is copied"
    assert putter.take_reports() == {}
    rank.staging.give_back(slots.pop())
    rank.store.release()
    assert report_of(putter) == PutReport(copied=1, ended=1)


def test_a_block_of_which_one_shard_failed_is_told_as_failed(rank):
    rank.pool.failing.update([key("s0-0", HASHES[1]), key("s0-d", HASHES[4])])
    assert put_all(rank) == PutReport(copied=1, ended=1, failed={1, 4})
    assert rank.counts().failures_write == 2


def test_a_full_store_is_told_as_failed_and_is_no_reason_to_leave_it_alone(rank):
    store_blocks(rank.pool, SHARDS, HASHES[:1])
    rank.pool.full = True
    assert put_all(rank).failed == {1, 2, 3, 4}
    assert rank.counts().failures_full == 8
    assert rank.health.is_good


def test_a_store_that_raises_fails_the_job_and_is_left_alone(rank):
    rank.pool.down = True
    putter = rank.putter()
    assert put_all(rank, putter) == PutReport(copied=1, ended=1, failed={0, 1, 2, 3, 4})
    assert not rank.health.is_good
    assert rank.counts().failures_unreachable == 10
    asked = rank.store.calls["exists"]
    rank.pool.down = False
    assert put_all(rank, putter, job=1).failed == {0, 1, 2, 3, 4}
    assert rank.store.calls["exists"] == asked


def test_a_store_that_works_again_is_used_after_the_pause(rank):
    rank.pool.down = True
    putter = rank.putter()
    put_all(rank, putter)
    rank.pool.down = False
    rank.clock.advance(60)
    put_all(rank, putter, job=1, blocks=1)
    assert put_all(rank, putter, job=2).failed == set()
    assert len(rank.pool.objects) == 10


def test_a_put_that_takes_too_long_lets_its_blocks_go_and_counts_as_failed(rank):
    rank.store.block("put")
    putter = rank.putter(timeout_s=10)
    putter.begin(order(), SCOPE)
    assert rank.store.waiting.wait(30)
    rank.clock.advance(9.9)
    assert putter.take_reports() == {}
    rank.clock.advance(0.1)
    assert putter.take_reports() == {0: PutReport(copied=1, ended=1, failed={0, 1, 2, 3, 4})}
    assert not rank.health.is_good
    assert rank.counts().failures_late == 6  # batches
    rank.store.release()
    rank.wait_for_staging()
    assert putter.take_reports() == {}, "an end is told once"


def test_after_its_end_a_job_copies_nothing_from_blocks_that_belong_to_others():
    rank = Rank(*SHARDS, threads=1)
    rank.store.block("exists")
    putter = rank.putter(timeout_s=10)
    putter.begin(order(), SCOPE)
    assert rank.store.waiting.wait(30)
    rank.clock.advance(10)
    assert putter.take_reports()[0].ended
    gathered = []
    rank.copier.gather = lambda *arguments: gathered.append(arguments)
    rank.store.release()
    # The only thread is through with the first job when the second one ends.
    assert put_all(rank, putter, job=1).ended
    assert gathered == []
    assert rank.pool.objects == {}
    rank.close()


def test_a_put_that_gets_no_staging_in_time_fails(rank):
    for _ in range(2):
        rank.staging.take(0)
    report = put_all(rank, rank.putter(timeout_s=0))
    assert report == PutReport(copied=1, ended=1, failed={0, 1, 2, 3, 4})
    assert rank.pool.objects == {}


def test_a_bug_in_a_copy_fails_the_batch_and_frees_its_staging(rank):
    real = rank.copier.gather

    def gather(caches, ids, rows, after):
        if PLACES[0] in ids:
            raise RuntimeError("a bug")
        real(caches, ids, rows, after)

    rank.copier.gather = gather
    assert put_all(rank) == PutReport(copied=1, ended=1, failed={0, 1})
    rank.wait_for_staging()
    assert rank.counts().failures_write == 4


def test_the_copy_waits_for_the_forward_that_was_marked_when_the_job_began(rank):
    marks, waited, real = iter(["first forward", "second forward"]), [], rank.copier.gather
    rank.copier.mark = lambda: next(marks)
    rank.copier.gather = lambda caches, ids, rows, after: (
        waited.append(after),
        real(caches, ids, rows, None),
    )
    putter = rank.putter()
    put_all(rank, putter, blocks=1)
    put_all(rank, putter, job=1)
    assert waited[:2] == ["first forward"] * 2
    assert set(waited[2:]) == {"second forward"}


def test_several_jobs_are_told_apart(rank):
    rank.pool.failing.add(key("s0-0", HASHES[0]))
    putter = rank.putter()
    putter.begin(order(job=3, blocks=1), SCOPE)
    other = PutOrder(job=4, blocks=block_list(HASHES[1:2], PLACES[1:2]))
    putter.begin(other, SCOPE)
    told = {3: PutReport(), 4: PutReport()}

    def both_ended():
        for job, report in putter.take_reports().items():
            told[job].add(report)
        return all(report.ended for report in told.values())

    until(both_ended)
    assert told == {
        3: PutReport(copied=1, ended=1, failed={0}),
        4: PutReport(copied=1, ended=1),
    }
