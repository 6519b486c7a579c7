"""What is found at an address, whatever listens there: the right socket, names that are only shown, no endless wait."""

from __future__ import annotations

import http.server
import ipaddress
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

from routing_lab.errors import RuntimeUnsupportedError
from routing_lab.runtime import router
from routing_lab.runtime.report import (
    ListeningSocket,
    plain_address,
    reached,
    served_schedule,
    sockets_listening_on,
)
from routing_lab.runtime.router import served_at

Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


@contextmanager
def answering(answer: Answer) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def body(data: bytes) -> Answer:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def dripping(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(100):
        try:
            handler.wfile.write(b" ")
        except OSError:
            return
        time.sleep(0.1)


@pytest.mark.parametrize(
    "answer",
    [
        body(b""),
        body(bytes(range(256))),
        body(b"[" * 200_000),
        body(b"9" * 10_000),
        body(b'{"data": 5}'),
        body(b'{"data": [{"id": "model"}]}'),
        dripping,
    ],
    ids=["nothing", "rubbish", "deep", "long-number", "no-list", "one-server", "dripping"],
)
def test_what_does_not_answer_as_a_router_is_none(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "_ASK_S", 0.5)
    with answering(answer) as url:
        assert router._names(urlsplit(url)) is None


def test_a_process_that_ended_meanwhile_is_said_to_have_ended() -> None:
    with subprocess.Popen(["/bin/true"]) as done:  # not collected before the end of this block
        os.waitid(os.P_PID, done.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(RuntimeUnsupportedError, match=r"which serves one, has just ended"):
            served_schedule(done.pid, "which serves one")
    with pytest.raises(RuntimeUnsupportedError, match="has just ended"):
        served_schedule(done.pid, "which serves one")


def test_names_cannot_act_on_a_terminal() -> None:
    models = [{"id": "\x1b[31mred\nline", "status": {"value": "unloaded"}}]
    with answering(body(json.dumps({"data": models}).encode())) as url:
        assert router._names(urlsplit(url)) == ["\\x1b[31mred\\nline"]


def test_a_password_in_an_address_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [{"id": "one", "status": {"value": "unloaded"}}]
    monkeypatch.setattr(router, "program_of", lambda _process: "llama-server")
    with answering(body(json.dumps({"data": models}).encode())) as url:
        found = served_at(url.replace("//", "//user:secret@") + "/path/")
    assert found.url == f"{url}/path"
    assert "secret" not in found.how_to_load()


def test_a_server_at_another_address_of_the_same_port_is_not_taken_for_the_one_that_was_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
        with pytest.raises(RuntimeUnsupportedError, match=r"at 127\.0\.0\.2, only at 127\.0\.0\.1"):
            served_at(f"http://127.0.0.2:{port}")
        for same in ("127.0.0.1", "localhost", "0.0.0.0", "[::ffff:127.0.0.1]"):  # noqa: S104 - compared
            with pytest.raises(RuntimeUnsupportedError, match="does not run under the override library"):
                served_at(f"http://{same}:{port}")
        # No name is looked up, however it begins.
        with pytest.raises(RuntimeUnsupportedError, match="not this machine's loopback"):
            served_at(f"http://127.example:{port}")


def test_a_bound_address_comes_before_all_addresses() -> None:
    bound_to = ("0.0.0.0", "::", "127.0.0.1", "::1")  # noqa: S104 - compared
    everywhere, wide, here, six = (ListeningSocket(text, plain_address(text)) for text in bound_to)
    home = [plain_address("127.0.0.1")]
    assert reached([everywhere, here, six], home) == (here,)
    assert reached([everywhere, six], home) == (everywhere,)
    assert reached([wide, six], home) == (wide,)
    assert reached([six], home) == ()


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_kernels_table_is_read_with_its_addresses(family: socket.AddressFamily, host: str) -> None:
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with listener:
        (found,) = sockets_listening_on(listener.getsockname()[1])
    assert found.address == ipaddress.ip_address(host)
