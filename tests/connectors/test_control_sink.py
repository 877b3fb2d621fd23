"""The publisher of a control table: versions, repeats, snapshots, owners that were shut out, and a hub that is away."""

from __future__ import annotations

import polars as pl
import pytest
from tests.connectors.control_hub import GONE, KEYS, SCHEMA, FakeHub, Table, applied, as_table, control_rows

from fordstone.connectors.base import ConnectorSpec, Delivery, SinkDelayedError, SinkStream
from fordstone.connectors.control import ControlSink
from fordstone.connectors.registry import open_sink, sink_delivery
from fordstone.epochs.run_file import decode_run
from fordstone.errors import ConfigError, FencedError, HubRefusedError, SinkError, StorageError
from fordstone.hub.client.publisher import SNAPSHOT_EVERY
from fordstone.hub.messages import ControlPublish, ControlVersion
from fordstone.operators.base import OP


def sink_of(hub: FakeHub, *, owner: str = "center", upserts: bool = False) -> ControlSink:
    stream = SinkStream(step="s", schema=SCHEMA, upsert_key=KEYS if upserts else None, owner=owner)
    return ControlSink(hub, stream, pipeline="p", control="t", keys=KEYS)


def rows(**values: float | None) -> pl.DataFrame:
    return pl.DataFrame(list(values.items()), schema={"device": pl.String, "threshold": pl.Float64}, orient="row")


def content(hub: FakeHub, version: ControlVersion) -> pl.DataFrame:
    return decode_run(hub.blobs[version.blob.digest], version.blob)


def table_of(hub: FakeHub) -> Table:
    """As a node that begins with nothing sees it."""
    table: Table = {}
    for version in hub.control_page("p", "t").versions:
        frame = content(hub, version)
        changes = {device: threshold if op == "upsert" else GONE for device, threshold, op in frame.rows()}
        table = applied({} if version.snapshot else table, changes)
    return table


def test_rows_of_an_append_stream_become_upserts_and_the_last_of_a_key_counts():
    hub = FakeHub()
    sink_of(hub).release(1, pl.concat([rows(a=1.0, b=2.0), rows(a=3.0)]))
    (version,) = hub.versions
    assert sorted(content(hub, version).rows()) == [("a", 3.0, "upsert"), ("b", 2.0, "upsert")]
    assert (version.owner, version.batch, version.snapshot) == ("center", 1, False)


def test_rows_of_an_upsert_stream_keep_what_they_do():
    hub = FakeHub()
    sink_of(hub, upserts=True).release(4, control_rows({"a": 1.0, "b": GONE}))
    assert sorted(content(hub, hub.versions[0]).rows()) == [("a", 1.0, "upsert"), ("b", None, "delete")]


def test_epochs_without_rows_publish_nothing_and_ask_nobody():
    hub = FakeHub(away=True)
    sink_of(hub).release(1, rows())
    assert hub.versions == []
    assert hub.asked == []


def test_rows_without_a_key_are_left_out_and_logged(caplog):
    hub = FakeHub()
    bad = pl.DataFrame({"device": [None, None], "threshold": [1.0, 2.0]}, schema=SCHEMA.polars)
    sink_of(hub).release(1, pl.concat([bad, rows(a=1.0)]))
    assert content(hub, hub.versions[0]).get_column("device").to_list() == ["a"]
    (record,) = [record for record in caplog.records if record.message.startswith("rows without a key not published")]
    assert record.rows == 2
    sink_of(hub).release(2, bad)
    assert len(hub.versions) == 1


def test_an_epoch_that_is_released_again_is_published_once_even_if_the_answer_was_lost():
    hub = FakeHub(loses_answers=1)
    sink = sink_of(hub)
    with pytest.raises(SinkDelayedError, match="will be tried again"):
        sink.release(3, rows(a=1.0))
    sink.release(3, rows(a=1.0))
    sink_of(hub).release(3, rows(a=1.0))
    sink_of(hub).release(4, rows(a=2.0))
    assert [(version.batch, version.version) for version in hub.versions] == [(3, 1), (4, 2)]


def test_a_hub_that_is_away_is_like_a_disk_that_refuses_so_that_the_engine_holds_and_tries_again():
    hub = FakeHub(away=True)
    with pytest.raises(StorageError) as caught:
        sink_of(hub).release(1, rows(a=1.0))
    # Spark tells mistakes of the user's by the names of our errors in its text: this is none.
    assert caught.value.__cause__ is None
    assert "fordstone.errors" not in f"{type(caught.value).__module__}: {caught.value}"


def test_blobs_that_the_hub_has_dropped_meanwhile_are_sent_again_at_the_next_try():
    class Forgetful(FakeHub):
        forgets = 1

        def publish(self, pipeline: str, control: str, version: ControlPublish) -> ControlVersion:
            if self.forgets:
                self.forgets -= 1
                self.blobs.clear()
            return super().publish(pipeline, control, version)

    hub = Forgetful()
    sink = sink_of(hub)
    with pytest.raises(SinkDelayedError):
        sink.release(1, rows(a=1.0))
    sink.release(1, rows(a=1.0))
    assert table_of(hub) == {"a": 1.0}


def test_who_was_followed_by_another_owner_is_fenced():
    hub = FakeHub()
    old = sink_of(hub, owner="old")
    old.release(7, rows(a=1.0))
    # Started over: batches count from 1 again, and are published all the same.
    sink_of(hub, owner="new").release(1, rows(a=2.0))
    with pytest.raises(FencedError, match="newer publisher"):
        old.release(8, rows(a=3.0))
    assert table_of(hub) == {"a": 2.0}


def test_other_refusals_are_errors_of_the_sink():
    class Closed(FakeHub):
        def put_blob(self, digest: str, data: bytes) -> None:
            raise HubRefusedError("not allowed", status=403, code="forbidden")

    with pytest.raises(SinkError, match="not allowed"):
        sink_of(Closed()).release(1, rows(a=1.0))


def test_snapshots_come_about_every_hundred_versions_and_hold_the_whole_table():
    hub = FakeHub(page_max=30)
    sink, table = sink_of(hub, upserts=True), Table()
    for epoch in range(1, 2 * SNAPSHOT_EVERY + 51):
        changes = {f"d{epoch % 7}": GONE if epoch % 5 == 0 else float(epoch)}
        sink.release(epoch, control_rows(changes))
        table = applied(table, changes)
        if epoch == SNAPSHOT_EVERY + 20:
            sink = sink_of(hub, upserts=True)  # a restart does not put them off
    snapshots = [version for version in hub.versions if version.snapshot]
    assert [version.version for version in snapshots] == [SNAPSHOT_EVERY, 2 * SNAPSHOT_EVERY]
    assert OP in content(hub, snapshots[0]).columns
    hub.page_max = 1000
    hub.forget_before(snapshots[-1].version)
    assert table_of(hub) == table


def test_a_table_that_was_emptied_has_an_empty_snapshot():
    hub = FakeHub()
    sink = sink_of(hub, upserts=True)
    for epoch in range(1, SNAPSHOT_EVERY):
        sink.release(epoch, control_rows({"a": 1.0}))
    sink.release(SNAPSHOT_EVERY, control_rows({"a": GONE}))
    assert hub.versions[-1].snapshot
    assert as_table(content(hub, hub.versions[-1])) == {}


def test_the_first_version_of_an_opening_is_no_snapshot_since_another_may_still_be_publishing():
    hub = FakeHub()
    for number in range(SNAPSHOT_EVERY + 5):
        hub.add({"a": float(number)})
    sink = sink_of(hub)
    sink.release(1, rows(b=1.0))
    sink.release(2, rows(c=1.0))
    assert [version.snapshot for version in hub.versions[-2:]] == [False, True]
    assert table_of(hub) == {"a": SNAPSHOT_EVERY + 4.0, "b": 1.0, "c": 1.0}


def test_a_table_whose_columns_are_others_now_starts_over_with_a_snapshot():
    hub = FakeHub()
    hub.add_frame(pl.DataFrame({"device": ["z"], "limit": [1], OP: ["upsert"]}))
    sink_of(hub).release(1, rows(a=1.0))
    assert hub.versions[-1].snapshot
    assert table_of(hub) == {"a": 1.0}


def test_a_snapshot_that_cannot_be_made_is_left_out():
    hub = FakeHub()
    sink = sink_of(hub)
    for epoch in range(1, SNAPSHOT_EVERY):
        sink.release(epoch, rows(a=float(epoch)))
    hub.blobs[hub.versions[3].blob.digest] = b"rot"
    sink.release(SNAPSHOT_EVERY, rows(a=0.0))
    assert not hub.versions[-1].snapshot


def test_rows_that_are_written_at_once_are_versions_of_an_owner_of_this_opening():
    hub = FakeHub()
    for _ in range(2):
        sink = sink_of(hub)
        sink.write(rows(a=1.0))
        sink.write(rows(a=2.0))
    assert [version.batch for version in hub.versions] == [1, 2, 1, 2]
    assert len({version.owner for version in hub.versions}) == 2


def test_the_registry_opens_it_with_an_address_and_says_so_without():
    spec = ConnectorSpec("control", {"pipeline": "p", "control": "t", "keys": ["device"]})
    assert sink_delivery(spec) is Delivery.EXACTLY_ONCE
    stream = SinkStream(step="s", schema=SCHEMA)
    with pytest.raises(ConfigError, match="--hub"):
        open_sink(spec, stream)
    placed = ConnectorSpec(spec.kind, spec.options, {"url": "http://127.0.0.1:1"})
    sink = open_sink(placed, stream)
    with pytest.raises(SinkDelayedError):
        sink.release(1, rows(a=1.0))
    sink.close()
