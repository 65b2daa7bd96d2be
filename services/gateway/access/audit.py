"""The audit line: who did which administrative act, from where, and how it ended. One line per act, refused ones too.

Knows no transport; a door says who and where.
"""

import structlog

log = structlog.get_logger()

NOBODY = "unauthenticated"


def audit(*, act: str, who: str, origin: str, outcome: str, request_id: str) -> None:
    """Write the line. `origin` is the caller's address as far as the door knows it.

    `outcome` is ok, the error's code, or gone: the caller left before the answer, and the act may have been done.
    """
    log.warning("audit", act=act, who=who, origin=origin, outcome=outcome, request_id=request_id)
