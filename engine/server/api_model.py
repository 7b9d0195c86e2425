"""What every request body of the API has in common. ``null`` means the default, as OpenAI's clients assume."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ApiModel(BaseModel):
    """Unknown fields are ignored (clients send many); known ones must have their JSON type."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class Unsupported(ValueError):  # noqa: N818 - reads as what it says
    """A known field with a value that is not offered; becomes a 400 that names the field."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param
