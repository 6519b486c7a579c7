"""Starts llama-server (or its router) as a user would, asks it, and ends it with everything that it started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

START_S = 60.0
END_S = 20.0
PROMPT = {"prompt": "Q: 347+86=?\n", "n_predict": 64, "temperature": 0}


def with_server_on_path(binary: Path, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment in which ``llama-server`` is ``binary``, and nothing of the lab's is set."""
    env = os.environ if env is None else env
    kept = {key: value for key, value in env.items() if not key.startswith(("ROUTING_LAB_", "LLAMA_ARG_"))}
    return {**kept, "PATH": f"{binary.parent}{os.pathsep}{kept['PATH']}"}


@contextlib.contextmanager
def serving(
    command: Sequence[str], port: int, log: Path, *, env: Mapping[str, str], cwd: Path | None = None
) -> Iterator[str]:
    """Run ``command`` until it answers on ``port``; gives its URL. Its whole session is ended afterwards."""
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env=env, cwd=cwd, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                ask(f"{url}/health")
                break
            assert server.poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < deadline, log.read_text(errors="replace")
            time.sleep(0.05)
        yield url
    finally:
        server.terminate()  # a router ends its servers
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def ask(url: str, body: dict[str, object] | None = None, key: str = "") -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(url, data, headers)  # noqa: S310 - loopback
    with urllib.request.urlopen(request, timeout=60) as reply:  # noqa: S310 - loopback
        answer: dict[str, Any] = json.load(reply)
    return answer


def complete(url: str, key: str = "", **more: object) -> str:
    """What the server says to the demo model's first kind of task."""
    text: str = ask(f"{url}/completion", {**PROMPT, **more}, key)["content"]
    return text
