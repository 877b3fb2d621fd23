"""A paho client as the source and the sink of `mqtt` need it: identity, credentials, TLS, and errors in words that a user knows."""

from __future__ import annotations

import hashlib
import select
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from paho.mqtt.client import Client, MQTTv5, MQTTv311
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from fordstone.connectors.mqtt.kind import MqttOptions, broker_address
from fordstone.errors import ConfigError
from fordstone.lang.duration import positive_us

if TYPE_CHECKING:
    from fordstone.connectors.base import OpenContext

CONNECT_SECONDS: Final = 10.0
INFLIGHT_MAX: Final = 1_000
"""Messages that are sent and not acknowledged, in either direction."""
PACKET_BYTES_MAX: Final = (16 << 20) + (1 << 17)
"""Of a message and its topic. A broker of MQTT 5 does not send larger ones."""
POLL_MS: Final = 100
READS_MAX: Final = 1_000
"""Packets that are read before anything else is done."""
CLIENT_ID_CHARS_MAX: Final = 64
MISUSED: Final = frozenset(
    {
        "Not authorized",
        "Bad user name or password",
        "Client identifier not valid",
        "Unsupported protocol version",
        "Banned",
        "Bad authentication method",
    }
)
"""Reasons for which a broker refuses that somebody has to do something about."""


class LostError(Exception):
    """The connection has ended."""


class RefusedError(Exception):
    """The broker has refused the connection or the subscription."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what}: {reason}")
        self.misused = reason in MISUSED


def client_id(options: MqttOptions, *parts: str) -> str:
    """Return the id under which the broker keeps the session: the same at each start of the step."""
    if options.client_id is not None:
        return options.client_id
    name = "-".join(("fordstone", *parts))
    digest = hashlib.sha256(f"{options.share}/{options.topics}/{name}".encode()).hexdigest()[:8]
    return f"{name[: CLIENT_ID_CHARS_MAX - 9]}-{digest}"


def make_client(options: MqttOptions, context: OpenContext, name: str, *, clean: bool, where: str) -> Client:
    """Make a client that is not connected. `ConfigError` if a secret or a certificate is missing."""
    v5 = options.version == "5"
    client = Client(
        CallbackAPIVersion.VERSION2,
        client_id=name,
        clean_session=None if v5 else clean,
        protocol=MQTTv5 if v5 else MQTTv311,
        manual_ack=True,
        reconnect_on_failure=False,
    )
    client.connect_timeout = CONNECT_SECONDS
    client.max_inflight_messages_set(INFLIGHT_MAX)
    client.max_queued_messages_set(0)
    if options.user is not None:
        client.username_pw_set(options.user, _secret(options.password, context, where))
    if options.tls:
        client.tls_set_context(_tls(options, where))
    return client


def connect(client: Client, options: MqttOptions, *, clean: bool, keepalive_s: int) -> None:
    """Open the connection and ask the broker; its answer is still to come. Raises `OSError`."""
    host, port = broker_address(options.broker, tls=options.tls)
    more: dict[str, Any] = {}
    if options.version == "5":
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]  # paho has none here
        properties.ReceiveMaximum = INFLIGHT_MAX
        properties.MaximumPacketSize = PACKET_BYTES_MAX
        if not clean:
            expiry_s = positive_us(options.session_expiry, what="session_expiry") // 1_000_000
            properties.SessionExpiryInterval = min(max(1, expiry_s), 0xFFFF_FFFE)
        more = {"clean_start": clean, "properties": properties}
    client.connect(host, port, keepalive_s, **more)


def exchange(client: Client, received: Callable[[], int], *, takes: bool = True) -> None:
    """Send and receive what there is now, or wait for it a little. `LostError` if the connection has ended.

    `received()`: a number that grows with what is received, so that reading goes on while there is more. Not `takes`: send only.
    """
    sock: Any = client.socket()
    if sock is None:
        raise LostError("the connection was closed")
    poll = select.poll()
    poll.register(sock, (select.POLLIN if takes else 0) | (select.POLLOUT if client.want_write() else 0))
    held = takes and hasattr(sock, "pending") and sock.pending() > 0
    events = sum(event for _, event in poll.poll(0 if held else POLL_MS))
    if events & select.POLLOUT:
        check(client.loop_write())
    if held or events & ~select.POLLOUT:
        for _ in range(READS_MAX):
            before = received()
            check(client.loop_read())
            if received() == before:
                break
    check(client.loop_misc())


def check(code: int) -> None:
    """Raise `LostError` for a return code of the client that is not 0."""
    if code:
        raise LostError(f"the connection was lost ({code!s})")


def _secret(name: str | None, context: OpenContext, where: str) -> str | None:
    if name is None:
        return None
    if name not in context.secrets:
        raise ConfigError(
            f"{where}: password={name!r} is the name of a secret, and there is no environment variable of that name here. Set it."
        )
    return context.secrets[name]


def _tls(options: MqttOptions, where: str) -> ssl.SSLContext:
    try:
        made = ssl.create_default_context(cafile=options.ca_file)
        if options.cert_file is not None:
            made.load_cert_chain(options.cert_file, options.key_file)
    except OSError as error:
        files = ", ".join(filter(None, (options.ca_file, options.cert_file, options.key_file)))
        raise ConfigError(
            f"{where}: the certificates ({files or 'of this system'}) cannot be read: {error}."
        ) from error
    return made
