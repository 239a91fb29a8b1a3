"""`octavo serve`: an HTTP server with the OpenAI API over an engine in a process of its own.

    clients <-> front process (asyncio: HTTP, tokenising, templates; no torch) <-> engine process (steps)

`async_engine.AsyncEngine` is the front's handle on the engine process, `app.create_app` the application,
`run.serve` the whole server from first line to last. Needs ``pip install octavo[serve]``.
"""
