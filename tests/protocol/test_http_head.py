"""Heads of HTTP requests: what is read, and what is rejected because two readers could understand it differently."""

from __future__ import annotations

from http import HTTPStatus

import pytest

from fordstone.protocol.http_head import Head, HeadError, parse_head, response_head

GET = b"GET / HTTP/1.1\r\n"


def test_a_head_is_read() -> None:
    raw = b"POST /a?b=c HTTP/1.1\r\nHost: x\r\nContent-Length: \t12 \r\nX-Empty:\r\nN: a:b\xff\r\n\r\n"
    headers = {"host": "x", "content-length": "12", "x-empty": "", "n": "a:b\xff"}
    assert parse_head(raw) == Head("POST", "/a", headers, True, 12)
    assert parse_head(GET + b"\r\n") == Head("GET", "/", {}, True, 0)


@pytest.mark.parametrize(
    "raw", [b"GET / HTTP/1.0\r\n\r\n", GET + b"Connection: Close\r\n\r\n", GET + b"connection: te, close\r\n\r\n"]
)
def test_a_client_may_send_one_request_alone(raw: bytes) -> None:
    assert not parse_head(raw).keeps_alive


def test_a_body_in_chunks_has_no_length() -> None:
    assert parse_head(GET + b"Transfer-Encoding: chunked\r\n\r\n").body_bytes is None


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"\r\n\r\n", "no request"),
        (b"GET /\r\n\r\n", "no request"),
        (b"GET  / HTTP/1.1\r\n\r\n", "no request"),
        (b"GET /a b HTTP/1.1\r\n\r\n", "no request"),
        (b"GET /\x00 HTTP/1.1\r\n\r\n", "no request"),
        (b"G(T / HTTP/1.1\r\n\r\n", "no request"),
        (b"GET / HTTP/2.0\r\n\r\n", "no request"),
        (GET + b"x: y\r\n" * 101 + b"\r\n", "no request"),
        (GET + b"content-length: 8\r\ntransfer-encoding: chunked\r\n\r\n", "and not both"),
        (GET + b"transfer-encoding: identity\r\nContent-Length: 0\r\n\r\n", "and not both"),
        (GET + b"content-length: 8\r\nContent-Length: 8\r\n\r\n", "there twice"),
        (GET + b"transfer-encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n", "there twice"),
        (GET + b"content-length : 8\r\n\r\n", "malformed"),
        (GET + b" content-length: 8\r\n\r\n", "malformed"),
        (GET + b"x: y\r\n\tcontinued\r\n\r\n", "malformed"),
        (GET + b"x: y\ncontent-length: 8\r\n\r\n", "malformed"),
        (GET + b"x: y\rcontent-length: 8\r\n\r\n", "malformed"),
        (GET + b"x: \x00\r\n\r\n", "malformed"),
        (GET + b": y\r\n\r\n", "malformed"),
        (GET + b"no colon\r\n\r\n", "malformed"),
        *((GET + b"content-length: %b\r\n\r\n" % length, "no number") for length in (b"+8", b"-8", b"8,8", b"0x8", b"\xb2", b"", b"9" * 13)),
    ],
)  # fmt: skip
def test_what_could_be_understood_in_two_ways_is_rejected(raw: bytes, says: str) -> None:
    with pytest.raises(HeadError, match=says):
        parse_head(raw)


def test_a_response_says_how_long_its_body_is_and_what_follows() -> None:
    head = response_head(HTTPStatus.ACCEPTED, b"{}", {"retry-after": "1"}, keeps_alive=True)
    assert head.split(b"\r\n") == [
        *(b"HTTP/1.1 202 Accepted", b"content-type: application/json", b"content-length: 2"),
        *(b"connection: keep-alive", b"retry-after: 1", b"", b""),
    ]
