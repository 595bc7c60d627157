"""Secrets do not appear in messages."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from conftest import PROJECT

from support.cli.hub import answers
from support.errors import redact

REDACTED = {
    "https://user:canary@host/path": "https://***@host/path",
    "two http://a:canary@x and socks5h://b:canary@y": "two http://***@x and socks5h://***@y",
    "https://huggingface.co/api": "https://huggingface.co/api",
    "token=hf_CANARYcanaryCANARYcanary": "token=***",
    "the value the-canary-of-my-key!": "the value ***!",
    f"{PROJECT}/runs cannot be written": f"{PROJECT}/runs cannot be written",
}


@pytest.mark.attack
def test_secrets_are_redacted(monkeypatch):
    monkeypatch.setenv("MY_KEY", "the-canary-of-my-key")
    # A place, which is no secret.
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(PROJECT))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "https://huggingface.co/api")
    assert {text: redact(text) for text in REDACTED} == REDACTED


@pytest.mark.attack
def test_a_hub_that_asks_for_a_password_answers():
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    threading.Thread(target=server.handle_request, daemon=True).start()
    assert answers(f"http://user:canary@127.0.0.1:{server.server_port}/a@b")
    server.server_close()
