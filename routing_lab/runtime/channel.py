"""The line between the lab and the model's process: JSON messages over a socket pair, one reply for each request.

======================  =================================================================  ============================
request ``do``          fields                                                             reply
======================  =================================================================  ============================
``load``                those of ``engine.LoadSpec``                                       ``engine.Loaded``
``switch``              ``experts``: "0-6:6,7-32:5" or "" | ``uniform``: count or null     ``engine.Switched``
``generate``            ``prompt``, ``max_tokens``, ``stop``, ``margins``                  those of ``base.Generation``
``verify``              ``drafts``, ``stop``, ``tie_margin``                               ``verified``: a list
``decode_timing``       ``tokens``, ``prompt_tokens``                                      ``base.DecodeTiming``
``render_chat``         ``user``, ``thinking``: true, false or null                        ``text``
``logits``              ``prompt``                                                         ``float32``: hex text
======================  =================================================================  ============================

A reply is ``{"ok": {...}}`` or ``{"error": {"kind": KIND, "message": TEXT}}``, where the kind tells the parent which
exception to raise: ``usage`` (``UsageError``), ``unsupported`` (``RuntimeUnsupportedError``) or ``failure``
(``RuntimeFailureError``: the state of the process cannot be trusted any more). There is no message for the end: a
closed line means that the other side is gone, and the model's process ends itself then.
"""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["ERROR_KINDS", "Message", "receive", "send"]

from routing_lab.errors import RoutingLabError, RuntimeFailureError, RuntimeUnsupportedError, UsageError

Message = dict[str, Any]

ERROR_KINDS: dict[str, type[RoutingLabError]] = {
    "usage": UsageError,
    "unsupported": RuntimeUnsupportedError,
    "failure": RuntimeFailureError,
}


def send(connection: Connection, message: Message) -> None:
    """Send one message; ``OSError`` when the other side is gone."""
    connection.send_bytes(json.dumps(message, allow_nan=False).encode())


def receive(connection: Connection) -> Message:
    """Wait for one message; ``EOFError`` when the other side is gone."""
    message: Message = json.loads(connection.recv_bytes())
    return message
