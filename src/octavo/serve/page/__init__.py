"""The built-in page at ``/`` and its files. Nothing is built: what lies here is what the browser gets.

`vendor/` holds marked (Markdown to HTML) and DOMPurify (HTML to safe HTML) as published, with their licences.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from typing import Final, NamedTuple

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

router = APIRouter(include_in_schema=False)

CONTENT_SECURITY_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""The page talks to its own server and to nobody else, whatever an answer of the model holds."""

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class _File(NamedTuple):
    content: bytes
    media_type: str
    etag: str


@router.get("/")
async def index(request: Request) -> Response:
    """The page."""
    return _answer(request, "index.html")


@router.get("/page/{name}")
async def file(request: Request, name: str) -> Response:
    """One of the page's files."""
    return _answer(request, name)


def _answer(request: Request, name: str) -> Response:
    found = _files().get(name)
    if found is None:
        raise HTTPException(404)
    headers = {
        "Content-Security-Policy": CONTENT_SECURITY_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",  # asked again each time, answered 304 while nothing changed
        "ETag": found.etag,
    }
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)


@cache
def _files() -> dict[str, _File]:
    """All files, read once: a request picks one of these names and never touches the disk."""
    here = resources.files(__name__)
    found = {}
    for folder in (here, here / "vendor"):
        for entry in folder.iterdir():
            media_type = _TYPES.get("." + entry.name.rpartition(".")[2])
            if media_type is not None and entry.is_file():
                content = entry.read_bytes()
                etag = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
                found[entry.name] = _File(content, media_type, etag)
    return found
