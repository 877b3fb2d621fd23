"""A journal of messages that came from outside and cannot be asked for again: appended, synced in groups, read by position, trimmed.

A message has a value in bytes and a little beside it. Its position is its number, from 0. Segment files `<first position>.log` consist of a
header and frames; a frame is what one `append` was given, under one checksum. What the messages mean is for connectors to decide.

Invariants: what `sync` has returned for survives every crash, at its position; readers see nothing that is not durable, so a position
never means another message; the messages of one `append` survive together or not at all; a torn end is cut off when the log is opened, and damage before
it is an error that names what is lost; after a failed sync nothing is appended, synced or read any more.
"""

from __future__ import annotations

import logging
import re
import secrets
import struct
import threading
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal, NamedTuple, TypeVar

import msgspec

from fordstone.errors import DamagedError, GoneError, StorageError
from fordstone.storage.atomic import AtomicWriter, remove_leftovers
from fordstone.storage.disk import Disk, FatalStorageError
from fordstone.storage.journal import seal, unseal_as

log = logging.getLogger(__name__)

T = TypeVar("T")

WhenFull = Literal["wait", "drop_oldest", "drop_newest"]
"""What happens to messages that find no room: `wait` refuses them, `drop_oldest` removes what was not read yet, `drop_newest` removes these."""
SEGMENT_BYTES: Final = 8 << 20
SEGMENTS_MIN: Final = 8
"""A log has room for at least this many segments, so that trimming frees room in time."""
FRAME_BYTES_MAX: Final = 64 << 20
READ_BYTES: Final = 1 << 20
_DROPPING_NAME: Final = "dropping"
_NAME: Final = re.compile(r"(\d{20})\.log")
_SEGMENT: Final = struct.Struct("<4sIQ16s")
"""Magic, checksum, first position, id of the log."""
_FRAME: Final = struct.Struct("<4sIIIIQQ")
"""Magic, checksum of what follows here, checksum of the messages, their bytes, their number, the position of the first one, and the position up to
which all was synced when this was written."""
_SEGMENT_MAGIC: Final = b"\xf5ML1"
_FRAME_MAGIC: Final = b"\xf5MF1"
_RESTORE: Final = "Bring the directory back from a copy, or start over with an empty state directory."
_CHECKED_FROM: Final = 8
"""The checksum of a header covers all after itself."""


class Message(NamedTuple):
    """One message."""

    value: bytes
    topic: str = ""
    time_us: int = 0
    """When it was received."""
    id: str = ""


class Messages(msgspec.Struct, kw_only=True):
    """Some messages in a row, by columns."""

    first: int
    """The position of the first one."""
    values: list[bytes]
    topics: list[str]
    times_us: list[int]
    ids: list[str]

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.first + len(self.values)

    def between(self, start: int, end: int) -> Messages:
        """Return those at these positions."""
        if start <= self.first and end >= self.end:
            return self
        cut = slice(max(0, start - self.first), max(0, end - self.first))
        return Messages(
            first=max(start, self.first),
            values=self.values[cut],
            topics=self.topics[cut],
            times_us=self.times_us[cut],
            ids=self.ids[cut],
        )


class _Stored(msgspec.Struct, array_like=True):
    """A frame's messages as they are stored. A column of equal values is stored as one value."""

    values: list[bytes]
    topics: list[str]
    times_us: list[int]
    ids: list[str]


class MessageLogFullError(StorageError):
    """There is no room for the messages. Nothing was appended; there is room again when older ones have been processed."""


@dataclass(slots=True)
class _Segment:
    """One file. It was synced as a whole before the next one was created."""

    path: str
    first: int
    end: int
    size_bytes: int


@dataclass(slots=True)
class _Found:
    """What the frames of one segment contain, and where the first one that is not whole begins."""

    end: int
    whole_bytes: int
    damaged: bool = False
    """A later frame says that the one that is not whole had been synced."""


class _Dropping(msgspec.Struct):
    """What a log that drops the oldest messages has to know after a crash."""

    gaps: list[tuple[int, int]] = []
    """Positions of messages that were dropped unread, from and to."""
    read: int = -1
    """The first position of the newest segment of which anything was read: it and those before it are needed for a replay."""


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(_Stored)
_DROPPING: Final = msgspec.json.Decoder(_Dropping)


class MessageLog:
    """Used by one process, from any number of threads."""

    def __init__(
        self,
        disk: Disk,
        folder: str,
        *,
        bytes_max: int = 1 << 30,
        when_full: WhenFull = "wait",
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """Open the log, or create it. Cuts off what a crash has torn; `DamagedError` if messages that were synced cannot be read.

        `segment_bytes`: a segment of this size is followed by a new one; less in a small log.
        """
        self.folder = folder
        self.dropped = 0
        """How many messages were dropped since the log was opened."""
        self._disk = disk
        self._bytes_max = bytes_max
        self._when_full = when_full
        self._segment_bytes = min(segment_bytes, max(1, bytes_max // SEGMENTS_MIN))
        self._writer = AtomicWriter(disk)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        """Notified when messages become durable, when there is more room, and when the log fails or is closed."""
        self._syncing = self._torn = self._closed = False
        self._failed: BaseException | None = None
        self._trimmed = 0
        disk.make_dirs(folder)
        remove_leftovers(disk, folder)
        self._dropping = self._stored_dropping()
        self._id = b""
        self._segments = self._opened()
        self._durable = self._end

    @property
    def id(self) -> str:
        """Random, of the log's creation: positions of another log mean other messages."""
        return self._id.hex()

    @property
    def first(self) -> int:
        """The position of the oldest message that is kept."""
        return self._segments[0].first

    @property
    def end(self) -> int:
        """The position after the newest durable message."""
        return self._durable

    @property
    def _end(self) -> int:
        return self._segments[-1].end

    @property
    def size_bytes(self) -> int:
        with self._lock:
            return sum(segment.size_bytes for segment in self._segments)

    # Writing.

    def append(self, messages: Sequence[Message]) -> int:
        """Write messages together, and return the position after them. They are not durable before `sync`.

        After `StorageError` none of them is there. `MessageLogFullError`: see `WhenFull`.
        """
        payload = _encoded(messages)
        if _FRAME.size + len(payload) > min(FRAME_BYTES_MAX, self._bytes_max // 2):
            raise StorageError(
                f"{len(messages)} messages of together {len(payload):,} bytes are too large for the journal in {self.folder}, which has "
                f"{self._bytes_max:,} bytes. Send less at once, or give the journal more."
            )
        with self._lock:
            self._check()
            if not self._has_room(_SEGMENT.size + _FRAME.size + len(payload), len(messages)):
                return self._end
            try:
                self._write(payload, len(messages))
            except FatalStorageError as error:
                self._fail(error)
                raise
            return self._end

    def sync(self, position: int | None = None) -> None:
        """Return when all messages before the position are durable; all that were appended, without one. Those who wait together share a sync."""
        with self._lock:
            wanted = self._end if position is None else position
        while True:
            with self._lock:
                while self._syncing and self._durable < wanted:
                    self._changed.wait()
                self._check()
                if self._durable >= wanted:
                    return
                self._syncing = True
                end, path = self._end, self._segments[-1].path
            try:
                self._disk.fsync(path)
            except FileNotFoundError:
                end = 0  # it was synced, read and trimmed meanwhile
            except BaseException as error:
                with self._lock:
                    self._syncing = False
                    self._fail(error)
                raise
            with self._lock:
                self._syncing = False
                self._durable = max(self._durable, end)
                self._changed.notify_all()

    def commit(self, messages: Sequence[Message]) -> int:
        """Append messages, and return the position after them when they are durable."""
        end = self.append(messages)
        self.sync(end)
        return end

    def wait_for_room(self, timeout_s: float) -> None:
        """Wait until something was trimmed or read, or the log was closed; at most this long."""
        with self._lock:
            if not self._closed and self._failed is None:
                self._changed.wait(timeout_s)

    def trim(self, position: int) -> None:
        """Remove the segments that end before the position: nothing before it will be read again."""
        with self._lock:
            self._check()
            self._trimmed = max(self._trimmed, min(position, self._durable))
            while len(self._segments) > 1 and self._segments[0].end <= self._trimmed:
                self._disk.remove(self._segments[0].path)
                # One after the other: of removals that are not durable, a crash may undo any.
                self._disk.fsync_dir(self.folder)
                del self._segments[0]
            self._changed.notify_all()

    def begin_at(self, position: int) -> None:
        """Let the first message of an empty log have this position."""
        with self._lock:
            self._check()
            if self._end or len(self._segments) > 1:
                raise ValueError(f"the journal in {self.folder} is not empty")
            self._disk.remove(self._segments[0].path)
            self._disk.fsync_dir(self.folder)
            self._segments = [self._created(position)]
            self._durable = position

    def check(self) -> None:
        """Raise if the log has failed or was closed."""
        with self._lock:
            self._check()

    def close(self) -> None:
        """Take and give nothing any more. What is synced stays."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def _write(self, payload: bytes, count: int) -> None:
        segment = self._segments[-1]
        if segment.size_bytes >= self._segment_bytes:
            segment = self._roll()
        if self._torn:
            self._disk.truncate(segment.path, segment.size_bytes)
        head = _FRAME.pack(_FRAME_MAGIC, 0, zlib.crc32(payload), len(payload), count, segment.end, self._durable)
        checksum = zlib.crc32(head[_CHECKED_FROM:], self._seed).to_bytes(4, "little")
        self._torn = True
        self._disk.append(segment.path, b"".join((_FRAME_MAGIC, checksum, head[_CHECKED_FROM:], payload)))
        self._torn = False
        segment.size_bytes += _FRAME.size + len(payload)
        segment.end += count

    def _roll(self) -> _Segment:
        """Begin a new segment. The old one is durable first, so that only the newest one can be torn."""
        old = self._segments[-1]
        if self._torn:
            self._disk.truncate(old.path, old.size_bytes)
            self._torn = False
        self._disk.fsync(old.path)
        self._durable = max(self._durable, old.end)
        self._segments.append(self._created(old.end))
        self._changed.notify_all()
        return self._segments[-1]

    def _created(self, first: int) -> _Segment:
        """Create a segment, durably: its predecessor may be trimmed from now on."""
        path = self._path(first)
        header = _SEGMENT.pack(_SEGMENT_MAGIC, 0, first, self._id)[_CHECKED_FROM:]
        self._disk.remove(path)  # what a failed attempt has left
        self._disk.create(path, _SEGMENT_MAGIC + zlib.crc32(header).to_bytes(4, "little") + header)
        self._disk.fsync(path)
        self._disk.fsync_dir(self.folder)
        return _Segment(path, first, first, _SEGMENT.size)

    def _has_room(self, size_bytes: int, count: int) -> bool:
        """Return whether the messages may be written; False: they are dropped."""
        if self.size_bytes + size_bytes <= self._bytes_max:
            return True
        if self._trimmed >= self._end and self._segments[-1].size_bytes > _SEGMENT.size:
            self._roll()
            self.trim(self._trimmed)
        while self._when_full == "drop_oldest" and self.size_bytes + size_bytes > self._bytes_max:
            if not self._drop_oldest():
                break
        if self.size_bytes + size_bytes <= self._bytes_max:
            return True
        if self._when_full != "drop_newest":
            raise MessageLogFullError(
                f"the journal in {self.folder} is full: {self.size_bytes:,} of {self._bytes_max:,} bytes wait to be processed."
            )
        self._count_dropped(count)
        return False

    def _drop_oldest(self) -> bool:
        """Remove the oldest segment of which nothing was read; return whether there is one."""
        for segment in self._segments[:-1]:
            if segment.first > self._dropping.read:
                self._keep_dropping(gap=(segment.first, segment.end))
                self._disk.remove(segment.path)
                self._segments.remove(segment)
                self._count_dropped(segment.end - segment.first)
                return True
        return False

    def _count_dropped(self, count: int) -> None:
        if not self.dropped:
            log.warning(
                "messages dropped, the journal is full", extra={"folder": self.folder, "policy": self._when_full}
            )
        self.dropped += count

    def _keep_dropping(self, *, gap: tuple[int, int] | None = None, read: int = -1) -> None:
        """Keep durably that messages will be dropped, or that a segment will be read."""
        gaps = [one for one in self._dropping.gaps if one[1] > self._trimmed]
        if gap is not None and gaps and gaps[-1][1] == gap[0]:
            gaps[-1] = (gaps[-1][0], gap[1])
        elif gap is not None:
            gaps.append(gap)
        kept = _Dropping(gaps=gaps, read=max(read, self._dropping.read))
        self._writer.write(f"{self.folder}/{_DROPPING_NAME}", seal("dropping", kept))
        self._dropping = kept

    def _check(self) -> None:
        if self._failed is not None:
            raise FatalStorageError(str(self._failed)) from self._failed
        if self._closed:
            raise StorageError(f"the journal in {self.folder} is closed.")

    def _fail(self, error: BaseException) -> None:
        self._failed = error
        self._changed.notify_all()

    # Reading, by `MessageReader`.

    def _entered(self, position: int) -> _Segment | None:
        """Return a copy of the segment with the message at the position, or the next one that was not dropped; None: none is durable."""
        with self._lock:
            self._check()
            if position >= self._durable:
                return None
            if position < self.first and not any(start <= position < end for start, end in self._dropping.gaps):
                raise GoneError(
                    f"the journal in {self.folder} begins with message {self.first}, and message {position} is to be read. It was removed when a "
                    "checkpoint that is newer than the one of this run was kept. Start from the newest checkpoint of this state directory."
                )
            found = next(segment for segment in self._segments if segment.end > position)
            if self._when_full == "drop_oldest" and found.first > self._dropping.read:
                self._keep_dropping(read=found.first)
            return replace(found)

    # Opening.

    def _stored_dropping(self) -> _Dropping:
        path = f"{self.folder}/{_DROPPING_NAME}"
        try:
            return unseal_as("dropping", self._disk.read(path), _DROPPING)
        except FileNotFoundError:
            return _Dropping()
        except DamagedError as error:
            raise DamagedError(
                f"{path}: {error}. Without it, messages that were dropped look lost. {_RESTORE}"
            ) from error

    def _opened(self) -> list[_Segment]:
        """Find the segments, cut off what is torn, and make the rest durable."""
        names = [name for name in self._disk.list(self.folder) if _NAME.fullmatch(name)]
        firsts = [int(name.removesuffix(".log")) for name in names]
        kept = [first for first in firsts if not any(start <= first < end for start, end in self._dropping.gaps)]
        for first in firsts:
            if first not in kept:
                self._disk.remove(self._path(first))
        if kept and (newest := self._opened_newest(kept[-1], only=len(kept) == 1)) is None:
            kept.pop()
            newest = self._opened_newest(kept[-1], only=True) if kept else None
        if not kept or newest is None:
            self._id = secrets.token_bytes(16)
            return [self._created(0)]
        segments = [self._sealed(first, after) for first, after in pairwise(kept)]
        self._disk.fsync_dir(self.folder)
        return [*segments, newest]

    def _opened_newest(self, first: int, *, only: bool) -> _Segment | None:
        """The newest segment, of which the end may be torn; None: a crash came before it was there, so it was removed."""
        path = self._path(first)
        data = self._disk.read(path)
        try:
            self._id = _segment_id(data, first)
        except DamagedError as error:
            if len(data) > _SEGMENT.size or (only and first):
                raise DamagedError(
                    f"{path}: {error}. Its messages, from number {first} on, cannot be read. {_RESTORE}"
                ) from error
            self._disk.remove(path)
            return None
        found = _scan(data, first, self._seed)
        if found.damaged:
            raise DamagedError(
                f"{path} is damaged at byte {found.whole_bytes:,}: the messages from number {found.end} on were acknowledged, and cannot be "
                f"read. {_RESTORE}"
            )
        if found.whole_bytes < len(data):
            log.warning("torn end of the journal cut off", extra={"file": path, "bytes": len(data) - found.whole_bytes})
            self._disk.truncate(path, found.whole_bytes)
        self._disk.fsync(path)
        return _Segment(path, first, found.end, found.whole_bytes)

    def _sealed(self, first: int, after: int) -> _Segment:
        """A segment that another one follows. What is in it is checked when it is read."""
        end = next((start for start, stop in self._dropping.gaps if stop == after), after)
        return _Segment(self._path(first), first, end, self._disk.size(self._path(first)))

    def _path(self, first: int) -> str:
        return f"{self.folder}/{first:020}.log"

    @property
    def _seed(self) -> int:
        """Checksums of frames begin with the log's id, so that nobody can send a message that looks like frames of the log."""
        return zlib.crc32(self._id)


class MessageReader:
    """Reads on from a position. Used by one thread."""

    def __init__(self, messages: MessageLog, position: int) -> None:
        self.position = position
        """Of the next message."""
        self._log = messages
        self._disk = messages._disk  # noqa: SLF001 - of this module
        self._segment: _Segment | None = None
        self._offset = 0
        self._at = 0
        """The position of the frame at the offset."""
        self._frames: deque[Messages] = deque()

    def read(self, count_max: int, until: int | None = None) -> list[Messages]:
        """Return the next durable messages, at most `count_max`; none: there are none now, or `until` is reached.

        The position is then after them, and after messages that were dropped before the next one.
        """
        until = min(self._log.end, until if until is not None else self._log.end)
        found: list[Messages] = []
        while count_max > 0 and self.position < until:
            if not self._frames:
                self._load()
            frame = self._frames[0]
            if frame.first > self.position:
                self.position = min(frame.first, until)  # a gap
                continue
            some = frame.between(self.position, min(until, self.position + count_max))
            found.append(some)
            self.position, count_max = some.end, count_max - len(some.values)
            if self.position >= frame.end:
                self._frames.popleft()
        return found

    def _load(self) -> None:
        """Read some frames from the position on, at least one."""
        segment = self._segment
        while not self._frames:
            if segment is None or self._at >= segment.end or self._at > self.position:
                segment = self._enter(segment)
            data = self._part(segment, READ_BYTES)
            if len(data) >= _FRAME.size:
                size_bytes = _FRAME.size + _FRAME.unpack_from(data)[3]
                if len(data) < size_bytes <= FRAME_BYTES_MAX:
                    data = self._part(segment, size_bytes)
            before = self._offset
            for frame, size_bytes in _frames(data, self._at, self._log._seed):  # noqa: SLF001 - of this module
                self._at, self._offset = frame.end, self._offset + size_bytes
                if frame.end > self.position:
                    self._frames.append(frame)
            if self._offset == before:
                raise DamagedError(
                    f"{segment.path} is damaged at byte {self._offset:,}: messages {self._at} to {segment.end - 1} were acknowledged, and cannot "
                    f"be read. {_RESTORE}"
                )

    def _enter(self, known: _Segment | None) -> _Segment:
        segment = self._log._entered(self.position)  # noqa: SLF001 - of this module
        if segment is None:
            raise AssertionError(f"message {self.position} is not durable")
        if known is None or known.path != segment.path or self._at > self.position:
            self._offset, self._at = _SEGMENT.size, segment.first
        self._segment = segment
        return segment

    def _part(self, segment: _Segment, size_bytes: int) -> bytes:
        return self._disk.read_part(segment.path, self._offset, min(size_bytes, segment.size_bytes - self._offset))


def _encoded(messages: Sequence[Message]) -> bytes:
    values, topics, times, ids = (
        (list(column) for column in zip(*messages, strict=True)) if messages else ([], [], [], [])
    )
    return _ENCODER.encode(_Stored(values, _shortened(topics), _shortened(times), _shortened(ids)))


def _shortened(column: list[T]) -> list[T]:
    """One value in place of many equal ones."""
    return column[:1] if column and column.count(column[0]) == len(column) else column


def _decoded(payload: bytes | memoryview, first: int, count: int) -> Messages:
    try:
        stored = _DECODER.decode(payload)
    except msgspec.MsgspecError as error:
        raise DamagedError(f"the checksum is right but the content is not: {error}") from error
    return Messages(
        first=first,
        values=stored.values,
        topics=_lengthened(stored.topics, count),
        times_us=_lengthened(stored.times_us, count),
        ids=_lengthened(stored.ids, count),
    )


def _lengthened(column: list[T], count: int) -> list[T]:
    return column * count if len(column) == 1 else column


def _frames(data: bytes, position: int, seed: int) -> Iterator[tuple[Messages, int]]:
    """Yield the whole frames at the beginning of some bytes, with their sizes. The first one begins at the position."""
    start = 0
    while (head := _head(data, start, seed)) is not None and head.first == position:
        yield _decoded(memoryview(data)[start + _FRAME.size : head.stop], head.first, head.messages), head.stop - start
        start, position = head.stop, position + head.messages


class _Head(NamedTuple):
    """A frame whose checksum is right."""

    first: int
    messages: int
    synced: int
    stop: int


def _head(data: bytes, start: int, seed: int) -> _Head | None:
    if len(data) < start + _FRAME.size:
        return None
    magic, checksum, messages_checksum, size_bytes, count, first, synced = _FRAME.unpack_from(data, start)
    begin, stop = start + _FRAME.size, start + _FRAME.size + size_bytes
    if magic != _FRAME_MAGIC or zlib.crc32(data[start + _CHECKED_FROM : begin], seed) != checksum or stop > len(data):
        return None
    with memoryview(data) as view:
        right = zlib.crc32(view[begin:stop]) == messages_checksum
    return _Head(first, count, synced, stop) if right else None


def _segment_id(data: bytes, first: int) -> bytes:
    if len(data) < _SEGMENT.size:
        raise DamagedError("its header is not whole")
    magic, checksum, stored_first, log_id = _SEGMENT.unpack_from(data)
    if magic != _SEGMENT_MAGIC or zlib.crc32(data[_CHECKED_FROM : _SEGMENT.size]) != checksum or stored_first != first:
        raise DamagedError("its header is damaged")
    return bytes(log_id)


def _scan(data: bytes, first: int, seed: int) -> _Found:
    """Follow the frames up to the first one that is not whole, and look after it for one that says that it had been synced."""
    position, start = first, _SEGMENT.size
    while (head := _head(data, start, seed)) is not None and head.first == position:
        position, start = position + head.messages, head.stop
    later = data.find(_FRAME_MAGIC, start)
    while later >= 0:
        head = _head(data, later, seed)
        if head is not None and head.synced > position:
            return _Found(position, start, damaged=True)
        later = data.find(_FRAME_MAGIC, later + 1)
    return _Found(position, start)
