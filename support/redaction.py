"""Remove secrets from what is printed and written: messages, results, settings of trackers."""

from __future__ import annotations

import os
import re
import sys
import traceback

HIDDEN = "***"
# Names of environment variables whose values are secrets: HF_TOKEN, WANDB_API_KEY,
# AWS_SECRET_ACCESS_KEY, …; not TOKENIZERS_….
SECRET_NAME = re.compile(
    r"TOKEN(?!IZER)|SECRET|PASSW|CREDENTIAL|APIKEY|(^|_)KEY($|_)", re.IGNORECASE
)
SHORTEST = 8  # characters; shorter values, such as "true" and "1", occur in every text
# https://user:password@host
IN_URL = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/?#'\"]*@", re.IGNORECASE)
HF_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")


def redact(text: str) -> str:
    """Replace secrets in a text by ***.

    Secrets are credentials in URLs, Hugging Face tokens, and values of environment variables whose
    names match `SECRET_NAME`.
    """
    secrets = (value for name, value in os.environ.items() if SECRET_NAME.search(name))
    for secret in sorted(secrets, key=len, reverse=True):  # one may contain another
        # HF_TOKEN_PATH holds a path, which is no secret.
        if len(secret) >= SHORTEST and not (os.path.isabs(secret) and os.path.exists(secret)):
            text = text.replace(secret, HIDDEN)
    return HF_TOKEN.sub(HIDDEN, IN_URL.sub(rf"\1{HIDDEN}@", text))


def redact_value(value):
    """Replace secrets in a text, or in each text of a list; return any other value unchanged."""
    if isinstance(value, list):
        return [redact_value(item) for item in value]
    return redact(value) if isinstance(value, str) else value


def print_traceback(error: BaseException) -> None:
    """Print the traceback of `error` on stderr, without secrets."""
    print(redact("".join(traceback.format_exception(error))), file=sys.stderr, end="", flush=True)
