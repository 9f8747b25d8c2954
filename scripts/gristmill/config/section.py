"""What all config sections share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

#: A stop text or a label: an empty one would be found everywhere.
Text = Annotated[str, StringConstraints(min_length=1)]
_NUMBERS = (int, float, int | None, float | None)


class Section(BaseModel):
    """A config section: unknown keys are errors, and nothing changes it after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML reads a bare yes, no, on or off as true or false, and pydantic would read those as 1 or 0."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation in _NUMBERS:
            raise PydanticCustomError("number_type", "Write a number")
        return value
