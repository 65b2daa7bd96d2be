"""The JSON bodies of the console's API: parsed strictly, and rejected by field."""

from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request

from services.errors import InvalidRequest
from services.gateway.call.http import field_path, read_body


class Sent(BaseModel):
    """A body; a missing or unknown field is an error."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


B = TypeVar("B", bound=Sent)


async def read_sent(http: Request, model: type[B], max_bytes: int) -> B:
    """Read a body. Raises InvalidRequest naming the first wrong field, or RequestTooLarge."""
    try:
        return model.model_validate_json(await read_body(http, max_bytes))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        fields = ", ".join(model.model_fields)
        raise InvalidRequest(field_path(first["loc"]) or "body", first["msg"], f"the fields are {fields}") from error
