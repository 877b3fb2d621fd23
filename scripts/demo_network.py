"""The network of one gateway: a proxy that forwards bytes to the hub, counts them, and can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import threading

CHUNK_BYTES = 1 << 16


class Network:
    """Listens on its own port. `cut` aborts every connection and rejects new ones until `restore`."""

    def __init__(self, hub_port: int) -> None:
        self.sent_bytes = 0
        """All bytes from the gateway to the hub: rows, state and HTTP headers."""
        self.bytes_per_s: float | None = None
        """How much the gateway may send; None: as much as it can."""
        self._hub_port = hub_port
        self._whole = True
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self.port = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait()

    def cut(self) -> None:
        self._whole = False
        self._loop.call_soon_threadsafe(self._break_all)

    def restore(self) -> None:
        self._whole = True

    def close(self) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def _break_all(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._whole:
            writer.transport.abort()
            return
        try:
            hub_reader, hub_writer = await asyncio.open_connection("127.0.0.1", self._hub_port)
        except OSError:
            writer.transport.abort()  # the hub is down
            return
        self._open |= {writer, hub_writer}
        try:
            await asyncio.gather(self._pass(reader, hub_writer, counts=True), self._pass(hub_reader, writer))
        finally:
            self._open -= {writer, hub_writer}

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool = False) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if counts:
                    self.sent_bytes += len(data)
                    if self.bytes_per_s is not None:
                        await asyncio.sleep(len(data) / self.bytes_per_s)
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()
