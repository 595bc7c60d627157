"""Secrets do not appear in messages."""

import pytest
from conftest import PROJECT

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
