"""A stream as a sink: a script on the server adds the rows of an epoch, and records them in the mark, in one step.

The mark is a key beside the stream, `STREAM:fordstone:PIPELINE.NODE.STEP`. It has the number of the newest epoch and who may write (rule 18). The
script is sent the mark that this writer believes in, and does nothing if the server has another: so neither an older writer, nor what arrives late
from a connection that was given up, adds anything. After a failure the mark says what the server has done.

An epoch that is too large for one step is added in several. The mark then says how many of its rows are there, with a digest of them, and the rest
follows when the epoch is released again.

Invariants: no rows are added without their record in the mark, nor twice; of two writers only one can add rows.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final

import msgspec
import polars as pl
import redis

from fordstone.connectors.base import (
    OpenContext,
    Sink,
    SinkDelayedError,
    SinkStream,
    judge_claim,
    later_output,
    owned_by_newer,
)
from fordstone.connectors.redis.kind import RedisSettings
from fordstone.connectors.redis.rows import RowEntries
from fordstone.connectors.redis.server import AwayError, Server
from fordstone.errors import SinkError
from fordstone.protocol.claim import SinkWriter

log = logging.getLogger(__name__)

STEP_ROWS_MAX: Final = 10_000
STEP_BYTES_MAX: Final = 8 << 20
"""Of the rows that one step adds: the server does nothing else meanwhile."""
ROW_BYTES_MAX: Final = 64 << 20
TRIES_MAX: Final = 10
"""How often a step is tried again because the mark has changed meanwhile."""
_ADD: Final = """
local mark = redis.call('GET', KEYS[2]) or ''
if mark ~= ARGV[1] then return {'mark', mark} end
local kind = redis.call('TYPE', KEYS[1])['ok']
if kind ~= 'stream' and kind ~= 'none' then return {'kind', kind} end
local at = 5
for _, length in ipairs(cmsgpack.unpack(ARGV[4])) do
    redis.call('XADD', KEYS[1], '*', unpack(ARGV, at, at + length - 1))
    at = at + length
end
if ARGV[3] ~= '' and kind == 'stream' then redis.call('XTRIM', KEYS[1], 'MAXLEN', '~', ARGV[3]) end
if ARGV[2] ~= mark then redis.call('SET', KEYS[2], ARGV[2]) end
return {'done', ARGV[2]}
"""


class SinkMark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a server has of a sink."""

    epoch: int
    """The newest epoch of which rows are there."""
    rows: int | None = None
    """How many of them, if more have to follow; None: all."""
    digest: str = ""
    """Of those rows."""
    writer: SinkWriter

    def has(self, epoch: int) -> bool:
        """Whether all rows of an epoch are there."""
        return self.epoch > epoch or (self.epoch == epoch and self.rows is None)


class RedisSink(Sink):
    """Writes one stream of rows into one stream of Redis."""

    def __init__(self, settings: RedisSettings, stream: SinkStream, context: OpenContext) -> None:
        self._settings = settings
        self._stream = stream
        self._key = settings.keys[0]
        self._mark_key = f"{self._key}:fordstone:" + ".".join(filter(None, (stream.pipeline, stream.node, stream.step)))
        self._entries = RowEntries(settings, stream.schema)
        self._server = Server(settings, context, fails=self._failure)
        self._text = b""
        """The mark as the server has it; empty: there is none."""
        self._certain = False
        """Whether that is known: no answer was lost since."""
        self._released = 0
        """The newest epoch that this sink has seen recorded."""
        try:
            with self._errors(SinkDelayedError):
                self._warn_of_losses()
                self._take()
        except BaseException:
            self._server.close()
            raise

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        """Add the rows of the epoch that are not there, and mark it. One without rows is marked, too."""
        entries = self._checked(self._entries.of(frame))
        with self._errors(SinkDelayedError):
            for _ in range(TRIES_MAX):
                mark = self._current()
                if mark is None or mark.epoch < epoch - 1:
                    self._certain = False  # another sink of this start may have released what is missing
                    mark = self._current()
                if self._is_released(mark, epoch, len(entries)):
                    break
                if self._add_rest(mark, epoch, entries):
                    break
            else:
                raise SinkDelayedError(
                    f"sink {self._stream.step}: other writers change {self._mark_key!r} all the time."
                )
        if self._text:
            self._released = max(self._released, epoch)

    def write(self, frame: pl.DataFrame) -> None:
        """Add rows now. A failure may leave some of them there."""
        entries = self._checked(self._entries.of(frame))
        with self._errors(ConnectionError):
            for step in _steps(entries) if entries else ():
                for _ in range(TRIES_MAX):
                    self._current()
                    if self._add(step, self._text):
                        break
                else:
                    raise AwayError(f"other writers change {self._mark_key!r} all the time.")

    def close(self) -> None:
        self._server.close()

    # The claim.

    def _take(self) -> None:
        """Take the stream over from earlier writers of this sink."""
        for _ in range(TRIES_MAX):
            mark = self._read()
            known = self._stream.resumes_after
            if self._stream.owner:
                found = [] if mark is None or not mark.writer.start else [mark.writer]
                judge_claim(self._settings.called, self._stream, found, lambda mark=mark: self._check_later(mark))  # type: ignore[misc]
            self._check_later(mark)
            if not self._stream.owner or (mark is None and known):
                return  # there is nothing to be claimed without saying which epochs the stream has
            claimed = (
                SinkMark(epoch=0, writer=self._stream.writer)
                if mark is None
                else msgspec.structs.replace(mark, writer=self._stream.writer)
            )
            if known is not None and claimed.epoch > known:
                log.warning(
                    "later epochs stay in the stream", extra={"stream": self._key, "epochs": claimed.epoch - known}
                )
                claimed = SinkMark(epoch=known, writer=self._stream.writer)
            if self._add([], msgspec.json.encode(claimed)):
                return
        raise SinkDelayedError(
            f"sink {self._stream.step}: other writers take {self._settings.called} over all the time."
        )

    def _check_later(self, mark: SinkMark | None) -> None:
        known = self._stream.resumes_after
        if known is None or mark is None or mark.epoch <= known or self._stream.discard_later:
            return
        raise later_output(
            self._settings.called,
            self._stream,
            range(known + 1, mark.epoch + 1),
            problem="rows in a stream are not taken back. Write to another stream; or start once with --discard-later-output (in Python: "
            "discard_later_output=True), which leaves those rows in the stream and numbers new ones after the state's epochs.",
            start_over=f"To start over with all input, remove the keys {self._key!r} and {self._mark_key!r}, and use --fresh.",
        )

    def _read(self) -> SinkMark | None:
        text = self._server.ask(lambda client: client.get(self._mark_key))
        self._text, self._certain = bytes(text or b""), True  # type: ignore[arg-type]
        return self._mark()

    def _mark(self) -> SinkMark | None:
        if not self._text:
            return None
        try:
            return msgspec.json.decode(self._text, type=SinkMark)
        except msgspec.DecodeError as error:
            raise self._failure(
                f"{self._settings.called}: the key {self._mark_key!r} has what this sink has not written. Remove it, or rename the sink."
            ) from error

    def _current(self) -> SinkMark | None:
        """The mark as the server has it. Raise if another writer has taken over."""
        mark = self._mark() if self._certain else self._read()
        if self._stream.owner and mark is not None and mark.writer != self._stream.writer:
            raise owned_by_newer(self._settings.called, self._stream, mark.writer)
        if self._released and (mark is None or mark.epoch < self._released):
            raise self._lost(f"recorded epoch {self._released}", mark)
        return mark

    def _is_released(self, mark: SinkMark | None, epoch: int, rows: int) -> bool:
        if mark is not None:
            if self._stream.owner and mark.epoch < epoch - 1:
                raise self._lost(f"confirmed epoch {epoch - 1}", mark)
            return mark.has(epoch)
        if epoch > (self._stream.resumes_after or 0) or not rows or self._settings.unmarked == "write":
            return False
        if self._settings.unmarked == "skip":
            log.warning("epoch taken for released", extra={"stream": self._key, "epoch": epoch})
            return True
        raise self._failure(
            f"epoch {epoch} was sealed before this start, and may have been released to {self._settings.called}, but the key {self._mark_key!r} that records "
            f"it is gone. Released again, its {rows:,} rows may be there twice. Nothing was written.\n"
            "See whether the newest rows of this pipeline are in the stream. Then set unmarked='skip' in redis_stream(...) if they are, or "
            "unmarked='write' if they are not, and remove it after this start."
        )

    # Rows.

    def _add_rest(self, mark: SinkMark | None, epoch: int, entries: Sequence[list[bytes]]) -> bool:
        """Add what is missing of an epoch. False: the mark is another one now."""
        there, digest = 0, hashlib.blake2b(digest_size=12)
        if mark is not None and mark.epoch == epoch and mark.rows is not None:
            there = mark.rows
            _add_to(digest, entries[:there])
            if there > len(entries) or mark.digest != digest.hexdigest():
                raise self._failure(
                    f"{self._settings.called} has {there:,} rows of epoch {epoch}, which are not those that are released now. It is the output of another "
                    "run. Remove them by hand, or write to another stream. Nothing was written."
                )
        for step in _steps(entries[there:]):
            there += len(step)
            whole = there == len(entries)
            _add_to(digest, step)
            mark = SinkMark(
                epoch=epoch,
                rows=None if whole else there,
                digest="" if whole else digest.hexdigest(),
                writer=self._stream.writer,
            )
            if not self._add(step, msgspec.json.encode(mark)):
                return False
        return True

    def _add(self, entries: Sequence[list[bytes]], mark: bytes) -> bool:
        """Add entries and set the mark, if it is the one that is known. If not, it is known afterwards."""
        self._certain = False
        trim = "" if self._settings.maxlen is None else str(self._settings.maxlen)
        lengths = msgspec.msgpack.encode([len(entry) for entry in entries])
        given: list[str | bytes] = [self._text, mark, trim, lengths, *chain.from_iterable(entries)]

        def question(client: redis.Redis) -> Any:
            return client.register_script(_ADD)(keys=(self._key, self._mark_key), args=given)

        outcome, answer = self._server.ask(question)
        if outcome == b"kind":
            raise self._failure(
                f"{self._settings.called}: the key {self._key!r} is a {answer.decode()}, and no stream. Name another, or remove it."
            )
        self._text, self._certain = answer, True
        return bool(outcome == b"done")

    def _checked(self, entries: list[list[bytes]]) -> list[list[bytes]]:
        for number, entry in enumerate(entries):
            if sum(map(len, entry)) > ROW_BYTES_MAX:
                raise self._failure(
                    f"row {number} has more than {ROW_BYTES_MAX >> 20} MiB, which is too much for an entry of a stream. Nothing of its epoch was written."
                )
        return entries

    # What is said.

    def _lost(self, what: str, mark: SinkMark | None) -> SinkError:
        has = "no record at all" if mark is None else f"epoch {mark.epoch}"
        return self._failure(
            f"{self._settings.server} had {what} in {self._mark_key!r}, and has {has} now: it has lost data. It was restored from an older copy, or did "
            "not write all to disk before it crashed (set appendonly yes and appendfsync always), or a replica took over that lagged.\n"
            "Rows of earlier epochs are missing in the stream. Nothing was written. Bring the server's data back; or write to another stream with --fresh."
        )

    def _warn_of_losses(self) -> None:
        """Log if the server may forget what it has confirmed. One that does not say is left alone."""

        def question(client: redis.Redis) -> list[Any]:
            with client.pipeline(transaction=False) as asked:
                for name in ("appendonly", "appendfsync", "maxmemory-policy"):
                    asked.execute_command("CONFIG GET", name)
                return asked.execute(raise_on_error=False)

        found = [one[1].decode() if isinstance(one, list) and one else "" for one in self._server.ask(question)]
        log_on, fsync, policy = found
        if log_on == "no" or (fsync and fsync != "always"):
            log.warning("redis may lose epochs when it crashes", extra={"appendonly": log_on, "appendfsync": fsync})
        if policy.startswith("allkeys"):
            log.warning("redis may evict the stream", extra={"maxmemory-policy": policy})

    def _failure(self, text: str) -> SinkError:
        return SinkError(f"sink {self._stream.step}: {text}")

    @contextmanager
    def _errors(self, delayed: type[Exception]) -> Iterator[None]:
        """Say of a server that is away what the engine does then."""
        try:
            yield
        except AwayError as error:
            raise delayed(f"sink {self._stream.step}: {error}") from error


def _steps(entries: Sequence[list[bytes]]) -> Iterator[Sequence[list[bytes]]]:
    """Cut entries into what is added in one step. Without entries there is one step."""
    begun = size = 0
    for number, entry in enumerate(entries):
        more = sum(map(len, entry))
        if number > begun and (size + more > STEP_BYTES_MAX or number - begun >= STEP_ROWS_MAX):
            yield entries[begun:number]
            begun, size = number, 0
        size += more
    yield entries[begun:]


def _add_to(digest: hashlib.blake2b, entries: Sequence[list[bytes]]) -> None:
    """Add entries to a digest, which does not depend on how they were cut into steps."""
    digest.update(b"".join(map(msgspec.msgpack.encode, entries)))
