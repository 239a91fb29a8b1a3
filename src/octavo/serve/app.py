"""The application: every route, around one engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.middleware.errors import ServerErrorMiddleware

from octavo import __version__
from octavo.serve import api_errors, chat, completions, guard, metrics, models, page, responses, state
from octavo.serve.posts import Posts

if TYPE_CHECKING:
    from octavo.serve.async_engine import AsyncEngine
    from octavo.serve.metrics import Metrics
    from octavo.serve.settings import ServeSettings

_ROUTERS = (
    chat.router,
    responses.router,
    completions.router,
    models.router,
    state.router,
    metrics.router,
    page.router,
)


def create_app(engine: AsyncEngine, settings: ServeSettings, metrics: Metrics) -> FastAPI:
    """The server's ASGI application. Routes find the arguments under the same names in `app.state`."""
    app = FastAPI(
        title="Octavo",
        version=__version__,
        description="The OpenAI API over a paged KV cache, with documented extensions.",
    )
    app.state.engine = engine
    app.state.settings = settings
    app.state.metrics = metrics
    metrics.engine = engine
    for router in _ROUTERS:
        app.include_router(router)
    api_errors.install(app)
    stack = app.build_middleware_stack()
    assert isinstance(stack, ServerErrorMiddleware), "the outermost; our log answers for what nobody caught"
    app.middleware_stack = guard.around(Posts(stack.app, _ROUTERS), settings)
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        return _without_422(describe())

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to change it
    return app


def _without_422(description: dict[str, Any]) -> dict[str, Any]:
    """FastAPI promises its own status for bodies at fault; here they are 400."""
    for methods in description["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        description["components"]["schemas"].pop(name, None)
    return description
