"""What a client hears when a request does not succeed: one value from the cause to the HTTP answer.

Doctrine: 4xx is the client's, 429 means capacity exists and is contended, 503 means there is none right now, 504
means the request outlived its deadline, 500 never means load. Everything worth a retry says when
(``retry_after_s``); everything else on the server's side says that a retry is no use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from shared.errors import MoonbusError

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One failed request, as the client is told."""

    status: int
    """HTTP status."""
    code: str
    """Machine-readable, stable."""
    message: str
    param: str | None = None
    """The request's field at fault."""
    retry_after_s: float | None = None
    """Seconds after which a retry makes sense; ``None``: it does not."""
    allow: str = ""
    """The methods a route does take, with 405."""

    def body(self) -> dict[str, Any]:
        """OpenAI's error body."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> Mapping[str, str]:
        """Headers that belong to the error itself."""
        headers: dict[str, str] = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
            headers["retry-after-ms"] = str(max(1, math.ceil(self.retry_after_s * 1e3)))
        elif self.status >= 500:
            headers["x-should-retry"] = "false"  # else the openai client tries twice more by itself
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.allow:
            headers["allow"] = self.allow
        return headers


class ApiError(MoonbusError):
    """Ends the handling of a request with ``problem``; raised only on the HTTP side of the gateway."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(f"{problem.status} {problem.code}: {problem.message}")


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """400: the request is at fault, ``param`` names the field."""
    return ApiError(Problem(status=400, code=code, message=message, param=param))


def unsupported(param: str, why: str = "") -> ApiError:
    """400: ``param`` would change the answer and is not supported yet, so it is not ignored."""
    return invalid(why or f"{param} is not supported yet; leave it out", param, "unsupported_parameter")


def model_not_found(model: str, known: list[str]) -> ApiError:
    """404 with the names that would work."""
    served = ", ".join(known) or "none at the moment"
    return ApiError(Problem(status=404, code="model_not_found", param="model",
                            message=f"model {model!r} is not served here; served: {served}"))


def context_length_exceeded(asked: str, asked_tokens: int, max_context: int, param: str) -> ApiError:
    """400 with both numbers."""
    return invalid(f"this model's context is {max_context} tokens, but {asked} {asked_tokens} tokens",
                   param, "context_length_exceeded")
