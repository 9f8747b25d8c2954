"""What the echo engine writes for a JSON Schema: the smallest document of a simple one.

Simple are objects and arrays of enum, const, string, integer, number, boolean and null; what else a schema may say is
refused rather than answered with a document that does not follow it.
"""

from __future__ import annotations

from typing import Any

from gristmill.errors import UserError
from gristmill.files import dumps, loads

_SMALLEST: dict[str, Any] = {"boolean": False, "null": None}
#: Keywords that are read here, or that say nothing about the document.
_KNOWN = frozenset(
    {
        *("type", "enum", "const", "properties", "required", "additionalProperties", "items", "minItems", "minLength"),
        *("minimum", "maximum", "maxItems", "maxLength", "title", "description", "default", "examples", "$schema"),
    }
)


def smallest(schema: str) -> str:
    """A document that follows the schema, as JSON text.

    Raises:
        UserError: the schema is none of the simple ones.
    """
    return dumps(_value(loads(schema))).decode()


def _value(schema: Any) -> Any:
    if not isinstance(schema, dict) or (unknown := sorted(schema.keys() - _KNOWN)):
        named = unknown[0] if isinstance(schema, dict) else repr(schema)
        raise UserError(f"engine: echo writes no document for a json_schema with {named}; take a simpler one")
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type")
    if kind == "object":
        required = set(schema.get("required", ()))
        return {name: _value(part) for name, part in schema.get("properties", {}).items() if name in required}
    if kind == "array":
        return [_value(schema.get("items", {"type": "null"})) for _ in range(schema.get("minItems", 0))]
    if kind == "string":
        return "x" * schema.get("minLength", 0)
    if kind in ("integer", "number"):
        return schema.get("minimum", min(0, schema.get("maximum", 0)))
    if kind not in _SMALLEST:
        raise UserError(f"engine: echo writes no document for a json_schema of type {kind!r}; take a simpler one")
    return _SMALLEST[kind]
