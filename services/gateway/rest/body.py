"""Reading a body within its limit. Knows HTTP alone."""

from fastapi import Request

from services.errors import RequestTooLarge


async def read_body(http: Request, max_bytes: int) -> bytes:
    """Read the body, refusing at the first byte too many, declared or not. Raises RequestTooLarge."""
    declared = http.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise RequestTooLarge(max_bytes)
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        if len(body) > max_bytes:
            raise RequestTooLarge(max_bytes)
    return bytes(body)
