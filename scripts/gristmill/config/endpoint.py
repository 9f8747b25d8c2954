"""The `endpoint` section of a model that is served elsewhere, over an OpenAI-compatible HTTP interface.

- What decides an answer is the name that the server knows the model by, and `extra`. Where the server is, how fast it
  may be asked and how often again is placement: an edit of it asks nothing anew.
- No secret stands in the config: `key_env` is the name of an environment variable, and a base_url with a user or a
  password is refused. No variable is read that the config does not name.
- `extra` may not say again what `sampling` says: it can only leave such a key out (null), for servers that refuse it.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Protocol

from pydantic import AfterValidator, AnyHttpUrl, Field, StringConstraints, TypeAdapter, ValidationError, field_validator

from gristmill.config.section import Section

#: Where a spec without its placement points to: a name that no resolver knows.
UNPLACED = "http://placement.invalid/v1"
#: Keys of a request that gristmill writes itself; the first ones every request needs, the others a null leaves out.
NEEDED_KEYS = ("messages", "model", "n", "stream")
SAMPLING_KEYS = ("max_tokens", "temperature", "top_p", "stop", "seed", "response_format")
#: What the interface has no key for, and the value at which it is off; several servers take them under this name.
BEYOND_KEYS = {"top_k": 0, "repetition_penalty": 1.0}


class Drawn(Protocol):
    """The sampling settings that the interface may lack a key for."""

    @property
    def top_k(self) -> int:
        """0: off."""

    @property
    def repetition_penalty(self) -> float:
        """1: off."""


def _base_url(value: str) -> str:
    """The address as text; a message never repeats it before it is known to hold no password."""
    try:
        url = TypeAdapter(AnyHttpUrl).validate_python(value)
    except ValidationError:
        raise ValueError("it is no http or https URL; write one such as http://localhost:8000/v1") from None
    if url.username is not None or url.password is not None:
        raise ValueError("it holds a user or a password; remove it, and name the key's variable with key_env")
    text = value.strip().rstrip("/")
    if url.query is not None or url.fragment is not None or not (url.path or "").rstrip("/").endswith("/v1"):
        raise ValueError(f"{text!r} does not end in /v1; write the address that /chat/completions follows")
    return text


class EndpointConfig(Section):
    """A server's address, the model's name there, and how it may be asked."""

    base_url: Annotated[str, AfterValidator(_base_url)] = Field(
        description="http(s) URL that ends in /v1; /chat/completions is added."
    )
    model: Annotated[str, StringConstraints(min_length=1)] = Field(
        description="The model's name at the server; part of every key."
    )
    key_env: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = Field(
        None, description="Name of the environment variable that holds the key; null: no key is sent."
    )
    requests_per_minute: int | None = Field(None, ge=1, description="Most requests a minute, evenly spaced; null: any.")
    max_concurrent: int = Field(16, ge=1, le=1024, description="Most requests at a time.")
    retries: int = Field(6, ge=0, le=20, description="How often a request is sent again after a passing error.")
    timeout_seconds: float = Field(120.0, gt=0, description="Longest wait for one answer before it is asked again.")
    extra: dict[str, Any] = Field(
        {}, description="More keys of the request's JSON body; null leaves out a key of sampling. Part of every key."
    )

    @field_validator("extra")
    @classmethod
    def _extra_is_more(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"extra is no JSON ({error}); write text, numbers, true, false, null or lists") from error
        for key in value:
            if key in NEEDED_KEYS:
                raise ValueError(f"extra.{key} is written by gristmill; remove it")
            if key in SAMPLING_KEYS and value[key] is not None:
                raise ValueError(f"extra.{key} is what sampling says; set it there, or null to leave it out")
        return value

    def unplaced(self) -> EndpointConfig:
        """What of the section decides answers; the rest at its defaults."""
        return EndpointConfig.model_validate({"base_url": UNPLACED, "model": self.model, "extra": self.extra})

    def refusal(self, sampling: Drawn) -> str | None:
        """Why a request cannot be asked as its sampling says, with the next step; None when it can."""
        for key, off in BEYOND_KEYS.items():
            value = getattr(sampling, key)
            if value != off and self.extra.get(key) != value:
                return (
                    f"sampling.{key} is {value:g}, which chat completions have no key for; leave it out, and if the "
                    f"server takes it, put it in endpoint.extra: {{{key}: {value:g}}}"
                )
        return None
