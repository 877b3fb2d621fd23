"""A paho client as the source and the sink of `mqtt` need it: identity, credentials, TLS, and errors in words that a user knows."""

from __future__ import annotations

import hashlib
import select
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from paho.mqtt.client import Client, MQTTv5, MQTTv311
from paho.mqtt.enums import CallbackAPIVersion, LogLevel
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
    """The broker has refused the connection or the subscription, or was refused because of its certificate."""

    def __init__(self, what: str, reason: str, *, advice: str | None = None) -> None:
        """`advice`: what to do, if waiting does not mend it."""
        super().__init__(f"{what}: {reason}")
        self.advice = advice or ("Check user, password and the broker's rights." if reason in MISUSED else None)


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
    client.on_log = _note_error
    return client


def connect(client: Client, options: MqttOptions, *, clean: bool, keepalive_s: int) -> None:
    """Open the connection and ask the broker; its answer is still to come. Raises `OSError` and `RefusedError`."""
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
    try:
        client.connect(host, port, keepalive_s, **more)
    except ssl.SSLEOFError:
        raise  # it may have ended at this moment
    except ssl.SSLCertVerificationError as error:
        advice = (
            "Check that broker= has a name that is in its certificate, and that ca_file= is the authority that has signed it "
            "(without ca_file=, those of this system)."
        )
        raise RefusedError(
            f"the certificate of {options.broker} is not valid", error.verify_message.rstrip("."), advice=advice
        ) from error
    except ssl.SSLError as error:
        advice = "Check that its port is the one for TLS, and which versions of TLS it takes."
        raise RefusedError(f"broker {options.broker} does not speak TLS here", str(error), advice=advice) from error


def exchange(client: Client, received: Callable[[], int], *, takes: bool = True) -> None:
    """Send and receive what there is now, or wait for it a little. `LostError` if the connection has ended.

    `received()`: a number that grows with what is received, so that reading goes on while there is more. Not `takes`: send only.
    """
    sock: Any = client.socket()
    if sock is None:
        raise _ended(client, "closed")
    poll = select.poll()
    poll.register(sock, (select.POLLIN if takes else 0) | (select.POLLOUT if client.want_write() else 0))
    held = takes and hasattr(sock, "pending") and sock.pending() > 0
    events = sum(event for _, event in poll.poll(0 if held else POLL_MS))
    if events & select.POLLOUT:
        check(client.loop_write(), client)
    if held or events & ~select.POLLOUT:
        for _ in range(READS_MAX):
            before = received()
            check(client.loop_read(), client)
            if received() == before:
                break
    check(client.loop_misc(), client)


def check(code: int, client: Client) -> None:
    """Raise `LostError` for a return code of the client that is not 0, or `RefusedError` if the broker does not accept its certificate."""
    if code:
        raise _ended(client, str(code))


def _ended(client: Client, why: str) -> LostError | RefusedError:
    problem = client.user_data_get() or ""
    advice = "Check cert_file= and key_file=: the broker may want a certificate, or one of another authority."
    if "_ALERT_" in problem:
        return RefusedError("the broker has refused the TLS connection", problem, advice=advice)
    if "EOF occurred" in problem and not client.is_connected():
        # So ends the connection to a broker that wants a certificate and does not wait for its alert to arrive; or to a proxy whose broker is away.
        return LostError(f"it has ended the TLS connection before it answered. {advice}")
    return LostError(f"the connection was lost ({problem or why})")


def _note_error(client: Client, userdata: object, level: int, text: str) -> None:
    """Keep what went wrong with the connection: calls of the client return a code alone."""
    del userdata
    if level == LogLevel.MQTT_LOG_ERR:
        client.user_data_set(text)


def _secret(name: str | None, context: OpenContext, where: str) -> str | None:
    if name is None:
        return None
    if name not in context.secrets:
        raise ConfigError(
            f"{where}: password={name!r} is the name of a secret, and there is no environment variable of that name here. Set it."
        )
    return context.secrets[name]


class _TlsSocket(ssl.SSLSocket):
    """Is closed if the handshake fails: paho forgets it then."""

    def do_handshake(self, block: bool = False) -> None:  # noqa: FBT001, FBT002 - as it is overridden
        try:
            super().do_handshake(block)
        except OSError:
            self.close()
            raise


def _tls(options: MqttOptions, where: str) -> ssl.SSLContext:
    try:
        made = ssl.create_default_context(cafile=options.ca_file)
        made.sslsocket_class = _TlsSocket
        if options.cert_file is not None:
            made.load_cert_chain(options.cert_file, options.key_file)
    except OSError as error:
        files = ", ".join(filter(None, (options.ca_file, options.cert_file, options.key_file)))
        raise ConfigError(
            f"{where}: the certificates ({files or 'of this system'}) cannot be read: {error}."
        ) from error
    return made
