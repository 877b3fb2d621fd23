"""Streams as a source: each is a partition, and the position is one more than the id of the entry before it (`history`).

A read asks for the entry that was read last as well. If it comes first, with the fields that it had, nothing between was removed and the stream is
the same. Else the stream is described in one transaction with the entries, and judged.

Position 0 is that of a stream that was never begun: `start=` says after which id it begins. What it turned out to be is kept in the checkpoint
(`identity`) with the number of entries that had been added up to the position, and a digest of the last one.

Invariants: each entry comes once and in order; entries that were removed before they were read, and a stream that is another one or an older state of
itself, are errors and never a silent jump.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import redis

from fordstone.connectors.base import (
    Chunk,
    Idleness,
    OpenContext,
    Reader,
    ReadPlan,
    Source,
    SourceOptions,
    SourceTrouble,
)
from fordstone.connectors.redis.history import (
    IdRangeError,
    Lost,
    Reached,
    Rewritten,
    StreamFacts,
    id_of,
    judge,
    number_of,
)
from fordstone.connectors.redis.kind import LATEST, RedisSettings
from fordstone.connectors.redis.rows import EntryRows, RawEntry
from fordstone.connectors.redis.server import AwayError, Server
from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import SourceError
from fordstone.plan.ids import PartitionId, Position

log = logging.getLogger(__name__)

ENTRIES_MIN: Final = 16
ENTRIES_MAX: Final = 5_000
"""How many entries are asked for at a time."""
ANSWER_BYTES: Final = 4 << 20
"""About how large an answer is to be: the number of entries follows from the size of those before."""
PLACES_KEPT: Final = 4
"""Of a stream, while reads are planned."""


class StreamMark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a checkpoint keeps of a stream beside its position."""

    bits: int
    start: int
    """The id after which it was begun."""
    started: int | None = None
    """How many entries had been added up to there."""
    count: int | None = None
    """How many up to the position, at least."""
    digest: str = ""
    """Of the entry just before the position, if one was read there."""
    since: int = 0
    """Of a planned read: where it begins, and the count there."""
    since_count: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place in a stream: everything up to an id was read."""

    after: int
    count: int | None = None
    fields: Sequence[bytes] | None = None
    """Of the entry with that id, if it was read in this process."""
    digest: str = ""
    """Likewise, if it was read in another."""

    @property
    def position(self) -> Position:
        return Position(self.after + 1)

    @property
    def is_entry(self) -> bool:
        return self.fields is not None or bool(self.digest)

    def is_same(self, fields: Sequence[bytes]) -> bool:
        """Whether an entry with that id has the fields that were read."""
        return fields == self.fields if self.fields is not None else digest_of(fields) == self.digest

    def own_digest(self) -> str:
        return digest_of(self.fields) if self.fields is not None else self.digest


class RedisSource(Source):
    """Some streams of one server."""

    def __init__(self, settings: RedisSettings, options: SourceOptions, context: OpenContext) -> None:
        self._settings = settings
        self._bounded = options.bounded
        self._rows = EntryRows(settings, options.schema)
        self._server = Server(settings, context, fails=SourceError)
        self._marks: dict[str, StreamMark] = {}
        """Of streams that were begun."""
        self._places: dict[str, dict[Position, Place]] = {}
        """Places that were planned, or came from a checkpoint."""
        self._planned: dict[str, Position] = {}
        """Where the newest planned read of a stream begins."""
        self._ends: dict[str, int] = {}
        """Of bounded input: the last id."""
        self._awaited: set[str] = set()

    def partitions(self) -> Sequence[PartitionId]:
        return [PartitionId(key) for key in self._settings.keys]

    def restore(self, cuts: Mapping[str, PartitionCut]) -> None:
        for key, cut in cuts.items():
            if not cut.identity:
                continue
            mark = self._marks[key] = msgspec.json.decode(cut.identity, type=StreamMark)
            if mark.bits != self._settings.sequence_bits:
                raise SourceError(
                    f"{self._settings.called}: the checkpoint was made with sequence_bits={mark.bits}, so its positions mean other ids now. Set that, or "
                    "start over with --fresh."
                )
            if mark.since:
                self._keep(key, Place(after=mark.since - 1, count=mark.since_count))
            if cut.position:
                self._keep(key, Place(after=cut.position - 1, count=mark.count, digest=mark.digest))

    def identity(self, partition: PartitionId, position: Position) -> str:
        place = self._places.get(partition, {}).get(position)
        return "" if not position or place is None else self.identity_of(partition, place, self._planned.get(partition))

    def open(self, partition: PartitionId, position: Position, *, with_positions: bool) -> Reader:
        return StreamReader(self, self._rows, partition, position, with_positions=with_positions)

    def plan_read(self, partition: PartitionId, position: Position, rows_max: int) -> ReadPlan:
        """By reading, unless all that is there is few enough."""
        try:
            stream = self.stream(partition, position, patient=self._bounded)
            self._planned[partition] = position
            end = self.end_of(partition)
            if end is None or end > stream.place.after:
                stream.go_on(max(1, rows_max), end)
        except AwayError:
            if self._bounded:
                raise
            return ReadPlan(position=position)
        self._keep(partition, stream.place)
        planned = stream.place.position
        return ReadPlan(position=planned, ended=self.ends_at(partition, planned))

    def idleness(self, partition: PartitionId, position: Position) -> Idleness:
        del partition, position
        return Idleness.EXPECTED if self._server.away is None else Idleness.UNKNOWN

    def trouble(self) -> SourceTrouble:
        return SourceTrouble(away=self._server.away)

    def ack(self, cuts: Mapping[str, PartitionCut]) -> None:
        """Publish the positions under the group, if there is one. A failure is tried again with the next ones."""
        for key, cut in cuts.items() if self._settings.group is not None else ():
            if cut.position and cut.identity:
                mark = msgspec.json.decode(cut.identity, type=StreamMark)
                try:
                    self._publish(key, id_of(cut.position - 1, self._settings.sequence_bits), mark.count)
                except (AwayError, SourceError) as error:
                    log.warning("position not published", extra={"stream": key, "problem": str(error)})

    def _publish(self, key: str, last: str, count: int | None) -> None:
        """Set how far the group has read, and create it if it is missing."""
        given = (key, self._settings.group, last, *(() if count is None else ("ENTRIESREAD", count)))

        def question(client: redis.Redis) -> None:
            try:
                client.execute_command("XGROUP", "SETID", *given)
            except redis.ResponseError as error:
                if "NOGROUP" not in str(error):
                    raise
                client.execute_command("XGROUP", "CREATE", *given)

        self._server.ask_if_there(question)

    def close(self) -> None:
        self._server.close()

    # For the readers.

    @property
    def bounded(self) -> bool:
        return self._bounded

    def stream(self, key: str, position: Position, *, patient: bool) -> StreamCursor:
        """A cursor at a position; at 0, where the stream begins. `patient`: wait for the server, for as long as it may need to answer."""
        if position == 0:
            mark = self._begin(key, patient=patient)
            place = Place(after=mark.start, count=mark.started)
        else:
            place = self._places.get(key, {}).get(position) or Place(after=position - 1)
        return StreamCursor(self._server, self._settings, key, place, patient=patient)

    def identity_of(self, key: str, place: Place, since: Position | None = None) -> str:
        mark = self._marks.get(key)
        before = self._places.get(key, {}).get(since) if since else None
        made = StreamMark(
            bits=self._settings.sequence_bits,
            start=place.after if mark is None else mark.start,
            started=None if mark is None else mark.started,
            count=place.count,
            digest=place.own_digest(),
            since=since or 0,
            since_count=None if before is None else before.count,
        )
        return msgspec.json.encode(made).decode()

    def end_of(self, key: str) -> int | None:
        """The last id of bounded input; None: it is not bounded."""
        if not self._bounded:
            return None
        if key not in self._ends:
            facts = StreamCursor(self._server, self._settings, key, Place(after=0), patient=True).look()[0]
            if facts is None:
                raise self._server.failure(
                    f"{self._settings.called}: there is no stream {key!r} in database {self._settings.database} of {self._settings.server}.\n"
                    "Correct its name. Only a run that is not bounded waits for its first entry."
                )
            self._ends[key] = facts.newest
        return self._ends[key]

    def ends_at(self, key: str, position: Position) -> bool:
        end = self.end_of(key)
        return end is not None and position > end

    def _begin(self, key: str, *, patient: bool) -> StreamMark:
        """Find out once where a stream begins that is in no checkpoint."""
        if key not in self._marks:
            bits, start_ms = self._settings.sequence_bits, self._settings.start_ms()
            count: int | None
            facts = StreamCursor(self._server, self._settings, key, Place(after=0), patient=patient).look()[0]
            if facts is None:
                after, count = 0, 0
                log.warning("stream awaited", extra={"stream": key, "server": self._settings.server})
            elif start_ms is not None:
                after = max(0, (start_ms << bits) - 1)
                count = facts.added - facts.length if facts.first is None or facts.first > after else None
            elif self._settings.start == LATEST:
                after, count = facts.newest, facts.added
            else:
                after = facts.newest if facts.first is None else facts.first - 1
                count = facts.added - facts.length
            self._marks[key] = StreamMark(bits=bits, start=after, started=count)
        return self._marks[key]

    def _keep(self, key: str, place: Place) -> None:
        kept = self._places.setdefault(key, {})
        kept.pop(place.position, None)
        kept[place.position] = place
        while len(kept) > PLACES_KEPT:
            del kept[next(iter(kept))]


class StreamCursor:
    """Reads a stream onwards from a place, and notices if it is not the stream that was read."""

    def __init__(self, server: Server, settings: RedisSettings, key: str, place: Place, *, patient: bool) -> None:
        self.place = place
        self._server = server
        self._settings = settings
        self._key = key
        self._ask = server.ask if patient else server.ask_if_there
        self._entries = ENTRIES_MIN
        self._counted = False
        """Whether the count is exact: it was taken from the server where nothing followed."""

    def read(self, count: int, last: int | None = None) -> tuple[list[RawEntry], list[int]]:
        """Return the next entries, and the numbers of their ids. `last`: go up to this id, although entries may end before it."""
        count = max(1, min(count, self._entries))
        found = self._range(count, last)
        facts = None
        follows = bool(found) and self._is_last(found[0])
        if follows:
            found = found[1:]
        else:
            facts, found = self.look(count, last)
            found = self._judged(facts, found)[:count]
        numbers = [self._number(entry[0]) for entry in found]
        place = self.place
        if found:
            self._counted = False
            counted = None if place.count is None else place.count + len(found)
            place = Place(after=numbers[-1], count=counted, fields=found[-1][1])
            size = sum(len(part) for _, fields in found for part in fields)
            self._entries = max(
                ENTRIES_MIN, min(ENTRIES_MAX, 4 * self._entries, ANSWER_BYTES * len(found) // (size + 1))
            )
        if len(found) < count:
            if facts is not None and facts.newest <= place.after:
                place = replace(place, count=facts.added)
            if last is not None and last > place.after:
                place = Place(after=last, count=place.count)
        self.place = place
        if follows and not found and last is None and not self._counted:
            self._count()
        return found, numbers

    def go_on(self, count: int, last: int | None) -> None:
        """Go past this many entries, as far as there are any."""
        facts, found = self.look(1, last)
        self._judged(facts, found)
        if facts is not None and facts.length <= count and (last is None or facts.newest <= last):
            if facts.newest > self.place.after:
                self.place = Place(after=facts.newest, count=facts.added)
            return
        while count > 0:
            before = self.place.after
            count -= len(self.read(count, last)[0])
            if self.place.after == before or (last is not None and self.place.after >= last):
                return

    def look(self, count: int = 1, last: int | None = None) -> tuple[StreamFacts | None, list[RawEntry]]:
        """Describe the stream, and return the entries from the place on, both at the same moment."""

        def question(client: redis.Redis) -> list[Any]:
            with client.pipeline(transaction=True) as both:
                both.execute_command("XINFO STREAM", self._key)
                both.execute_command(*self._command(count, last))
                return both.execute(raise_on_error=False)

        described_as, found = self._ask(question)
        if isinstance(described_as, redis.ResponseError) and "no such key" in str(described_as):
            return None, []
        self._server.raised(described_as)
        self._server.raised(found)
        facts = dict(zip(described_as[::2], described_as[1::2], strict=True))
        if b"entries-added" not in facts:
            raise self._server.failure(
                f"{self._settings.called}: {self._settings.server} does not count the entries of a stream, so it could not be noticed if some are lost. Use "
                "Redis 7.0 or later, or Valkey."
            )
        first = facts[b"first-entry"]
        return StreamFacts(
            length=facts[b"length"],
            first=None if first is None else self._number(first[0]),
            newest=self._number(facts[b"last-generated-id"]),
            added=facts[b"entries-added"],
            deleted=self._number(facts[b"max-deleted-entry-id"]),
        ), found

    def _range(self, count: int, last: int | None) -> list[RawEntry]:
        found: list[RawEntry] = self._ask(lambda client: client.execute_command(*self._command(count, last)))
        return found

    def _command(self, count: int, last: int | None) -> tuple[str | int, ...]:
        """Entries from the one that was read last on, which is one more."""
        bits = self._settings.sequence_bits
        end = "+" if last is None else id_of(last, bits)
        return ("XRANGE", self._key, id_of(self.place.after, bits), end, "COUNT", count + 1)

    def _is_last(self, entry: RawEntry) -> bool:
        """Whether this is the entry that was read last. One with its id and other fields is an error."""
        if not self.place.is_entry or self._number(entry[0]) != self.place.after:
            return False
        if not self.place.is_same(entry[1]):
            raise self._rewritten(f"entry {entry[0].decode()} has other fields than when it was read")
        return True

    def _judged(self, facts: StreamFacts | None, found: list[RawEntry]) -> list[RawEntry]:
        place, bits = self.place, self._settings.sequence_bits
        if found and self._number(found[0][0]) == place.after:
            if place.is_entry:
                self._is_last(found[0])
            return found[1:]
        reached = Reached(after=place.after, count=place.count, is_entry=place.is_entry)
        judgement = judge(reached, facts, bits)
        if isinstance(judgement, Rewritten):
            raise self._rewritten(judgement.why)
        if isinstance(judgement, Lost):
            many = {None: "entries", 1: "an entry"}.get(judgement.entries, f"{judgement.entries or 0:,} entries")
            if self._settings.lost == "error":
                raise self._server.failure(
                    f"{self._settings.called}: stream {self._key!r} was read up to {id_of(place.after, bits)}, and the server has removed {many} after "
                    "it before they were read (MAXLEN or MINID of a producer, XTRIM, or XDEL).\n"
                    "Set lost='skip' to go on with the oldest entry that is there, and without those; or start over with --fresh. Trim the stream less, so "
                    "that it keeps what comes while this pipeline is stopped."
                )
            log.warning(
                "entries skipped",
                extra={"stream": self._key, "after": id_of(place.after, bits), "entries": judgement.entries},
            )
        if facts is not None and (facts.first is None or facts.first > place.after):
            self.place = replace(place, count=facts.added - facts.length)
        return found

    def _count(self) -> None:
        """Take the exact count, which is larger than the one that was kept if unread entries were deleted one by one."""
        facts = self.look()[0]
        if facts is not None and facts.newest == self.place.after:
            self.place = replace(self.place, count=facts.added)
            self._counted = True

    def _number(self, text: bytes) -> int:
        try:
            return number_of(text.decode(), self._settings.sequence_bits)
        except IdRangeError as error:
            bits = self._settings.sequence_bits
            raise self._server.failure(
                f"{self._settings.called}: stream {self._key!r} has the id {error}, which does not fit into a position: with sequence_bits={bits} the "
                f"number after the dash is below {1 << bits:,}, and the one before it below {1 << (63 - bits):,}.\n"
                "Set sequence_bits= so that both fit, and start over with --fresh."
            ) from error

    def _rewritten(self, why: str) -> Exception:
        return self._server.failure(
            f"{self._settings.called}: stream {self._key!r} is not the one that was read: {why}. It was deleted and created again, or the server has lost "
            "data: it was restored from an older copy, has evicted keys, or did not write all to disk before it crashed (appendfsync).\n"
            "Nothing more was read. Bring the stream back; or start over with --fresh, which reads it from its beginning."
        )


class StreamReader(Reader):
    """Reads one stream."""

    def __init__(
        self, source: RedisSource, rows: EntryRows, key: str, position: Position, *, with_positions: bool
    ) -> None:
        self._source = source
        self._rows = rows
        self._key = key
        self._position = position
        self._with_positions = with_positions
        self._stream: StreamCursor | None = None
        self._ended = False

    def read(self, rows_max: int, until: Position | None = None) -> Chunk | None:
        if until is not None and self._position >= until:
            return None
        patient = until is not None or self._source.bounded
        try:
            return self._read(rows_max, until, patient=patient)
        except AwayError:
            if patient:
                raise
            return None

    def _read(self, rows_max: int, until: Position | None, *, patient: bool) -> Chunk | None:
        begun = self._position > 0
        if self._stream is None:
            self._stream = self._source.stream(self._key, self._position, patient=patient)
        if not begun:
            if until is not None and self._stream.place.position > until:
                self._stream.place = Place(after=until - 1)
            return self._moved([], [])
        end = self._source.end_of(self._key)
        if end is not None and self._position > end:
            return None if self._ended else self._moved([], [])
        last = min((one for one in (None if until is None else int(until) - 1, end) if one is not None), default=None)
        entries, numbers = self._stream.read(rows_max, last)
        return self._moved(entries, numbers) if self._stream.place.position > self._position else None

    def _moved(self, entries: Sequence[RawEntry], numbers: Sequence[int]) -> Chunk:
        assert self._stream is not None  # noqa: S101 - see `_read`
        self._position = self._stream.place.position
        self._ended = self._source.ends_at(self._key, self._position)
        frame, positions, rejected = self._rows.of(self._key, entries, numbers)
        return Chunk(
            frame=frame,
            position=self._position,
            row_positions=positions if self._with_positions else None,
            rejected=rejected,
            ended=self._ended,
        )

    def identity(self) -> str:
        return "" if self._stream is None else self._source.identity_of(self._key, self._stream.place)

    def close(self) -> None:
        """The connection is the source's."""


def digest_of(fields: Sequence[bytes]) -> str:
    """A digest of the fields of an entry."""
    found = hashlib.blake2b(digest_size=12)
    for part in fields:
        found.update(len(part).to_bytes(8, "big"))
        found.update(part)
    return found.hexdigest()
