"""Keep secrets out of what is printed and written: messages, results, trackers' settings."""

from __future__ import annotations

import os
import re
import sys
import traceback

HIDDEN = "***"
# Environment variables whose values are secrets: HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY, …
# but not TOKENIZERS_….
SECRET_NAME = re.compile(
    r"TOKEN(?!IZER)|SECRET|PASSW|CREDENTIAL|APIKEY|(^|_)KEY($|_)", re.IGNORECASE
)
SHORTEST = 8  # characters of a value that is looked for; "true" and "1" are in every text
IN_URL = re.compile(
    r"(\b[a-z][a-z0-9+.-]*://)[^\s/?#'\"]*@", re.IGNORECASE
)  # https://user:password@host
HF_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")


def redact(text: str) -> str:
    """The text with *** in place of credentials in URLs, Hugging Face tokens, and values of secret
    environment variables.
    """
    named = {
        value
        for name, value in os.environ.items()
        if SECRET_NAME.search(name) and len(value) >= SHORTEST
    }
    secrets = {
        value for value in named if not os.path.isabs(value) or not os.path.exists(value)
    }  # HF_TOKEN_PATH is a place
    for secret in sorted(secrets, key=len, reverse=True):  # one may be a part of another
        text = text.replace(secret, HIDDEN)
    return HF_TOKEN.sub(HIDDEN, IN_URL.sub(rf"\1{HIDDEN}@", text))


def print_traceback(error: BaseException) -> None:
    """The traceback on stderr, without secrets."""
    print(redact("".join(traceback.format_exception(error))), file=sys.stderr, end="", flush=True)
