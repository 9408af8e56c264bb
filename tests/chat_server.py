"""A chat endpoint on the loopback address that answers as a test tells it to: well, badly, or not at all.

`server.script` holds what the next requests get, `server.default` what all others get. Each is a function of the
connection's handler and the request; the factories here make the usual ones.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass(frozen=True)
class Seen:
    """A request as it arrived; names of headers in small letters."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


Behaviour = Callable[["_Handler", Seen], None]


class ChatServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.script: deque[Behaviour] = deque()
        self.default: Behaviour = good()
        self.requests: list[Seen] = []
        self.connections: list[socket.socket] = []
        self.closing = threading.Event()
        self.lock = threading.Lock()

    def close(self) -> None:
        """Hang up on everybody: a handler that is left waiting for a next request holds up the end of the process."""
        self.closing.set()
        self.shutdown()
        self.server_close()
        for connection in self.connections:
            with suppress(OSError):  # hung up already
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: Any) -> None:
        """A client that has hung up is what some tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.server.connections.append(self.connection)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        seen = Seen(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
        with self.server.lock:
            self.server.requests.append(seen)
            behaviour = self.server.script.popleft() if self.server.script else self.server.default
        behaviour(self, seen)

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        named = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
        self.send_response(status)
        for name, value in named.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""


def completion(text: Any = "the cat", reason: Any = "stop", **more: Any) -> dict[str, Any]:
    """The JSON of a good answer; `more` replaces its other entries."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": "tiny-1",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}],
        "usage": {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18},
        **more,
    }


def good(text: str | Callable[[Seen], str] = "the cat", *, seconds: float = 0.0, **more: Any) -> Behaviour:
    """A complete answer, after so many seconds."""

    def answer(handler: _Handler, seen: Seen) -> None:
        time.sleep(seconds)
        written = text(seen) if callable(text) else text
        handler.send(200, json.dumps(completion(written, **more)).encode())

    return answer


def status(code: int, body: bytes = b'{"error": {"message": "no"}}', **headers: str) -> Behaviour:
    """An error; in names of headers an underscore stands for a dash."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler, seen: handler.send(code, body, named)


def plain(body: bytes, kind: str = "application/json") -> Behaviour:
    """Status 200 with this body."""
    return lambda handler, seen: handler.send(200, body, {"content-type": kind})


def echo(code: int) -> Behaviour:
    """Repeats what it was sent, the key included, as some proxies do."""

    def answer(handler: _Handler, seen: Seen) -> None:
        told = f"you sent {seen.headers['authorization']} and {json.dumps(seen.body)}"
        body = completion(told) if code == 200 else {"error": {"message": told, "code": told}}
        handler.send(code, json.dumps(body).encode())

    return answer


def cut(handler: _Handler, seen: Seen) -> None:
    """Promises more than it sends."""
    handler.send_response(200)
    handler.send_header("content-length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [{"message": {"content": "the c')
    handler.close_connection = True


def drop(handler: _Handler, seen: Seen) -> None:
    """Hangs up without a word."""
    handler.close_connection = True


def noise(handler: _Handler, seen: Seen) -> None:
    """No HTTP at all."""
    handler.wfile.write(b"\x00\xff\xfe noise \r\n\r\n\x07")
    handler.close_connection = True


def silence(handler: _Handler, seen: Seen) -> None:
    """Nothing, for as long as the test lasts."""
    handler.server.closing.wait(30)
    handler.close_connection = True


@pytest.fixture
def chat_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    for name in ("NO_PROXY", "no_proxy"):  # a proxy of the machine has no business with the loopback address
        monkeypatch.setenv(name, "127.0.0.1")
    server = ChatServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.close()
    thread.join()
