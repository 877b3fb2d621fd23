from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.hub.reading import epochs_in
from tests.hub.sending import blob, checkpoint, commit_of, entry, run, select

from fordstone.hub.messages import Checkpoint, Commit, Committed, Generation, Head, LeaseRequest, Rejection
from fordstone.hub.store import commits
from fordstone.hub.store.log import HubLog
from fordstone.hub.store.sqlite import SqliteStore
from fordstone.protocol.chain import chained
from fordstone.protocol.restored import NUMBERS_SKIPPED, is_former
from fordstone.state.base import RunRef


class Ledger:
    """A log without HTTP around it."""

    def __init__(self, path: Path) -> None:
        self.path = path / "log.sqlite"
        self.log = HubLog(SqliteStore(path / "log.sqlite"), clock_us=lambda: 5)

    def have(self, *texts: str) -> None:
        for text in texts:
            self.log.record_blob(run(text).digest, len(blob(text)))

    def lease(self, holder: str = "h", local: int = 1, **more: Any) -> Generation:
        asked = LeaseRequest(holder=holder, local=local, start=more.pop("start", f"s{local}"), **more)
        return self.log.write(lambda tx: commits.lease(tx, "p", "n", asked)).result(10).generation

    def commit(self, body: Commit) -> Committed:
        return self.log.write(
            lambda tx: commits.commit(tx, "p", "n", body, [one.digest() for one in body.epochs])
        ).result(10)

    def restored(self) -> None:
        """Be what `fordstone hub restore` leaves."""
        self.log.write(lambda tx: tx.log.mark_restored(now_us=tx.now_us)).result(10)

    def head(self) -> Head:
        return self.log.read(lambda log: commits.head(log, "p", "n"))

    def stream(self) -> list[tuple[int, tuple[RunRef, ...], int]]:
        return [(found.epoch, found.runs, found.watermark_us) for found in epochs_in(self.log)]

    def counts(self) -> tuple[Counter[str], Counter[str]]:
        """How often blobs are named: as counted, and as they really are."""
        counted = Counter(dict(select(self.path, "SELECT digest, refs FROM blobs WHERE refs > 0")))
        real = Counter(
            ref.digest
            for (runs,) in select(self.path, "SELECT runs FROM segments")
            for ref in msgspec.json.decode(runs, type=list[RunRef])
        )
        for (content,) in select(self.path, "SELECT content FROM checkpoints"):
            real.update(ref.digest for ref in msgspec.json.decode(content, type=Checkpoint).runs())
        return counted, real


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path)
    yield ledger
    ledger.log.close()


def refusal(ledger: Ledger, body: Commit) -> Rejection:
    with pytest.raises(Rejection) as raised:
        ledger.commit(body)
    return raised.value


def test_an_epoch_is_committed_once_whatever_is_sent_again(ledger: Ledger) -> None:
    ledger.lease()
    ledger.have("a")
    chain = chained("", entry(1, "a").digest())
    assert ledger.commit(commit_of(entry(1, "a"))) == Committed(head=1, chain=chain)
    assert ledger.commit(commit_of(entry(1, "a"))) == Committed(head=1, chain=chain, already=True)
    assert ledger.stream() == [(1, (run("a"),), 1)]
    digest = entry(1, "a").digest()
    assert ledger.head() == Head(
        epoch=1,
        chain=chained("", digest),
        generation=Generation(hub=1, local=1),
        log_id=ledger.head().log_id,
    )


def test_the_chain_at_each_epoch_does_not_depend_on_how_epochs_were_committed(ledger: Ledger) -> None:
    ledger.lease()
    ledger.have("a", "b", "c")
    ledger.commit(commit_of(entry(1, "a"), entry(2, "b")))
    ledger.commit(commit_of(entry(2, "b"), entry(3, "c")))
    wanted = list(
        accumulate((entry(n, text).digest() for n, text in ((1, "a"), (2, "b"), (3, "c"))), chained, initial="")
    )
    assert [found.chain for found in epochs_in(ledger.log)] == wanted[1:]
    assert ledger.head().chain == wanted[-1]


def test_a_commit_that_continues_another_chain_is_refused(ledger: Ledger) -> None:
    ledger.lease()
    ledger.have("a", "b", "c")
    ledger.commit(commit_of(entry(1, "a"), entry(2, "b"), after=""))
    for first, wrong in ((3, chained("", "x")), (2, "")):
        refused = refusal(ledger, commit_of(entry(first, "c"), after=wrong))
        assert refused.refusal.error == "other_content"
    assert ledger.commit(commit_of(entry(3, "c"), after=ledger.head().chain)).head == 3


def test_a_restored_hub_takes_what_the_node_still_has_and_records_what_is_lost(ledger: Ledger) -> None:
    ledger.lease()
    ledger.have("a", "b", "c")
    ledger.commit(commit_of(entry(1, "a")))
    before = chained("", "of epoch 4")
    assert refusal(ledger, commit_of(entry(5, "b"), after=before)).refusal.error == "gap"
    former = ledger.head().log_id
    ledger.restored()
    assert (ledger.head().resync, is_former(former, ledger.head().log_id), ledger.head().generation) == (
        True,
        True,
        None,
    )
    assert refusal(ledger, commit_of(entry(2, "b"))).refusal.error == "not_found", "the lease has ended"
    since = ledger.lease(head=4, chain=before, log_id=former)
    assert (since.hub % NUMBERS_SKIPPED, since.hub > NUMBERS_SKIPPED, since.local) == (1, True, 1)
    assert refusal(ledger, commit_of(entry(5, "b"), generation=since)).refusal.error == "gap", (
        "without a chain there is no way to go on"
    )
    assert ledger.commit(commit_of(entry(5, "b"), generation=since, after=before)).chain == chained(
        before, entry(5, "b").digest()
    )
    (node,) = ledger.log.read(lambda log: log.nodes())
    assert (node.lost, node.resync, ledger.head().resync) == (((2, 4),), False, False)
    assert [epoch for epoch, *_ in ledger.stream()] == [1, 5]
    assert refusal(ledger, commit_of(entry(8, "c"), generation=since, after=before)).refusal.error == "gap", "only once"
    assert ledger.commit(commit_of(entry(6, "c"), generation=since, after=ledger.head().chain)).head == 6


def test_a_restored_hub_that_has_lost_nothing_goes_on_as_before(ledger: Ledger) -> None:
    ledger.lease()
    ledger.have("a", "b")
    ledger.commit(commit_of(entry(1, "a")))
    former = ledger.head()
    ledger.restored()
    since = ledger.lease(head=1, chain=former.chain, log_id=former.log_id)
    assert not ledger.head().resync
    assert refusal(ledger, commit_of(entry(5, "b"), generation=since, after=former.chain)).refusal.error == "gap"
    assert ledger.commit(commit_of(entry(2, "b"), generation=since, after=former.chain)).head == 2


def test_a_node_that_joined_after_the_backup_gets_a_larger_generation_than_before(
    ledger: Ledger, tmp_path: Path
) -> None:
    """Otherwise a machine that takes it over would have the generation of the old one, or a smaller one, which sinks refuse."""
    before = ledger.lease(holder="old", local=3)
    (tmp_path / "backup").mkdir()
    backup = Ledger(tmp_path / "backup")
    backup.restored()
    assert backup.lease(holder="new", local=1, take_over=True).hub > before.hub
    with pytest.raises(Rejection) as raised:
        backup.commit(commit_of(entry(1), generation=before))
    assert raised.value.refusal.error == "stale_generation"
    backup.log.close()


def test_a_node_that_joined_after_the_backup_may_go_on_at_the_restored_hub(ledger: Ledger) -> None:
    former = ledger.head().log_id
    ledger.restored()
    ledger.have("a")
    assert is_former(former, ledger.head().log_id)
    before = chained("", "of epoch 6")
    since = ledger.lease(head=6, chain=before, log_id=former)
    assert ledger.commit(commit_of(entry(7, "a"), generation=since, after=before)).head == 7
    (node,) = ledger.log.read(lambda log: log.nodes())
    assert node.lost == ((1, 6),)


def test_a_node_of_another_hub_may_not_leave_epochs_out(ledger: Ledger) -> None:
    ledger.restored()
    ledger.have("a")
    before = chained("", "of epoch 6")
    since = ledger.lease(head=6, chain=before, log_id="the log of another hub")
    assert refusal(ledger, commit_of(entry(7, "a"), generation=since, after=before)).refusal.error == "gap"


LATER = {"local": 2, "start": "s2"}


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        pytest.param({}, None, id="the same start, again"),
        pytest.param(LATER | {"head": 2, "chain": "head"}, None, id="a later start with the head"),
        pytest.param(LATER | {"head": 1, "chain": "old"}, "not_head", id="an old copy"),
        pytest.param(LATER, "not_head", id="an old copy with nothing"),
        pytest.param(LATER | {"head": 2, "chain": "old"}, "not_head", id="a copy that went another way"),
        pytest.param(
            {"start": "x", "head": 2, "chain": "head"}, "stale_generation", id="a clone of the same incarnation"
        ),
        pytest.param({"holder": "other", "head": 2, "chain": "head"}, "held", id="another directory"),
    ],
)
def test_a_lease_is_for_the_directory_that_has_the_head(
    ledger: Ledger, request_: dict[str, Any], error: str | None
) -> None:
    ledger.lease()
    ledger.have("a", "b")
    ledger.commit(commit_of(entry(1, "a")))
    old = ledger.head().chain
    ledger.commit(commit_of(entry(2, "b")))
    granted = ledger.head().generation
    chains = {"head": ledger.head().chain, "old": old}
    asked = request_ | ({"chain": chains[request_["chain"]]} if "chain" in request_ else {})
    if error is None:
        ledger.lease(**asked)
        return
    with pytest.raises(Rejection) as raised:
        ledger.lease(**asked)
    assert raised.value.refusal.error == error
    assert ledger.head().generation == granted
    ledger.have("c")
    assert ledger.commit(commit_of(entry(3, "c"))).head == 3, "the living one is not fenced"


def test_a_log_has_an_id_that_stays_and_that_no_other_log_has(tmp_path: Path) -> None:
    ids = []
    for name in ("one", "one", "other"):
        (tmp_path / name).mkdir(exist_ok=True)
        ledger = Ledger(tmp_path / name)
        ids.append(ledger.head().log_id)
        ledger.log.close()
    assert ids[0] == ids[1] != ids[2]
    assert not is_former(ids[0], ids[2])


def test_a_range_merged_again_adds_only_what_is_new(ledger: Ledger) -> None:
    ledger.lease()
    ledger.have("a", "b", "c")
    ledger.commit(commit_of(entry(1, "a"), entry(2, "b")))
    assert ledger.commit(commit_of(entry(2, "b"), entry(3, "c"))).head == 3
    assert [epoch for epoch, *_ in ledger.stream()] == [1, 2, 3]


def test_other_content_is_refused_and_changes_nothing(ledger: Ledger) -> None:
    ledger.lease()
    ledger.have("a", "b")
    ledger.commit(commit_of(entry(1, "a")))
    refused = refusal(ledger, commit_of(entry(1, "b"), entry(2, "a")))
    assert (refused.status, refused.refusal.error) == (409, "other_content")
    assert ledger.stream() == [(1, (run("a"),), 1)]


def test_a_gap_is_refused_and_the_next_epoch_named(ledger: Ledger) -> None:
    ledger.lease()
    refused = refusal(ledger, commit_of(entry(3)))
    assert (refused.status, refused.refusal.error, refused.refusal.next_epoch) == (409, "gap", 1)


def test_missing_blobs_are_named_and_nothing_is_kept(ledger: Ledger) -> None:
    ledger.lease()
    ledger.have("a")
    refused = refusal(ledger, commit_of(entry(1, "a", "b"), checkpoint=checkpoint(1, "c")))
    assert refused.status == 424
    assert set(refused.refusal.missing) == {run("b").digest, run("c").digest, run("manifest 1").digest}
    assert ledger.head().epoch == 0
    assert ledger.stream() == []


def test_a_blob_of_another_size_counts_as_missing(ledger: Ledger) -> None:
    ledger.lease()
    ledger.log.record_blob(run("a").digest, 3)
    assert refusal(ledger, commit_of(entry(1, "a"))).refusal.missing == (run("a").digest,)


def test_a_commit_without_a_lease_is_refused_and_should_request_one(ledger: Ledger) -> None:
    refused = refusal(ledger, commit_of(entry(1)))
    assert (refused.status, refused.refusal.error) == (404, "not_found")


def test_who_was_taken_over_is_shut_out_even_of_what_is_there(ledger: Ledger) -> None:
    first = ledger.lease("old")
    ledger.commit(commit_of(entry(1), generation=first))
    second = ledger.lease("new", take_over=True)
    for body in (commit_of(entry(1), generation=first), commit_of(entry(2), generation=first)):
        refused = refusal(ledger, body)
        assert (refused.status, refused.refusal.generation) == (412, second)
    assert ledger.commit(commit_of(entry(2), generation=second)).head == 2


def test_another_holder_is_refused_unless_it_takes_over(ledger: Ledger) -> None:
    ledger.lease("old", 5)
    with pytest.raises(Rejection, match="take-over") as raised:
        ledger.lease("new", 1)
    assert (raised.value.status, raised.value.refusal.error) == (409, "held")
    assert ledger.lease("new", 1, take_over=True) == Generation(hub=2, local=1)


def test_the_last_two_checkpoints_are_kept_and_the_names_counted(ledger: Ledger) -> None:
    ledger.lease()
    ledger.have("a", "b", "c", *(f"manifest {epoch}" for epoch in range(1, 6)))
    for epoch, state in enumerate((("a",), ("a", "b"), ("a", "b", "b"), ("b", "c"), ("c",)), start=1):
        ledger.commit(commit_of(entry(epoch, "a"), checkpoint=checkpoint(epoch, *state)))
        counted, real = ledger.counts()
        assert counted == real
    assert ledger.log.read(lambda log: commits.newest_checkpoint(log, "p", "n")) == checkpoint(5, "c")
    assert select(ledger.path, "SELECT epoch FROM checkpoints") == [(4,), (5,)]
    assert ledger.counts()[0][run("c").digest] == 2


def test_a_kept_checkpoint_vouches_for_its_runs(ledger: Ledger) -> None:
    ledger.lease()
    ledger.have("a", "manifest 1", "manifest 2")
    ledger.commit(commit_of(entry(1), checkpoint=checkpoint(1, "a")))
    ledger.commit(commit_of(entry(2), checkpoint=checkpoint(2, "a")))
    assert ledger.counts()[0][run("a").digest] == 2


def test_all_is_there_after_the_log_is_opened_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.lease()
    ledger.have("a", "manifest 1")
    ledger.commit(commit_of(entry(1, "a"), checkpoint=checkpoint(1)))
    stream, head = ledger.stream(), ledger.head()
    ledger.log.close()
    again = Ledger(tmp_path)
    assert (again.stream(), again.head()) == (stream, head)
    assert again.commit(commit_of(entry(1, "a"))).already
    assert again.commit(commit_of(entry(2, "a"))).head == 2
    again.log.close()


def outcome(ledger: Ledger, body: Commit) -> str:
    try:
        ledger.commit(body)
    except Rejection as refused:
        return refused.refusal.error
    return "committed"


EPOCHS = 12
SENT = {epoch: entry(epoch, *(f"run {epoch} {part}" for part in range(epoch % 3))) for epoch in range(1, EPOCHS + 1)}


@examples(40)
@given(
    st.lists(
        st.tuples(st.integers(1, EPOCHS), st.integers(0, 5), st.sampled_from(["x", "y"]), st.booleans()), max_size=40
    )
)
def test_however_commits_are_folded_repeated_and_reordered_the_log_is_the_same(
    tries: list[tuple[int, int, str, bool]],
) -> None:
    """Two processes of a node send any ranges; now and then one takes over. Then the newest sends all in order."""
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder))
        ledger.have(*(f"run {epoch} {part}" for epoch in SENT for part in range(epoch % 3)))
        have = {"x": ledger.lease("x")}
        have["y"] = ledger.lease("y", take_over=True)
        newest = have["y"]
        for first, more, who, take_over in tries:
            if take_over:
                have[who] = newest = ledger.lease(who, take_over=True)
            body = commit_of(
                *(SENT[epoch] for epoch in range(first, min(first + more, EPOCHS) + 1)), generation=have[who]
            )
            before = ledger.head().epoch
            word = outcome(ledger, body)
            if have[who] != newest:
                assert word == "stale_generation"
            assert word == "committed" or ledger.head().epoch == before
            assert word != "gap" or first > before + 1
        start = ledger.head().epoch
        for epoch in range(start + 1, EPOCHS + 1):
            ledger.commit(commit_of(SENT[epoch], generation=newest))
        assert ledger.stream() == [
            (sent.epoch, sent.streams["s"].runs, sent.streams["s"].watermark_us) for sent in SENT.values()
        ]
        counted, real = ledger.counts()
        assert counted == real
        ledger.log.close()
