"""What a hub is measured against: a bare SQLite file that is synced with every transaction, and a bare receiver of files."""

from __future__ import annotations

import os
import random
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

CHUNK_BYTES = 1 << 20
_NUMBER_BYTES = 8


def synced_transactions_per_s(directory: Path, *, seconds: float, row_bytes: int) -> float:
    """One transaction after the other, each with one row and a sync of its own, in the journal mode that the hub has."""
    database = sqlite3.connect(directory / "bound.sqlite", isolation_level=None)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, data BLOB)")
        data = random.Random(0).randbytes(row_bytes)
        count, began_s = 0, time.monotonic()
        while (now_s := time.monotonic()) < began_s + seconds:
            database.execute("BEGIN IMMEDIATE")
            database.execute("INSERT INTO rows (data) VALUES (?)", (data,))
            database.execute("COMMIT")
            count += 1
        return count / (now_s - began_s)
    finally:
        database.close()


# Files over a socket. One process receives, this one sends; both sides of the comparison send alike.


def send_to_receiver(netloc: tuple[str, int], files: Sequence[Path], lines: int) -> float:
    """Seconds until the receiver has written and synced all files."""

    def send(line: socket.socket, path: Path) -> None:
        with path.open("rb") as file:
            line.sendall(path.stat().st_size.to_bytes(_NUMBER_BYTES))
            line.sendfile(file)
        if line.recv(1) != b"k":
            raise ConnectionError("the receiver failed")

    return _sent(netloc, files, lines, send)


def send_to_hub(netloc: tuple[str, int], files: Sequence[Path], lines: int) -> float:
    """Seconds until the hub has acknowledged all files, which are called by their digests."""

    def send(line: socket.socket, path: Path) -> None:
        head = f"PUT /v1/blobs/{path.name} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {path.stat().st_size}\r\n\r\n"
        with path.open("rb") as file:
            line.sendall(head.encode())
            line.sendfile(file)
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += line.recv(CHUNK_BYTES)
        if not answer.startswith(b"HTTP/1.1 201"):
            raise ConnectionError(f"the hub answered {answer[:200]!r}")

    return _sent(netloc, files, lines, send)


def _sent(
    netloc: tuple[str, int], files: Sequence[Path], lines: int, send: Callable[[socket.socket, Path], None]
) -> float:
    failures: list[BaseException] = []

    def work(share: Sequence[Path]) -> None:
        try:
            with socket.create_connection(netloc) as line:
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for path in share:
                    send(line, path)
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(files[number::lines],)) for number in range(lines)]
    began_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return time.monotonic() - began_s


def receive(directory: Path) -> None:
    """What the other process does: write what comes to files, sync each, say so. Looks at nothing."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)

    def serve(line: socket.socket, number: int) -> None:
        buffer, count = memoryview(bytearray(CHUNK_BYTES)), 0
        with line:
            while head := line.recv(_NUMBER_BYTES, socket.MSG_WAITALL):
                left, count = int.from_bytes(head), count + 1
                path = directory / f"{number}-{count}"
                fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
                while left and (got := line.recv_into(buffer[: min(left, CHUNK_BYTES)])):
                    os.write(fd, buffer[:got])
                    left -= got
                os.fsync(fd)
                os.close(fd)
                line.sendall(b"k")
                path.unlink()

    number = 0
    while True:
        line, _ = listener.accept()
        number += 1
        threading.Thread(target=serve, args=(line, number), daemon=True).start()


if __name__ == "__main__":
    receive(Path(sys.argv[1]))
