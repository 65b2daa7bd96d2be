"""What /v1/models lists: the texts' models, and the live bundle as the model `tailrace-recommender`."""

from datetime import datetime

from services.gateway.data_plane import DataPlane
from services.gateway.openai.answers import Plain
from services.gateway.openai.call import RECOMMENDER


async def list_models(plane: DataPlane) -> list[Plain]:
    """Return what can be asked for now. Raises DependencyAway when the text writer does not answer."""
    texts = () if plane.text is None else await plane.text.models()
    listed = [
        _model(one.name, one.created_unix_s, max_model_len=one.max_context_tokens)
        for one in texts
        if one.name != RECOMMENDER  # another Tailrace's: by that name, callers here get the bundle here
    ]
    if plane.is_ready():
        bundle = plane.bundle()
        listed.append(_model(RECOMMENDER, _created_unix_s(bundle.version), bundle_version=bundle.version))
    return listed


def _model(name: str, created_unix_s: int, **more: object) -> Plain:
    return {"id": name, "object": "model", "created": created_unix_s, "owned_by": "tailrace", **more}


def _created_unix_s(version: str) -> int:
    """Return when the bundle was made, as its version tells (20261121T054446Z-...); 0 when it does not."""
    try:
        return int(datetime.strptime(version.partition("-")[0], "%Y%m%dT%H%M%S%z").timestamp())
    except ValueError:
        return 0
