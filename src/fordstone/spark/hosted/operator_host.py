"""Run keyed steps for one shard through one micro-batch: our operators, with their state in Spark's store.

`ShardHost` is free of Spark: rows come in and go out packed, and state goes through `PieceStore`. Spark calls it in a stream through
`sent.HostProcessor`, and in a batch job through `batch_host`. A state is a list of pieces as on
the edge; each piece is one or more values in the store, so a batch writes what changed, and pieces of like size are merged.

Invariants: all rows of a batch are taken before its time moves; a shard's time never goes back; what is stored after a
batch is the whole of what the next one needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec
import polars as pl
import pyarrow as pa
from pyspark.sql import Row

from fordstone.errors import CheckpointError, DamagedError
from fordstone.lang.duration import TIME_MIN_US
from fordstone.operators.base import Moment, OperatorContext
from fordstone.runtime.chain import Chain
from fordstone.spark.hosted.packing import (
    Packed,
    Packer,
    What,
    batches,
    decode,
    encode,
    shard_keys,
    shards_of,
)
from fordstone.spark.hosted.plan_batches import TaskFacts, read_clock, source_times, time_of
from fordstone.spark.hosted.sent import MEMO
from fordstone.spark.hosted.stages import Host, QuerySetting, make_chain
from fordstone.state.base import Piece, RunRef, State

VALUE_BYTES_MAX: Final = 16 * 1024 * 1024
"""A value in the store is no larger: Spark has several copies of it on the way."""
MERGES_MAX: Final = 16
"""Maximum number of merges of one state in one batch."""


class PieceStore(Protocol):
    """Where one shard keeps its state between batches: by the name of a state and a number. A dictionary is one.

    Values are never changed, but for that of `MEMO`; numbers are never used again.
    """

    def get(self, at: tuple[str, int], /) -> bytes | None: ...

    def __setitem__(self, at: tuple[str, int], data: bytes, /) -> None: ...

    def __delitem__(self, at: tuple[str, int], /) -> None: ...


class PieceMemo(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a piece without reading it."""

    number: int
    rows: int
    size_bytes: int
    span_us: tuple[int, int] | None = None
    """The least and the most time of its rows, if they are ordered by time."""
    count: int = 1
    """As how many values it is stored: large pieces are several, under numbers in a row."""

    @property
    def values(self) -> range:
        return range(self.number, self.number + self.count)


class ShardMemo(msgspec.Struct, frozen=True, kw_only=True):
    """What a shard knows between batches beside its pieces."""

    watermarks_us: dict[str, int] = {}
    """By keyed step."""
    pieces: dict[str, tuple[PieceMemo, ...]] = {}
    """By state, oldest first."""
    next_number: int = 0


class SeedPiece(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of a checkpoint's state for one shard, packed as MessagePack."""

    state: str = ""
    """The state's name within its step. Empty: this seed has a watermark only."""
    order: int = 0
    """Among the pieces of that state, oldest first."""
    watermark_us: int
    """How far time had come at the step."""
    rows: bytes = b""


@dataclass(slots=True)
class _Inbox:
    """The rows of one batch for one shard, by what they are."""

    rows: dict[int, list[tuple[bool, bytes]]] = field(default_factory=dict)
    clocks: list[bytes] = field(default_factory=list)
    seeds: dict[int, list[bytes]] = field(default_factory=dict)


class ShardHost:
    """Runs the keyed steps of one stage for one shard through one batch. Used once."""

    def __init__(self, setting: QuerySetting, depth: int, shard: int, store: PieceStore) -> None:
        self._stages = setting.stages
        self._setting = setting
        self._depth = depth
        self._shard = shard
        self._store = store
        self._packer = Packer(setting.shards)
        self._mine = {self._stages.tag_of(host.name): host for host in self._stages.at(depth)}
        self._written_bytes = 0
        self._next_number = 0

    def run(self, rows: Iterable[Packed]) -> Iterator[Packed]:
        """Take all rows of the batch, and give what comes of them and what is for others."""
        inbox = _Inbox()
        for row in rows:
            match row.what:
                case What.ROWS | What.LATE if row.tag in self._mine:
                    inbox.rows.setdefault(row.tag, []).append((row.what is What.LATE, row.data))
                case What.SEED if row.tag in self._mine:
                    inbox.seeds.setdefault(row.tag, []).append(row.data)
                case What.CLOCK:
                    inbox.clocks.append(row.data)
                case _:
                    yield row
        stored = self._store.get((MEMO, 0))
        memo = ShardMemo() if stored is None else msgspec.json.decode(stored, type=ShardMemo)
        self._next_number = memo.next_number
        clock = read_clock(inbox.clocks)
        operators = self._setting.operators_with(clock.tables)
        times = source_times(clock)
        late_rows = late_by_us = failed_rows = state_bytes = 0
        for tag, host in self._mine.items():
            chain, known, pieces = self._restored(host, operators, memo, inbox.seeds.get(tag, []))
            for late, data in inbox.rows.pop(tag, []):
                chain.push(decode(data), late=late)
                yield from self._packer.ready()
            now_us = time_of(host.sources, times, known)
            if now_us > known:
                chain.on_watermark(now_us)
            chain.on_barrier(Moment(now_us=clock.now_us, before_us=clock.before_us))
            memo = self._stored(host, chain, memo, pieces, now_us)
            late_rows += chain.late_rows
            late_by_us = max(late_by_us, chain.late_by_us)
            failed_rows += chain.failed_rows
            state_bytes += sum(one.size_bytes for name in pieces for one in memo.pieces.get(name, ()))
        self._store[MEMO, 0] = msgspec.json.encode(memo)
        facts = TaskFacts(
            rows_late=late_rows,
            late_by_us=late_by_us,
            rows_failed=failed_rows,
            state_bytes=state_bytes,
            written_bytes=self._written_bytes,
        )
        self._packer.add(Packed(self._shard, What.FACTS, 0, msgspec.json.encode(facts)))
        if self._depth < self._stages.depth and self._shard == 0:
            # Every shard received the same marks; one passes them on.
            self._packer.to_all(What.CLOCK, 0, msgspec.json.encode(clock))
        yield from self._packer.taken()

    def _restored(
        self, host: Host, operators: OperatorContext, memo: ShardMemo, seeds: list[bytes]
    ) -> tuple[Chain, int, dict[str, State]]:
        """The host's chain as the last batch, or a checkpoint, left it; its time; and its states by their name in the store."""
        chain = make_chain(self._stages, host, operators, self._packer)
        states = states_of(chain)
        known_us = memo.watermarks_us.get(host.name, TIME_MIN_US)
        planted: dict[str, list[tuple[int, pl.DataFrame]]] = {}
        for data in seeds:
            seed = msgspec.msgpack.decode(data, type=SeedPiece)
            known_us = max(known_us, seed.watermark_us)
            if seed.rows:
                planted.setdefault(f"{host.name}:{seed.state}", []).append((seed.order, decode(seed.rows)))
        for name, state in states.items():
            pieces = [self._piece(name, one, state) for one in memo.pieces.get(name, ())]
            pieces += [
                Piece(frame, keep=state.keeps_frames)
                for _, frame in sorted(planted.get(name, []), key=lambda seed: seed[0])
            ]
            if pieces:
                state.load(pieces, watermark_us=known_us)
        if known_us > TIME_MIN_US:
            chain.on_watermark(known_us)
        return chain, known_us, states

    def _piece(self, state_name: str, known: PieceMemo, state: State) -> Piece:
        """A piece of the last batch. It is read when the state needs it: one that goes by time may not."""

        def read() -> pl.DataFrame:
            data = self._read(state_name, known)
            if len(data) != known.size_bytes:
                raise DamagedError(
                    f"piece {known.number} of {state_name} has {len(data)} bytes, {known.size_bytes} were stored. "
                    "The checkpoint of this query is damaged."
                )
            return decode(data)

        return Piece(make=read, ref=_ref(known), keep=state.keeps_frames, span_us=known.span_us)

    def _stored(
        self, host: Host, chain: Chain, memo: ShardMemo, states: Mapping[str, State], watermark_us: int
    ) -> ShardMemo:
        pieces = dict(memo.pieces)
        for frozen in chain.freeze():
            name = f"{frozen.step}:{frozen.name}"
            before = {one.number: one for one in pieces.get(name, ())}
            first_new = self._next_number
            now = self._written(name, states[name], frozen.pieces)
            # What was stored before is as it was, although the state may have dropped some of its rows.
            pieces[name] = tuple(before.get(one.number, one) for one in now)
            stays = {number for one in pieces[name] for number in one.values}
            stood = {number for one in before.values() for number in one.values}
            for number in sorted(stood.union(range(first_new, self._next_number)) - stays):
                del self._store[name, number]
        times = memo.watermarks_us | {host.name: watermark_us}
        return ShardMemo(watermarks_us=times, pieces=pieces, next_number=self._next_number)

    def _written(self, name: str, state: State, pieces: tuple[Piece, ...]) -> list[PieceMemo]:
        """Write the new pieces, merge those that are worth it, and give the pieces as they then are."""
        for piece in pieces:
            if piece.ref is None:
                self._write(name, piece.frame(), piece)
        for _ in range(MERGES_MAX):
            some = state.mergeable()
            if not some:
                break
            frame = state.combine([self._rows(name, piece) for piece in some], oldest=some[0] is pieces[0])
            merged = Piece(frame, keep=True)
            self._write(name, frame, merged)
            state.merged(some, merged)
            pieces = state.freeze()
        return [_memo_of(piece) for piece in pieces]

    def _write(self, name: str, frame: pl.DataFrame, piece: Piece) -> None:
        data = encode(frame)
        count = max(1, -(-len(data) // VALUE_BYTES_MAX))
        known = PieceMemo(self._next_number, frame.height, len(data), count=count)
        self._next_number = known.values.stop
        for at, number in enumerate(known.values):
            self._store[name, number] = data[at * VALUE_BYTES_MAX : (at + 1) * VALUE_BYTES_MAX]
        self._written_bytes += len(data)
        piece.written(_ref(known))

    def _rows(self, name: str, piece: Piece) -> pl.DataFrame:
        if piece.in_memory:
            return piece.frame()
        return decode(self._read(name, _memo_of(piece)))

    def _read(self, name: str, known: PieceMemo) -> bytes:
        values = []
        for number in known.values:
            value = self._store.get((name, number))
            if value is None:
                raise CheckpointError(
                    f"piece {number} of {name} is missing from the query's state. Restore its checkpoint location."
                )
            values.append(value)
        return values[0] if len(values) == 1 else b"".join(values)


def states_of(chain: Chain) -> dict[str, State]:
    """The states of a chain by their name in the store."""
    return {
        f"{step}:{name}": state
        for step, operator in chain.operators().items()
        for name, state in operator.states().items()
    }


def _ref(known: PieceMemo) -> RunRef:
    # In the store a piece is found by its numbers, which stand where a run has its digest.
    return RunRef(digest=f"{known.number}+{known.count}", size_bytes=known.size_bytes, rows=known.rows)


def _memo_of(piece: Piece) -> PieceMemo:
    ref = piece.ref
    if ref is None:
        raise AssertionError("every piece has been written")
    number, _, count = ref.digest.partition("+")
    return PieceMemo(int(number), ref.rows, ref.size_bytes, piece.span_us, int(count))


def state_names(setting: QuerySetting, depth: int) -> list[str]:
    """The names in the store of all states of a stage."""
    stages = setting.stages
    chains = [make_chain(stages, host, setting.operators_with({}), Packer(1)) for host in stages.at(depth)]
    return [name for chain in chains for name in states_of(chain)]


def stream_host(setting: QuerySetting, depth: int) -> Callable[[int, Iterator[Any], PieceStore], Iterator[Row]]:
    """What keyed tasks of a stream do with the rows of one shard in one batch."""
    if setting.probe is not None:
        from fordstone.spark.session.session import check_probe  # noqa: PLC0415 - only where there are several machines

        check_probe(setting.probe)
    keys = shard_keys(setting.shards)
    shards = shards_of(keys)

    def host(key: int, rows: Iterator[Any], store: PieceStore) -> Iterator[Row]:
        shard = shards[key]
        packed = (Packed(shard, What(row.what), row.tag, bytes(row.data)) for row in rows)
        for out in ShardHost(setting, depth, shard, store).run(packed):
            yield Row(shard=keys[out.shard], what=int(out.what), tag=out.tag, data=out.data)

    return host


def batch_host(setting: QuerySetting, depth: int) -> Callable[..., Any]:
    """What keyed tasks of a batch job do: one shard, from beginning to end."""

    def host(key: tuple[pa.Scalar, ...], rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        keys = shard_keys(setting.shards)
        shard = shards_of(keys)[key[0].as_py()]
        packed = (
            Packed(shard, What(row["what"]), row["tag"], row["data"]) for batch in rows for row in batch.to_pylist()
        )
        return batches(ShardHost(setting, depth, shard, {}).run(packed), keys)

    return host
