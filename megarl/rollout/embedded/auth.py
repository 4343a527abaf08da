"""Keys in front of the embedded engine's server, by SGLang's rules."""

from __future__ import annotations

import secrets

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from megarl.cluster.keys import Keys

_OPEN = ("/health", "/ready", "/metrics")  # and what begins with them: probes carry no secrets
_FOR_ALL = ("/generate", "/model_info", "/get_model_info", "/v1/loads")  # what changes nothing; the rest is for admins


class RequireKeys:
    """Answers 401 to a request without the right `Authorization: Bearer`.

    Sampling and questions take the API key; calls that change the engine take the admin key alone if there is one,
    else the API key.
    """

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._may(scope):
            await JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _may(self, scope: Scope) -> bool:
        path = scope["path"]
        if path.startswith(_OPEN):
            return True
        key = self._keys.api if path in _FOR_ALL else self._keys.admin or self._keys.api
        scheme, _, given = Headers(scope=scope).get("Authorization", "").partition(" ")
        return not key or (scheme.lower() == "bearer" and secrets.compare_digest(given.encode(), key.encode()))
