"""A resolved job is kept, copied into reports and shown to others: nothing secret may stand in it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.errors import JobError

_SECRET_KEY = re.compile(r"(^|_)(password|passwd|secret|token|api_?key|psk|secret_key|access_key|credentials?)$", re.I)
_URL_PASSWORD = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@", re.I)


def refuse_secrets(values: Mapping[str, Any]) -> None:
    """Refuse a job that holds a password or an access token.

    Raises:
        JobError: naming the key, never the value.
    """
    for key, value in _texts(values):
        if not value:
            continue
        if _SECRET_KEY.search(key.rsplit(".", 1)[-1]):
            reason = "its name says that it is a secret"
        elif _URL_PASSWORD.search(value):
            reason = "its URL carries a password"
        else:
            continue
        raise JobError(
            f"a secret must not stand in a job, which is stored with the run and shown in reports: {reason}",
            key=key,
            hint="Remove it and hand it over in the environment or in the service's own credentials file.",
        )


def is_secret(name: str, value: str = "") -> bool:
    """Whether a name says that it holds a secret, or a value is a URL with a password."""
    return bool(_SECRET_KEY.search(name) or _URL_PASSWORD.search(value))


def _texts(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _texts(value, f"{key}.")
        elif isinstance(value, (list, tuple)):
            yield from ((key, item) for item in value if isinstance(item, str))
        elif isinstance(value, str):
            yield key, value
