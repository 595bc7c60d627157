"""Secrets do not appear in messages."""

import threading

import pytest
from conftest import PROJECT

REDACTED = {
    "https://user:canary@host/path": "https://***@host/path",
    "HTTPS://canary@host": "HTTPS://***@host",
    "two http://a:canary@x and socks5h://b:canary@y": "two http://***@x and socks5h://***@y",
    "http://a:can/ary@x": "http://a:can/ary@x",  # a path: / cannot be part of a password in a URL
    "https://huggingface.co/api": "https://huggingface.co/api",
    "mail@example.org": "mail@example.org",
    "token=hf_CANARYcanaryCANARYcanary": "token=***",
    "hf_home": "hf_home",
    "the value the-canary-of-my-key!": "the value ***!",
    "true 1 short": "true 1 short",
    f"{PROJECT}/runs cannot be written": f"{PROJECT}/runs cannot be written",
}


@pytest.mark.attack
@pytest.mark.parametrize("text", REDACTED)
def test_redact(monkeypatch, text):
    from support.errors import redact

    monkeypatch.setenv("MY_KEY", "the-canary-of-my-key")
    monkeypatch.setenv("OTHER_TOKEN", "short")
    monkeypatch.setenv(
        "GOOGLE_APPLICATION_CREDENTIALS", str(PROJECT)
    )  # a place, which is no secret
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "https://huggingface.co/api")
    assert redact(text) == REDACTED[text]


@pytest.mark.attack
def test_a_hub_that_asks_for_a_password_answers():
    from http.server import BaseHTTPRequestHandler, HTTPServer

    from support.cli.hub import answers

    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    threading.Thread(target=server.handle_request, daemon=True).start()
    assert answers(f"http://user:canary@127.0.0.1:{server.server_port}/a@b")
    server.server_close()
