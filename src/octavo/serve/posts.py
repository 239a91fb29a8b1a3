"""The routes that take a body: it is read, checked and handed to its route here, and the answer is sent.

FastAPI describes these routes (`/openapi.json`) and answers all other requests; its own way from a body to a
route is much of what a request would cost the server.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.responses import Response

from octavo.errors import OctavoError, shown
from octavo.serve.api_errors import ApiError, as_api_error, describe_validation
from octavo.serve.connected import ClientGone, Connected
from octavo.serve.protocol import Body

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

B = TypeVar("B", bound=Body)


class Posts:
    """Plain ASGI, below `guard.BodyLimit`, which gives a body as one message. What is no POST to one of the
    routes goes on to `app`. A route is cancelled when its client leaves, and aborts what it has submitted.
    """

    def __init__(self, app: ASGIApp, routers: Iterable[APIRouter]) -> None:
        """Takes the POST routes of `routers`: functions of a request and its `body` that give a response."""
        self.app = app
        self._routes: dict[str, tuple[APIRoute, type[Body]]] = {}
        for route in (route for router in routers for route in router.routes):
            if isinstance(route, APIRoute) and route.methods == {"POST"}:
                assert not route.dependencies, "nobody would ask them"
                assert not route.param_convertors, "a path is looked up as it stands"
                self._routes[route.path] = route, get_type_hints(route.endpoint)["body"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = None
        if scope["type"] == "http" and scope["method"] == "POST":
            # Under another application, or a proxy's prefix, the path begins with that.
            found = self._routes.get(scope["path"].removeprefix(scope.get("root_path", "")))
        if found is None:
            await self.app(scope, receive, send)
            return
        route, model = found
        scope["route"] = route
        content = (await receive())["body"]
        response: Response | None = None
        try:
            with Connected(receive):
                try:
                    body = read_body(content, Headers(scope=scope), model)
                    response = await route.endpoint(Request(scope, receive, send), body)
                except (ApiError, OctavoError) as error:
                    response = as_api_error(error).response()
                await response(scope, receive, send)
        except ClientGone:
            if response is None:
                await Response(status_code=499)(scope, receive, send)


def read_body(content: bytes, headers: Headers, model: type[B]) -> B:
    """The body of a request. ApiError (400) says what is wrong with it: with each of its fields, for some."""
    if not content:
        raise ApiError(400, "the body is empty; expected a JSON object")
    content_type = headers.get("content-type")
    if content_type is None or not _means_json(content_type):
        told = "none" if content_type is None else shown(content_type)
        raise ApiError(400, f"the Content-Type of the body must be application/json, got {told}")
    try:
        value = from_json(content)
    except ValueError:
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity":
            problem = f"the body cannot be read with Content-Encoding {shown(encoding)}"
            raise ApiError(400, f"{problem}; send it as plain JSON") from None
        value = _from_odd_json(content)
    try:
        return model.model_validate(value, from_attributes=True)
    except ValidationError as error:
        raise describe_validation(error.errors(include_url=False), value) from error


def _means_json(content_type: str) -> bool:
    kind, _, subkind = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subkind == "json" or subkind.endswith("+json")) and "/" not in subkind


def _from_odd_json(content: bytes) -> Any:
    """What the quick reader refuses: lone surrogates, UTF-16, deep nesting, and all that is no JSON."""
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        where = f"at line {error.lineno}, column {error.colno}"
        problem = f"the body is not valid JSON: {error.msg.removesuffix(' at')} {where}"
        raise ApiError(400, problem, code="invalid_json") from error
    except UnicodeError as error:
        problem = f"the body is not UTF-8: {getattr(error, 'reason', error)}"
    except RecursionError:
        problem = "the body is nested too deeply"
    except ValueError:
        problem = f"the body holds a number of more than {sys.get_int_max_str_digits()} digits; send fewer"
    raise ApiError(400, problem)
