"""What the lean profile's port answers, as bytes of HTTP/1.1: see lean.py."""

from __future__ import annotations

import json
from http import HTTPStatus

from picker.names import DESTINATION, REFUSAL, REFUSED, RETRY_AFTER, SPLICE
from picker.refusal import Refusal
from picker.splice import ModelRewrite, Splice

PICKED = f"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n{DESTINATION}: ".encode()
END = b"\r\n\r\n"
LAST = b"\r\nconnection: close\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
READY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
NOT_READY = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def splice_header(usage: Splice | None, rewrite: ModelRewrite | None) -> str:
    """The header by which Envoy changes the body and undoes it in the answer, for splice.lua."""
    if usage is None and rewrite is None:
        return ""
    name = "" if rewrite is None else json.dumps(rewrite.asked).replace("\x7f", "\\u007f")
    splices = [] if usage is None else [usage]
    if rewrite is not None:
        splices.append(rewrite.splice)
    told = f"\r\n{SPLICE}: {int(usage is not None)} {len(name)} {name}"
    for splice in sorted(splices):
        told += f"{splice.offset} {splice.drop} {len(splice.text)} {splice.text.decode('ascii')}"
    return told


def refused(refusal: Refusal, end: bytes, *, no_body: bool) -> bytes:
    body = refusal.body
    if refusal.status != HTTPStatus.SERVICE_UNAVAILABLE:
        lines = [f"HTTP/1.1 {refusal.status.value} {refusal.status.phrase}"]
        lines += [f"{name}: {value}" for name, value in refusal.headers]
        lines.append(f"content-length: {len(body)}")
        return "\r\n".join(lines).encode("latin-1") + end + (b"" if no_body else body)
    # ASCII, so that it passes as a header; DEL is all that JSON leaves of the control characters.
    text = json.dumps(json.loads(body)).replace("\x7f", "\\u007f")
    lines = ["HTTP/1.1 200 OK", "content-length: 0", f"{REFUSED}: {refusal.reason}"]
    lines.append(f"{REFUSAL}: {text}")
    if refusal.retry_after is not None:
        lines.append(f"{RETRY_AFTER}: {refusal.retry_after}")
    return "\r\n".join(lines).encode("ascii") + end
