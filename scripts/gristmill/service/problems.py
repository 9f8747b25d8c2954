"""Errors as application/problem+json (RFC 9457): one shape for all of them, also for those of the framework."""

from __future__ import annotations

import http
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from gristmill.errors import UserError


class ProblemBody(BaseModel):
    """An error as RFC 9457 writes it."""

    type: str = "about:blank"
    title: str = Field(description="the status in words")
    status: int
    detail: str = Field(description="the value, the limit and the next step")


class Problem(Exception):
    """An answer that is an error; `detail` is one line."""

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None) -> None:
        """Keep the status, the line, and headers that go with it."""
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, dict(headers or {})

    def response(self) -> JSONResponse:
        """The response with this problem in it."""
        title = http.HTTPStatus(self.status).phrase
        body = ProblemBody(title=title, status=self.status, detail=self.detail)
        return JSONResponse(body.model_dump(), self.status, self.headers, media_type="application/problem+json")


class ProblemResponse(JSONResponse):
    """Names the media type in the OpenAPI document."""

    media_type = "application/problem+json"


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI entries of the problems that an operation may answer with."""
    content = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/ProblemBody"}}}
    always = (401, 413, 421, 429)
    return {
        status: {"description": http.HTTPStatus(status).phrase, "content": content}
        for status in sorted({*statuses, *always})
    }


def install(app: FastAPI) -> None:
    """Make every error of the application a problem."""

    async def own(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, Problem)
        return error.response()

    async def of_http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return Problem(error.status_code, str(error.detail), error.headers).response()

    async def of_request(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        parts = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        return Problem(422, "; ".join(parts[:5])).response()

    async def of_user(_: Request, error: Exception) -> JSONResponse:
        return Problem(503, str(error)).response()

    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        return Problem(500, f"{type(error).__name__}; the service's log says where").response()

    app.add_exception_handler(Problem, own)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(RequestValidationError, of_request)
    app.add_exception_handler(UserError, of_user)
    app.add_exception_handler(Exception, unexpected)
