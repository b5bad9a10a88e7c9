"""Plain HTTP to servers on this machine, without proxies."""

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

from kvpp_connect.errors import PeerError

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def is_healthy(url: str, *, timeout_s: float = 1.0) -> bool:
    """Whether a GET of `url` answers 200 in time."""
    try:
        with _OPENER.open(url, timeout=timeout_s) as response:
            return response.status == 200
    except (OSError, HTTPException):  # refused, timed out, an error status, half an answer
        return False


def get_text(url: str, *, timeout_s: float) -> str:
    """Body of a GET; raises PeerError."""
    return _read(urllib.request.Request(url), timeout_s).decode()


def post_json(url: str, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """Answer of a POST of one JSON object; raises PeerError."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        return json.loads(_read(request, timeout_s))
    except ValueError as error:
        raise PeerError(f"{url} did not answer with JSON: {error}") from error


def _read(request: urllib.request.Request, timeout_s: float) -> bytes:
    try:
        with _OPENER.open(request, timeout=timeout_s) as response:
            return response.read()
    except urllib.error.HTTPError as error:
        text = error.read(500).decode(errors="replace")
        raise PeerError(f"{request.full_url} answered {error.code}: {text}") from error
    except (OSError, HTTPException) as error:
        # While it connects, a time-out comes as the reason of another error.
        if isinstance(getattr(error, "reason", error), TimeoutError):
            late = f"{request.full_url} did not answer within {timeout_s:.0f} s"
            raise PeerError(late) from error
        raise PeerError(f"{request.full_url} gave no answer: {error}") from error
