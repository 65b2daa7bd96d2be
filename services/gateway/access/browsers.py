"""What pages of other sites can make a visitor's browser do to a server that needs no key, and the refusal of it.

A page cannot send a key for another site, so that only a server without keys is at risk. Two ways lead there:

- DNS rebinding: the page's own name is made to mean this machine. The browser then sends that name as `Host`. Addresses are
  accepted, since no name can be rebound to them.
- A form or a script posts to this machine. The browser says so in `Sec-Fetch-Site`, older ones in `Origin`; other programs send
  neither.
"""

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from services.errors import InvalidRequest

LOOPBACK_NAME = "localhost"


def refuse_other_names(headers: Mapping[str, str], names: frozenset[str]) -> None:
    """Refuse a `Host` that is neither an address, nor localhost, nor one of these names. Raises InvalidRequest."""
    host = headers.get("host")
    if host is None:
        return
    name = _name_of(host)
    if not (_is_address(name) or name == LOOPBACK_NAME or name.endswith(f".{LOOPBACK_NAME}") or name in names):
        raise InvalidRequest(
            "host", f"{name!r} is no name of this server", "call its address, or add the name to TAILRACE_ALLOWED_HOSTS"
        )


def refuse_other_sites(headers: Mapping[str, str]) -> None:
    """Refuse a call that another site's page makes from a visitor's browser (CSRF). Raises InvalidRequest."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    fix = "use the console's own page, or no browser"
    if site not in (None, "same-origin", "none"):
        raise InvalidRequest("sec-fetch-site", f"a page of another site ({site})", fix)
    if site is None and origin is not None and urlsplit(origin).netloc != headers.get("host"):
        raise InvalidRequest("origin", f"a page of another site ({origin})", fix)


def _name_of(host: str) -> str:
    """Return a `Host` header's name without its port, in lower case."""
    return (urlsplit(f"//{host}").hostname or host).rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
