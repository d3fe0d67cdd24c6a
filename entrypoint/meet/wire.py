"""Sends and receives authenticated messages over TCP: the protocol `apptrain-join/1`. `greet` opens a
connection, `Wire` is one of its ends.

The hub greets with the protocol's name and a nonce; the spoke answers with the same and a nonce of its own.
Each direction gets a key, made of both nonces and the join key. Every frame carries a MAC over its sequence
number and body. So the first frame proves that the sender holds the key, and a replayed, reflected, moved or
changed frame does not verify. Nothing is encrypted.

A frame is 4 bytes of body length (big-endian), 32 bytes of HMAC-SHA256, and a JSON object. The first frame
must be small: a stranger's is not read any further.
"""

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any

PROTOCOL = b"apptrain-join/1\n"
NONCE_BYTES = 32
MAC_BYTES = 32
MAX_BODY = 64 * 1024
FIRST_BODY = 8 * 1024
LINGER = 2.0
"""Seconds that a closing side waits for the other to read what was sent."""
_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False)


class WireError(Exception):
    """The peer broke the protocol; the text says how and names no address."""


class Closed(WireError):
    """The connection ended."""


class WrongKey(WireError):
    """A frame does not verify: another key, or a frame that is not the peer's next one."""


class Wire:
    """One end of a connection after the greetings. Sending never waits; what is sent is small."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, ours: bytes, theirs: bytes
    ) -> None:
        self._reader, self._writer = reader, writer
        self._ours, self._theirs = ours, theirs
        self._sent = self._received = 0
        self._ended = False
        self.heard = time.monotonic()
        """When the last valid frame came, on the monotonic clock."""

    def send(self, message: Mapping[str, object] | bytes) -> None:
        """Send one frame; nothing where the connection has ended. `message` may be one that is encoded, for
        many. ValueError: it is too large."""
        if self._ended or self._writer.is_closing():
            return
        body = message if isinstance(message, bytes) else encode(message)
        if len(body) > (bound := _bound(self._sent)):
            raise ValueError(f"a frame of {len(body)} bytes, at most {bound} are allowed")
        self._writer.write(len(body).to_bytes(4, "big") + _mac(self._ours, self._sent, body) + body)
        self._sent += 1

    async def receive(self) -> dict[str, Any]:
        """The next frame, which the peer's key and its place in the order have proved. WireError."""
        size = int.from_bytes(await self._exactly(4), "big")
        if size > (bound := _bound(self._received)):
            raise WireError(f"it sent a frame of {size} bytes, at most {bound} are allowed")
        rest = await self._exactly(MAC_BYTES + size)
        mac, body = rest[:MAC_BYTES], rest[MAC_BYTES:]
        if not hmac.compare_digest(mac, _mac(self._theirs, self._received, body)):
            raise WrongKey("it sent a frame that the join key does not verify")
        self._received += 1
        self.heard = time.monotonic()
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise WireError("it sent a frame that holds no JSON object")
        return message

    async def close(self) -> None:
        """End the connection once the peer has read everything, after LINGER seconds at most.

        A socket closed over unread input resets the connection and may take the last frames with it.
        """
        self._ended = True
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(LINGER):
                self._writer.write_eof()
                while await self._reader.read(MAX_BODY):
                    pass
        self.abort()

    def abort(self) -> None:
        """End the connection at once."""
        self._ended = True
        self._writer.transport.abort()

    async def _exactly(self, size: int) -> bytes:
        try:
            return await _exactly(self._reader, size)
        except Closed:
            self.abort()
            raise


def encode(message: Mapping[str, object]) -> bytes:
    return _JSON.encode(message).encode("utf-8", "surrogatepass")


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, *, hub: bool) -> Wire:
    """Exchange the greetings. The spoke speaks second, so that it tells a stranger nothing. WireError."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    if hub:
        writer.write(PROTOCOL + nonce)
    if await _exactly(reader, len(PROTOCOL)) != PROTOCOL:
        raise WireError(f"it does not speak {PROTOCOL.decode().strip()}")
    other = await _exactly(reader, NONCE_BYTES)
    if not hub:
        writer.write(PROTOCOL + nonce)
    nonces = nonce + other if hub else other + nonce
    hub_key, spoke_key = (
        hmac.digest(key, PROTOCOL + label + nonces, "sha256") for label in (b"hub", b"spoke")
    )
    ours, theirs = (hub_key, spoke_key) if hub else (spoke_key, hub_key)
    return Wire(reader, writer, ours=ours, theirs=theirs)


def set_options(sock: socket.socket) -> None:
    """What a connection of this protocol wants of TCP (a listening socket hands it on)."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _bound(sequence: int) -> int:
    return MAX_BODY if sequence else FIRST_BODY


def _mac(key: bytes, sequence: int, body: bytes) -> bytes:
    return hmac.digest(key, sequence.to_bytes(8, "big") + body, "sha256")


async def _exactly(reader: asyncio.StreamReader, size: int) -> bytes:
    try:
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise Closed("it closed the connection") from error
