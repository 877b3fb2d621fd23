"""What Arrow IPC bytes say about themselves: columns, rows, and how large they become, read before anything is decoded.

Arrow libraries take lengths in the metadata at their word: a forged one makes them allocate exabytes and abort, or read beyond
a buffer. `read_facts` compares every length with what is there. It reads the flatbuffers of messages by hand, as far as
`Schema.fbs`, `Message.fbs` and `File.fbs` of Arrow define them and Fordstone writes them: no dictionaries, unions, run-end
encoding, list views, intervals, extension types, time zones but UTC, metadata of users, or big-endian buffers. The bytes inside buffers
(offsets, UTF-8) are left to Polars, which checks them when it decodes.

In a flatbuffer, many offsets may point to one table, text or vector, and many buffers of a batch to the same bytes. A reader that follows
each of them does as much work as if they were different. So what is not needed is rejected instead of skipped, what is shared
is bounded as if it were not, and buffers must not overlap.

Invariants: every position is checked before it is read; nesting, fields, names, batches and metadata are bounded; nothing is decompressed;
time and memory are those of the bytes that are there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

FILE_MAGIC: Final = b"ARROW1"
DECODED_BYTES_FREE: Final = 128 << 20
"""What a run may always take when it is decoded: constant columns become almost nothing when they are compressed."""
DECODED_RATIO_MAX: Final = 64
"""How many times its own size a larger run may take."""
DECODED_BYTES_MAX: Final = 2 << 30
"""What no run may take."""
DEPTH_MAX: Final = 64
"""Maximum number of types inside each other. A map counts twice."""
FIELDS_MAX: Final = 16_384
"""Maximum number of columns and fields inside them."""
FIELD_BYTES_MIN: Final = 16
"""What each field takes of the metadata at least: offsets to itself, its layout, its name and its type. Fewer: some are the same."""
NAME_BYTES_MAX: Final = 1_000
"""Maximum size of the name of a column or field, in UTF-8."""
NAMES_BYTES_MAX: Final = 1 << 20
"""Maximum size of all their names together."""
METADATA_BYTES_MAX: Final = 8 << 20
"""Maximum size of the metadata of one message."""
BATCHES_FREE: Final = 64
BATCH_ROWS_MIN: Final = 1024
"""There may be `BATCHES_FREE` batches, and one more per this many rows."""
NODE_LENGTH_MAX: Final = 1 << 40
VALUE_BYTES_MIN: Final = 1
ROW_BYTES_MIN: Final = 8
"""A value and a row count at least this much, although a null takes no bytes and a boolean one bit: later steps make more of them."""
SCHEMAS_CACHED: Final = 64
SCHEMA_CACHED_BYTES_MAX: Final = 1 << 16

_CONTINUATION: Final = 0xFFFFFFFF
_PREFIX_BYTES: Final = 8
_FILE_START: Final = 8
_FILE_END: Final = 10
"""The length of the footer and the magic bytes."""
_BLOCK: Final = struct.Struct("<qi4xq")
_PAIR: Final = struct.Struct("<qq")
_LONG: Final = struct.Struct("<q")
_INT: Final = struct.Struct("<i")
_UINT: Final = struct.Struct("<I")
_SHORT: Final = struct.Struct("<h")
_USHORT: Final = struct.Struct("<H")
_STORED_AS_IT_IS: Final = -1
"""In place of the decompressed length: the buffer was not compressed."""
_SCHEMA, _BATCH = 1, 3
"""Kinds of messages."""
_V5: Final = 4
_LAYOUT_FIELDS_MAX: Final = 16
"""Of how many fields the places are read: no table of Arrow has more than seven."""
_UTC: Final = "UTC"

# Types, by their number in `Schema.fbs`.
_NULL, _INTEGER, _FLOAT, _BINARY, _UTF8, _BOOL, _DECIMAL, _DATE, _TIME, _TIMESTAMP = range(1, 11)
_LIST, _STRUCT, _FIXED_BINARY, _FIXED_LIST, _MAP, _DURATION = 12, 13, 15, 16, 17, 18
_LARGE_BINARY, _LARGE_UTF8, _LARGE_LIST, _BINARY_VIEW, _UTF8_VIEW = 19, 20, 21, 23, 24
_DECIMAL_DIGITS_MAX: Final = 38
_FIXED_SIZE_MAX: Final = 1 << 20
_OFFSET_BITS: Final = {_BINARY: 32, _UTF8: 32, _LIST: 32, _MAP: 32, _LARGE_BINARY: 64, _LARGE_UTF8: 64, _LARGE_LIST: 64}
_VIEW_BITS: Final = 128
_CHILDREN: Final = {_LIST: 1, _LARGE_LIST: 1, _FIXED_LIST: 1, _MAP: 1}
_VIEWS: Final = frozenset({_BINARY_VIEW, _UTF8_VIEW})
_VARIABLE: Final = frozenset({_BINARY, _UTF8, _LARGE_BINARY, _LARGE_UTF8})


class IpcError(Exception):
    """Bytes are not Arrow IPC of the kind that is accepted here; the text says why, as what comes after "it"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IpcFacts:
    """What was found."""

    columns: tuple[str, ...]
    rows: int
    batches: int
    decoded_bytes: int
    """At least what the rows take in memory."""
    text_bytes_max: int
    """At most what all their text takes if it is copied: views of text may share bytes."""
    views: tuple[tuple[str, int | None], ...]
    """The columns with views inside, and where in the data the type of these views stands if it is text."""


def decoded_bytes_max(size_bytes: int) -> int:
    """What a run of this size may take when it is decoded."""
    return min(DECODED_BYTES_MAX, max(DECODED_BYTES_FREE, size_bytes * DECODED_RATIO_MAX))


def read_facts(data: bytes | memoryview) -> IpcFacts:
    """Check the metadata of a file or a stream against its bytes. Decodes nothing.

    Raises:
        IpcError: They contradict each other, or something is there that Fordstone does not write.
    """
    try:
        view = memoryview(data)
        start, fields, batches = _file(view) if bytes(view[: len(FILE_MAGIC)]) == FILE_MAGIC else _stream(view)
        rows = decoded_bytes = text_bytes_max = count = 0
        for metadata, body in batches:
            count += 1
            batch = _check_batch(metadata, body, fields)
            rows += batch[0]
            decoded_bytes += batch[1]
            text_bytes_max += batch[2]
            if count > BATCHES_FREE + rows // BATCH_ROWS_MIN:
                raise IpcError(f"is in more than {count - 1} batches for {rows} rows")
    except struct.error as error:
        raise IpcError(f"ends in the middle of its metadata ({error})") from error
    return IpcFacts(
        columns=tuple(field.name for field in fields if field.parent is None),
        rows=rows,
        batches=count,
        decoded_bytes=decoded_bytes,
        text_bytes_max=text_bytes_max,
        views=tuple(
            (_column_of(field, fields), start + field.type_at if field.kind == _UTF8_VIEW else None)
            for field in fields
            if field.kind in _VIEWS
        ),
    )


def as_binary(data: bytes, facts: IpcFacts) -> bytes:
    """The same run with views of bytes in place of views of text. Decoding them does not look at the text."""
    changed = bytearray(data)
    for _, place in facts.views:
        if place is not None:
            changed[place] = _BINARY_VIEW
    return bytes(changed)


def _column_of(field: _Field, fields: tuple[_Field, ...]) -> str:
    while field.parent is not None:
        field = fields[field.parent]
    return field.name


# Flatbuffers.


class _Table:
    """One table: where its fields are. `struct` raises an error for positions after the end, `_at` for those before the start."""

    __slots__ = ("_data", "_fields", "_position")

    def __init__(self, data: memoryview, position: int) -> None:
        self._data = data
        self._position = position
        vtable = position - _at(_INT, data, position)
        size = _at(_USHORT, data, vtable)
        if size < 4 or size % 2:  # noqa: PLR2004 - two numbers of two bytes stand before the fields
            raise IpcError("has metadata that cannot be read")
        self._fields = struct.unpack_from(f"<{min(size // 2 - 2, _LAYOUT_FIELDS_MAX)}H", data, vtable + 4)

    @property
    def size_bytes(self) -> int:
        """Of the metadata that it is in."""
        return len(self._data)

    def scalar(self, field: int, kind: struct.Struct, default: int = 0) -> int:
        position = self.place(field)
        return default if position is None else _at(kind, self._data, position)

    def byte(self, field: int) -> int:
        position = self.place(field)
        if position is None:
            return 0
        if not 0 <= position < len(self._data):
            raise IpcError("has metadata that cannot be read")
        return self._data[position]

    def table(self, field: int) -> _Table | None:
        position = self.place(field)
        return None if position is None else _Table(self._data, _follow(self._data, position))

    def places(self, field: int) -> range:
        """Where the offsets to tables stand in a vector, to be read by `at`."""
        start, count = self._vector(field, _UINT.size)
        return range(start, start + count * _UINT.size, _UINT.size)

    def at(self, place: int) -> _Table:
        """The table to which the offset at this place points."""
        return _Table(self._data, _follow(self._data, place))

    def items(self, field: int, kind: struct.Struct) -> Iterator[tuple[int, ...]]:
        """A vector of numbers or structs, one by one: as tuples, all of them would take ten times as much."""
        start, count = self._vector(field, kind.size)
        return kind.iter_unpack(self._data[start : start + count * kind.size])

    def count(self, field: int) -> int:
        return self._vector(field, 1)[1]

    def text(self, field: int) -> str:
        start, count = self._vector(field, 1)
        if count > NAME_BYTES_MAX:
            raise IpcError(f"has a name of {count} bytes; {NAME_BYTES_MAX} are allowed")
        try:
            name = str(self._data[start : start + count], "utf-8")
        except UnicodeDecodeError as error:
            raise IpcError("has a name that is not UTF-8") from error
        if "\0" in name:  # Polars panics where it hands such a name to PyArrow
            raise IpcError("has a name with a NUL character")
        return name

    def _vector(self, field: int, item_bytes: int) -> tuple[int, int]:
        """Where the items of a vector begin, and their number."""
        position = self.place(field)
        if position is None:
            return 0, 0
        start = _follow(self._data, position)
        count = _at(_UINT, self._data, start)
        if start + _UINT.size + count * item_bytes > len(self._data):
            raise IpcError("has metadata that cannot be read")
        return start + _UINT.size, count

    def place(self, field: int) -> int | None:
        """Where a field stands; None: it has its default."""
        offset = self._fields[field] if field < len(self._fields) else 0
        return self._position + offset if offset else None


def _at(kind: struct.Struct, data: memoryview, position: int) -> int:
    if position < 0:  # `struct` would count from the end
        raise IpcError("has metadata that cannot be read")
    number: int = kind.unpack_from(data, position)[0]
    return number


def _follow(data: memoryview, position: int) -> int:
    return position + _at(_UINT, data, position)


def _root(data: memoryview) -> _Table:
    return _Table(data, _follow(data, 0))


# Files, streams and messages.


_Content = tuple[int, tuple["_Field", ...], Iterator[tuple[_Table, memoryview]]]
"""Where the metadata with the columns begins, the columns, and the batches with their bodies."""


def _file(data: memoryview) -> _Content:
    """By the footer, which is what readers go by."""
    end = len(data) - _FILE_END
    if end < _FILE_START or bytes(data[-len(FILE_MAGIC) :]) != FILE_MAGIC:
        raise IpcError("is cut off")
    size_bytes = _at(_INT, data, end)
    if not 0 < size_bytes <= min(METADATA_BYTES_MAX, end - _FILE_START):
        raise IpcError(f"has a footer of {size_bytes} bytes")
    footer_at = end - size_bytes
    footer = _root(data[footer_at:end])
    if footer.count(2):
        raise IpcError("has dictionaries")
    _reject_metadata(footer, 4)
    blocks = footer.items(3, _BLOCK)
    return footer_at, _schema(footer.table(1)), _blocks(data, blocks, footer_at)


def _blocks(data: memoryview, blocks: Iterator[tuple[int, ...]], footer_at: int) -> Iterator[tuple[_Table, memoryview]]:
    after = _FILE_START
    for offset, metadata_bytes, body_bytes in blocks:
        if offset < after or offset % 8 or metadata_bytes < _PREFIX_BYTES or body_bytes < 0:
            raise IpcError(f"has a batch at byte {offset} that overlaps others")
        after = offset + metadata_bytes + body_bytes
        if after > footer_at:
            raise IpcError(f"has a batch at byte {offset} that goes on beyond its end")
        message, size_bytes = _message(data, offset)
        if message is None or size_bytes + _PREFIX_BYTES != metadata_bytes or message.scalar(3, _LONG) != body_bytes:
            raise IpcError(f"has a batch at byte {offset} whose size is not the one in the footer")
        yield _header(message, _BATCH), data[after - body_bytes : after]


def _stream(data: memoryview) -> _Content:
    message, size_bytes = _message(data, 0)
    if message is None or message.scalar(3, _LONG):
        raise IpcError("does not begin with its columns")
    header = data[_PREFIX_BYTES : _PREFIX_BYTES + size_bytes]
    fields = _known_schema(bytes(header)) if size_bytes <= SCHEMA_CACHED_BYTES_MAX else _message_schema(header)
    return _PREFIX_BYTES, fields, _messages(data, _PREFIX_BYTES + size_bytes)


def _messages(data: memoryview, position: int) -> Iterator[tuple[_Table, memoryview]]:
    while position < len(data):
        message, size_bytes = _message(data, position)
        position += _PREFIX_BYTES + size_bytes
        if message is None:
            break
        body_bytes = message.scalar(3, _LONG)
        if not 0 <= body_bytes <= len(data) - position:
            raise IpcError(f"has a batch of {body_bytes} bytes, and {len(data) - position} are there")
        yield _header(message, _BATCH), data[position : position + body_bytes]
        position += body_bytes
    if position != len(data):
        raise IpcError(f"goes on for {len(data) - position} bytes after its end")


def _message(data: memoryview, position: int) -> tuple[_Table | None, int]:
    """The message that begins there and the size of its metadata; None: the end of the stream."""
    if _at(_UINT, data, position) != _CONTINUATION:
        raise IpcError("is not Arrow IPC")
    size_bytes = _at(_INT, data, position + 4)
    start = position + _PREFIX_BYTES
    if size_bytes == 0:
        return None, 0
    if not 0 < size_bytes <= min(METADATA_BYTES_MAX, len(data) - start) or size_bytes % 8:
        raise IpcError(f"has metadata of {size_bytes} bytes")
    message = _root(data[start : start + size_bytes])
    if message.scalar(0, _SHORT) != _V5:
        raise IpcError("is of an old version of Arrow IPC")
    _reject_metadata(message, 4)
    return message, size_bytes


def _reject_metadata(table: _Table, field: int) -> None:
    """Readers copy keys and values of users, as many and as long as they are; nothing here needs any."""
    if table.count(field):
        raise IpcError("has metadata of users (custom metadata), which is not used here")


def _header(message: _Table, kind: int) -> _Table:
    header = message.table(2)
    if message.byte(1) != kind or header is None:
        raise IpcError("has dictionaries or other messages than batches")
    return header


# Columns.


@dataclass(frozen=True, slots=True)
class _Field:
    """One column, or a field inside one, in the order in which batches list them."""

    name: str
    kind: int
    bits: int
    """Of one value, where all have the same size."""
    parent: int | None
    """The number of the field that this one is in."""
    per_parent: int | None
    """How many values it has per value of its parent; None: any number."""
    never_null: bool
    """Whether it is an entry of a map, or the key in one."""
    type_at: int
    """Where in the metadata its kind stands."""


def _message_schema(data: memoryview) -> tuple[_Field, ...]:
    return _schema(_header(_root(data), _SCHEMA))


@lru_cache(maxsize=SCHEMAS_CACHED)
def _known_schema(data: bytes) -> tuple[_Field, ...]:
    """The runs of a stream begin with the same bytes."""
    return _message_schema(memoryview(data))


def _schema(schema: _Table | None) -> tuple[_Field, ...]:
    if schema is None:
        raise IpcError("has no columns")
    if schema.scalar(0, _SHORT):
        raise IpcError("is big-endian")
    _reject_metadata(schema, 2)
    found: list[_Field] = []
    names_bytes = 0
    # Depth first, as batches list their buffers; without recursion, so that depth costs nothing. What waits are places, not tables: many
    # may point to one table.
    waiting: list[tuple[int, int | None, int | None, int]] = [
        (place, None, None, 1) for place in reversed(_bounded(schema, 1, 0))
    ]
    while waiting:
        place, parent, per_parent, depth = waiting.pop()
        if depth > DEPTH_MAX:
            raise IpcError(f"has types that are nested more than {DEPTH_MAX} deep")
        table = schema.at(place)
        in_map = parent is not None and found[parent].kind == _MAP
        is_key = parent is not None and found[parent].never_null and parent == len(found) - 1
        names_bytes += table.count(0)
        if names_bytes > NAMES_BYTES_MAX:
            raise IpcError(f"has names of more than {NAMES_BYTES_MAX} bytes together")
        field, inside = _field(table, parent, per_parent, never_null=in_map or is_key)
        if in_map and (field.kind != _STRUCT or table.count(5) != 2):  # noqa: PLR2004 - a key and a value
            raise IpcError(f"has a map {found[parent or 0].name!r} without keys and values")
        children = _bounded(table, 5, len(found) + len(waiting) + 1)
        if len(children) != _CHILDREN.get(field.kind, len(children) if field.kind == _STRUCT else 0):
            raise IpcError(
                f"has a column {field.name!r} with {len(children)} fields inside, which its type does not have"
            )
        waiting += [(child, len(found), inside, depth + 1) for child in reversed(children)]
        found.append(field)
    if len({(field.parent, field.name) for field in found}) < len(found):
        raise IpcError("has two columns of the same name")
    return tuple(found)


def _bounded(table: _Table, field: int, known: int) -> range:
    """Where the offsets to the fields stand in a table."""
    places = table.places(field)
    count = known + len(places)
    if count > FIELDS_MAX:
        raise IpcError(f"has more than {FIELDS_MAX} columns")
    if places and count * FIELD_BYTES_MIN > table.size_bytes:
        raise IpcError(f"has {count} columns in {table.size_bytes} bytes of metadata")
    return places


def _field(table: _Table, parent: int | None, per_parent: int | None, *, never_null: bool) -> tuple[_Field, int | None]:
    """A field, and how many values its children have per value of it."""
    name, kind, type_ = table.text(0), table.byte(2), table.table(3)
    if type_ is None:
        raise IpcError(f"has a column {name!r} without a type")
    if table.table(4) is not None or table.count(6):
        raise IpcError(f"has a column {name!r} with a dictionary or an extension type")
    if kind == _TIMESTAMP and type_.text(1) not in {"", _UTC}:
        # Polars looks for the zone, and panics with its name where there is none.
        raise IpcError(f"has a column {name!r} of a time zone other than {_UTC}")
    bits, inside = _bits(name, kind, type_), 1 if kind == _STRUCT else None
    if kind == _FIXED_LIST:
        inside = type_.scalar(0, _INT)
        if not 0 <= inside <= _FIXED_SIZE_MAX:
            raise IpcError(f"has a column {name!r} of arrays of length {inside}")
    return _Field(name, kind, bits, parent, per_parent, never_null, table.place(2) or 0), inside


def _bits(name: str, kind: int, type_: _Table) -> int:
    if kind in _BITS:
        return _BITS[kind]
    if kind not in _SIZED:
        raise IpcError(f"has a column {name!r} of a type that is not used here (number {kind} of Arrow)")
    find, known = _SIZED[kind]
    bits = find(type_)
    if bits not in known:
        raise IpcError(f"has a column {name!r} of a size that is not used here")
    return bits


def _decimal_bits(type_: _Table) -> int:
    precision, scale = type_.scalar(0, _INT), type_.scalar(1, _INT)
    return type_.scalar(2, _INT, 128) if 0 <= scale <= precision <= _DECIMAL_DIGITS_MAX and precision else 0


_BITS: Final = {
    **dict.fromkeys(
        (_NULL, _BINARY, _UTF8, _LIST, _STRUCT, _FIXED_LIST, _MAP, _LARGE_BINARY, _LARGE_UTF8, _LARGE_LIST), 0
    ),
    _BOOL: 1,
    _TIMESTAMP: 64,
    _DURATION: 64,
    _BINARY_VIEW: _VIEW_BITS,
    _UTF8_VIEW: _VIEW_BITS,
}
_SIZED: Final[dict[int, tuple[Callable[[_Table], int], Container[int]]]] = {
    _INTEGER: (lambda type_: type_.scalar(0, _INT), {8, 16, 32, 64, 128}),
    _FLOAT: (lambda type_: 16 << type_.scalar(0, _USHORT) % 16, {16, 32, 64}),
    _DECIMAL: (_decimal_bits, {32, 64, 128}),
    _DATE: (lambda type_: 0 if type_.scalar(0, _SHORT, 1) else 32, {32}),
    _TIME: (lambda type_: type_.scalar(1, _INT, 32), {32, 64}),
    _FIXED_BINARY: (lambda type_: type_.scalar(0, _INT) * 8, range(0, _FIXED_SIZE_MAX * 8, 8)),
}
"""How the size of a value is found in its type, and which sizes there are."""


# Batches.


def _check_batch(batch: _Table, body: memoryview, fields: tuple[_Field, ...]) -> tuple[int, int, int]:
    """The rows of a batch, what they take decoded, and what their text takes at most."""
    rows = batch.scalar(0, _LONG)
    count = batch.count(1)
    if not 0 <= rows <= NODE_LENGTH_MAX or count != len(fields):
        raise IpcError(f"has a batch of {rows} rows and {count} columns, and {len(fields)} columns are declared")
    nodes = list(batch.items(1, _PAIR))
    sizes, views = _buffer_sizes(batch, body), batch.items(4, _LONG)
    decoded_bytes, text_bytes_max = rows * ROW_BYTES_MIN, 0
    try:
        for field, (length, nulls) in zip(fields, nodes, strict=True):
            if field.parent is None:
                wanted: int | None = rows
            else:
                wanted = None if field.per_parent is None else field.per_parent * nodes[field.parent][0]
            nulls_max = 0 if field.never_null else length
            if not 0 <= nulls <= nulls_max <= NODE_LENGTH_MAX or wanted not in {None, length}:
                raise IpcError(f"has {length} values and {nulls} nulls in {field.name!r} of a batch of {rows} rows")
            fixed_bytes, text_bytes = _check_buffers(field, length, nulls, sizes, views)
            decoded_bytes += max(fixed_bytes + text_bytes, length * VALUE_BYTES_MIN)
            # A view holds up to 12 bytes itself; a longer one is of at most all the bytes that are there.
            shared = field.kind in _VIEWS
            text_bytes_max += length * max(text_bytes, _VIEW_BITS // 8) if shared else text_bytes
    except StopIteration:
        raise IpcError("has fewer buffers than its columns need") from None
    if next(sizes, None) is not None or next(views, None) is not None:
        raise IpcError("has more buffers than its columns need")
    return rows, decoded_bytes, text_bytes_max


def _buffer_sizes(batch: _Table, body: memoryview) -> Iterator[int]:
    """The decompressed size of each buffer. They follow each other, so that no byte is decompressed twice."""
    compressed = batch.table(3) is not None
    after = 0
    for offset, length in batch.items(2, _PAIR):
        if min(offset, length) < 0 or offset + length > len(body):
            raise IpcError(f"has a buffer of {length} bytes at {offset}, in a batch of {len(body)} bytes")
        if length and offset < after:
            raise IpcError(f"has a buffer of {length} bytes at {offset} that overlaps others")
        after = max(after, offset + length)
        if compressed and length:
            size = _at(_LONG, body[offset : offset + length], 0)
            length = length - _LONG.size if size == _STORED_AS_IT_IS else size  # noqa: PLW2901 - its true length
            if length < 0:
                raise IpcError(f"has a buffer that is to be decompressed to {length} bytes")
        yield length


def _check_buffers(
    field: _Field, length: int, nulls: int, sizes: Iterator[int], views: Iterator[tuple[int, ...]]
) -> tuple[int, int]:
    """Compare the buffers of a field with its number of values. Returns their sizes: of all but text, and of text."""
    if field.kind == _NULL:
        return length * ROW_BYTES_MIN, 0
    fixed_bytes = next(sizes)
    if nulls and fixed_bytes * 8 < length:
        raise _short(field)
    if field.kind in {_STRUCT, _FIXED_LIST}:
        return fixed_bytes, 0
    values = next(sizes)
    needed_bits = length * field.bits
    if field.kind in _OFFSET_BITS:
        needed_bits = (length + 1) * _OFFSET_BITS[field.kind] if length else 0
    if values * 8 < needed_bits:
        raise _short(field)
    fixed_bytes += values
    if field.kind in _VARIABLE:
        return fixed_bytes, next(sizes)
    if field.kind not in _VIEWS:
        return fixed_bytes, 0
    (count,) = next(views)
    if not 0 <= count <= NODE_LENGTH_MAX:
        raise IpcError(f"has {count} buffers of text in {field.name!r}")
    text_bytes = 0
    for _ in range(count):  # a generator would turn the end of `sizes` into another error
        text_bytes += next(sizes)
    return fixed_bytes, text_bytes


def _short(field: _Field) -> IpcError:
    return IpcError(f"has too few bytes for the values of {field.name!r}")
