"""What all sections of the settings file have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen, and strict: a quoted number or a bool in the place of a number is a mistake to report, not to repair."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)


def not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be blank")
    return text


NonBlank = Annotated[str, AfterValidator(not_blank)]
