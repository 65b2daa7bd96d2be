"""Configuration of the edge: HAProxy in front of both doors, with Ray's ingress behind it and a standby.

    callers ── plain or TLS, h2 ──▶ edge ─┬─▶ Ray's ingress, one per Ray node ──▶ gateways, LLM
                                          └─▶ standby            while no ingress passes its health check

Renders HAProxy's configuration from a plan; starts nothing. Certificates are named by path and read by HAProxy, so
private keys are never copied.
"""

import ipaddress
import json
from dataclasses import dataclass
from pathlib import Path

from services.contracts.access import Priority, places_for
from services.contracts.batch import MAX_BATCH
from services.contracts.tenant import OPERATOR
from services.errors import ConfigError
from services.gateway.call.path import AMBIGUOUS, OPENAI_NAMES, PATH_FIX, PATH_PROBLEM

CERTIFICATE, KEY = "tls.crt", "tls.key"
ADMIN_SOCKET = "admin.sock"
"""Relative to the edge's folder, because the path of a Unix socket is limited to 107 characters."""
KEY_SHARES = "key_shares.map"
"""In the edge's folder: for each API key's hash, the percentage of the limit that its calls may use."""
KEY_TENANTS, TENANT_WEIGHTS = "key_tenants.map", "tenant_weights.map"
"""In the edge's folder: the tenant of each API key's hash, and each tenant's weight in percent of the mean weight."""
RAY_SERVER, STANDBY_SERVER = "ray", "standby"
IN_FLIGHT_TABLE = "in_flight"
MAX_ADDRESSES = 8
"""Maximal number of addresses of a name, such as a headless Service."""

RESOLVERS = """\
resolvers system
    parse-resolv-conf
    accepted_payload_size 8192
    hold valid 1s
    hold nx 5s
    hold obsolete 5s
"""
NOT_TWICE = (
    "    http-request disable-l7-retry if { path /v1/events } or { path /tailrace.v1.Recommender/RecordEvents }\n"
)
"""Events that may have been recorded are not sent a second time."""
RETRIES = 8
"""More than a killed server's idle connections in HAProxy's pools; each costs a try before the next server."""
NODE_RETRIES = 3
"""With several Ray nodes, each try goes to another node."""
RETRYABLE = "    option http-buffer-request\n"
"""A request can be sent again only if it was fully read before it was sent."""
_ALWAYS_ROOM = 3
"""This many requests in flight are never a crowd, at any rate."""
_LATE_FACTOR = 2
"""After this multiple of a recommendation's deadline, and at least the default deadline, the edge answers itself."""
_LEAST_DEADLINE_MS = 100
"""A shorter deadline leaves no time for a second node."""


def share_of(priority: Priority) -> int:
    """Return the percentage of the limit that this priority may use."""
    return places_for(priority, 100)


def connect_timeout(default_deadline_ms: int) -> str:
    """Return HAProxy's time limit for a connection: 30 % of a deadline, so that the next server still meets it.

    It is also HAProxy's pause after a refused connection.
    """
    return f"{max(1, round(0.3 * default_deadline_ms))}ms"


def error_body(code: str, message: str, field: str | None = None, fix: str | None = None) -> str:
    """Return the envelope of HAProxy's own errors, in its log format, which inserts the request's id."""
    error = {"code": code, "message": message, "field": field, "fix": fix, "request_id": "ID"}
    text = json.dumps({"error": error}, separators=(",", ":")).replace("%", "%%")
    return text.replace('"ID"', '"%[var(txn.request_id),json(utf8s)]"')


def _refusal(body: str, condition: str) -> str:
    return f"    http-request return status 400 content-type application/json lf-string '{body}' if {condition}\n"


NAMED = """    http-request set-var(txn.request_id) req.fhdr(x-request-id)
    http-request set-var(txn.request_id) uuid() if !{ var(txn.request_id) -m len gt 0 }
"""
"""Rules that set the id of a request for these errors: the caller's, or a new id."""

UNAVAILABLE = error_body("unavailable", "the gateway is unavailable")
_LATE = error_body("deadline_exceeded", "the gateway: the deadline passed")
_NOT_UTF8 = (  # separate patterns without repetition: matching needs no stack, however long the text
    r"[\xc0\xc1\xf5-\xff]|[\xc2-\xdf](?![\x80-\xbf])|[\xe0-\xef](?![\x80-\xbf]{2})|[\xf0-\xf4](?![\x80-\xbf]{3})"
    r"|\xe0(?![\xa0-\xbf])|\xed(?![\x80-\x9f])|\xf0(?![\x90-\xbf])|\xf4(?![\x80-\x8f])|(?<![\x80-\xbf\xc2-\xf4])[\x80-\xbf]"
    r"|[\xc2-\xdf][\x80-\xbf]{2}|[\xe0-\xef][\x80-\xbf]{3}|[\xf0-\xf4][\x80-\xbf]{4}"
)
_READABLE_ID = _refusal(
    error_body("invalid_request", "x-request-id: not UTF-8", "x-request-id", "send UTF-8"),
    f"{{ req.fhdr(x-request-id) -m reg '{_NOT_UTF8}' }}",
)
"""Ray Serve would answer a request id that is not UTF-8 with a bare 500."""
_OPENAI_PATH_ERROR = {"message": f"path: {PATH_PROBLEM}; {PATH_FIX}", "type": "invalid_request_error", "param": "path"}
_OPENAI_PATH = f"{{ path,url_dec -m reg '/({'|'.join(OPENAI_NAMES)})(?![^/])' }}"
_IS_AMBIGUOUS = f"{{ path -m reg '{AMBIGUOUS}' }}"
_ONE_READING = _refusal(
    json.dumps({"error": {**_OPENAI_PATH_ERROR, "code": "invalid_value"}}), f"{_IS_AMBIGUOUS} {_OPENAI_PATH}"
) + _refusal(error_body("invalid_request", PATH_PROBLEM, "path", PATH_FIX), _IS_AMBIGUOUS)
"""The later rules match the path as sent, the doors the decoded path. OpenAI paths get the OpenAI error envelope."""


_OVERLOADED = error_body("overloaded", "the edge is overloaded")
_IS_OVER_LIMIT, _IS_REFUSED = "{ var(txn.is_over_limit) -m bool }", "{ var(txn.is_refused) -m bool }"
_COUNT_REFUSAL = f"""http-request set-var(txn.is_over_limit) bool(true) if \
{{{{ var(proc.limit_{{door}}) -m int gt 0 }}}} {{{{ var(txn.in_flight),sub(proc.limit_{{door}}) gt 0 }}}} \
{{{{ var(txn.others) -m int gt 0 }}}}{{above_share}}
    http-request set-var(txn.is_refused) bool(true) if {{{_IS_OVER_LIMIT}}}
    http-request sc-inc-gpc(0,0) if {{{_IS_OVER_LIMIT}}}
    http-request sc-inc-gpc(1,0) if {{{_IS_OVER_LIMIT}}} !{{{{ var(txn.share) -m int le {share_of(Priority.LOW)} }}}}
    http-request sc-inc-gpc(2,0) if {{{_IS_OVER_LIMIT}}} {{{{ var(txn.share) -m int ge {share_of(Priority.HIGH)} }}}}"""
"""Counts a request if more recommendations are in flight through this door than the gateways answer in time.

A limit that is not a number reads as 0, which disables it. A batch with no other call in flight passes: otherwise
nothing would show that the limit may rise.
"""
_ABOVE_SHARE = " {{ var(txn.own),mul(txn.tenants),mul(100),div(txn.weight),sub(proc.limit_{door}) gt 0 }}"
"""A second part of the condition, where there are tenants: the caller's tenant has more in flight than its share of the
limit, which is its weight by the number of active tenants and the mean weight.
"""
_REFUSE_LARGEST = """
    http-request set-var(txn.has_fair) bool(true) if {{ var(proc.fair_{door}) -m int gt 0 }} \
{{ var(txn.tenants) -m int gt 1 }}
    http-request set-var(txn.is_flood) bool(true) if {{ var(txn.has_fair) -m bool }} \
{{ var(txn.refused),mul({part}),sub(txn.rate) ge 0 }} \
{{ var(txn.rate),mul(txn.tenants),mul(100),div(txn.weight),sub(txn.rate_of_all) gt 0 }}
    http-request set-var(txn.is_unfair) bool(true) if {{ var(txn.has_fair) -m bool }} \
{{ var(txn.own),sub(proc.fair_{door}),sub(proc.fair_{door}) gt 0 }}
    http-request set-var(txn.rate_far_above) var(txn.rate_of_all),mul({far_above}),div(100)
    http-request set-var(txn.fair_parts) var(proc.fair_{door}),mul({quarters})
    http-request set-var(txn.is_unfair) bool(true) if {{ var(txn.has_fair) -m bool }} \
{{ var(txn.rate),mul(txn.tenants),mul(100),div(txn.weight),sub(txn.rate_far_above) gt 0 }} \
{{ var(txn.own),mul(4),sub(txn.fair_parts) gt 0 }}
    http-request set-var(txn.is_unfair) bool(true) if {{ var(txn.is_flood) -m bool }} \
{{ var(txn.others),sub(proc.fair_{door}) ge 0 }}
    http-request set-var(txn.is_unfair) bool(true) if {{ var(txn.is_flood) -m bool }} \
{{ var(txn.others),mul(2),sub(proc.fair_{door}) ge 0 }} \
{{ var(txn.own),mul(txn.tenants),mul(100),div(txn.weight),sub(proc.fair_{door}) gt 0 }}
    http-request set-var(txn.is_refused) bool(true) if {{ var(txn.is_unfair) -m bool }}
    http-request sc-inc-gpc(0,{tenant}) if {{ var(txn.is_unfair) -m bool }}
    http-request track-sc{counter} int({fair}) table {table} if {{ var(txn.is_unfair) -m bool }}
    http-request sc-inc-gpc(0,{counter}) if {{ var(txn.is_unfair) -m bool }}"""
"""Refuses a tenant that has twice as many requests in flight as the gateways answer without a wait; five quarters of it
suffice if the tenant sends far more than the mean, by weight. If an eighth of its requests are refused for this, and it
sends more than the mean, it sends a flood: it is refused beyond the fair limit, and from half of that on beyond its
part of it. A burst of a tenant within its share is shorter.
"""
_FLOOD_PART, _FAR_ABOVE_MEAN_PERCENT, _QUARTERS = 8, 115, 5
_ALL_TENANTS = "*"
_TENANT_TABLE = """
backend tenants_{door}
    # each tenant's recommendations through this door, and all tenants'
    stick-table type string len 40 size 4096 expire 10s store conn_cur,http_req_rate(200ms),gpc(1),gpc_rate(1,200ms)
"""
"""The counts of a door, by tenant."""
_LEARN_LIMIT = """# a gateway announces the limit in flight of each door; callers do not see it
    http-response set-var(proc.limit_rest) res.hdr(x-edge-limit),word(1,' '),add(0) \
if { res.hdr(x-edge-limit) -m found }
    http-response set-var(proc.limit_grpc) res.hdr(x-edge-limit),word(2,' '),add(0) \
if { res.hdr(x-edge-limit) -m found }
    http-response set-var(proc.fair_rest) res.hdr(x-edge-limit),word(3,' '),add(0) \
if { res.hdr(x-edge-limit) -m found }
    http-response set-var(proc.fair_grpc) res.hdr(x-edge-limit),word(4,' '),add(0) \
if { res.hdr(x-edge-limit) -m found }
    http-response del-header x-edge-limit"""
_SERVICE = "/tailrace.v1.Recommender/"
_BATCH_BITS = (MAX_BATCH - 1).bit_length()
_ALL_COUNTER, _FAIR_COUNTER = 2 + _BATCH_BITS, 3 + _BATCH_BITS
"""HAProxy's counters: the door, the bits of a batch, the tenant, all tenants, the refusals of the fair limit."""
_FAIR_REFUSALS = 3
_RANKED = {
    "rest": """acl is_ranked path /v1/recommendations /v1/recommendations:batch /v1/popular /v1/search
    acl is_ranked path_reg ^/v1/items/.+/similar$
    acl is_batch path /v1/recommendations:batch""",
    "grpc": "\n    ".join(
        (
            *(
                f"acl is_ranked path {_SERVICE}{name}"
                for name in ("Recommend", "RecommendBatch", "SimilarItems", "Popular", "Search")
            ),
            f"acl is_batch path {_SERVICE}RecommendBatch",
        )
    ),
}
"""Paths of the ranking calls, by door, and of the batch calls."""
_MARK = """http-request set-header x-edge-arrived-ms %[date(0,ms)]
    http-request set-header x-edge-in-flight %[var(txn.in_flight)]
    http-request set-header x-edge-name %[hostname]
    # while the edge refuses requests of a priority, the gateways answer that priority from memory
    http-request del-header x-edge-refused
    http-request set-header x-edge-refused low if { sc_gpc_rate(0,0) gt 0 }
    http-request set-header x-edge-refused normal if { sc_gpc_rate(1,0) gt 0 }
    http-request set-header x-edge-refused high if { sc_gpc_rate(2,0) gt 0 }"""


def check_files(tls_dir: Path, client_ca_file: Path | None) -> None:
    """Raise ConfigError if a certificate file is missing."""
    for path, key in (
        (tls_dir / CERTIFICATE, "TLS_DIR"),
        (tls_dir / KEY, "TLS_DIR"),
        (client_ca_file, "TLS_CLIENT_CA_FILE"),
    ):
        if path is not None and not path.is_file():
            raise ConfigError(f"TAILRACE_{key}: no file {path}; put the PEM file there")


def edge_folder(state_dir: Path) -> Path:
    """Return the folder of the edge's configuration and its admin socket."""
    return state_dir / "run" / "edge"


@dataclass(frozen=True, slots=True)
class Upstream:
    """A server behind the edge: its host (an address, or a name that is resolved repeatedly) and both its ports."""

    host: str
    http_port: int
    grpc_port: int

    @property
    def is_name(self) -> bool:
        """Whether the host must be resolved."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return self.host != "localhost"
        return False

    def server(self, name: str, port_field: str, options: str) -> str:
        """Return HAProxy's server line for the port of one door; a name needs the section `RESOLVERS`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        address = f"{host}:{getattr(self, port_field)}"
        if self.is_name:
            return f"    server-template {name} {MAX_ADDRESSES} {address}{options} resolvers system init-addr libc,none"
        return f"    server {name} {address}{options}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgePlan:
    """Listeners and upstreams of the edge.

    `http_fd` and `grpc_fd` are listening sockets that HAProxy inherits. `ray` has the ingress of each Ray node. Without
    `tls_dir` both doors use plaintext; with `client_ca_file` callers must present a certificate of that authority.
    `has_keys`: the file `KEY_SHARES` exists. `has_tenants`: so do `KEY_TENANTS` and `TENANT_WEIGHTS`.
    `node_patience_percent` is the part of a recommendation's deadline that a Ray node gets before another node is
    asked; 0: all of it. `max_requests` is the number of requests that all gateways together answer at once: fewer
    connections would leave some gateways idle.
    """

    http_fd: int
    grpc_fd: int
    ray: tuple[Upstream, ...]
    standby: Upstream | None = None
    tls_dir: Path | None = None
    client_ca_file: Path | None = None
    has_keys: bool = False
    has_tenants: bool = False
    default_deadline_ms: int = 200
    node_patience_percent: int = 50
    max_requests: int = 0

    @property
    def certificate(self) -> Path | None:
        """The certificate chain; its key is tls.key in the same folder."""
        return None if self.tls_dir is None else self.tls_dir / CERTIFICATE

    @property
    def key(self) -> Path | None:
        return None if self.tls_dir is None else self.tls_dir / KEY

    def render(self) -> str:
        return _TEMPLATE.format(
            max_connections=max(_MIN_CONNECTIONS, self.max_requests),
            max_streams=_MAX_STREAMS,
            socket=ADMIN_SOCKET,
            bind_http=f"fd@{self.http_fd}{self._tls('h2,http/1.1')}",
            bind_grpc=f"fd@{self.grpc_fd}{self._tls('h2') or ' proto h2'}",
            http_servers=self._servers("http_port", ""),
            grpc_servers=self._servers("grpc_port", " proto h2"),
            resolvers=RESOLVERS,
            retries=NODE_RETRIES if self._has_nodes else RETRIES,
            retryable=RETRYABLE,
            connect=connect_timeout(self.default_deadline_ms),
            patience_rest=self._patience("rest") or self._time_limit("rest"),
            patience_grpc=self._patience("grpc") or self._time_limit("grpc"),
            late=_LATE,
            not_twice=NOT_TWICE,
            readable_id=_READABLE_ID,
            named=NAMED,
            one_reading=_ONE_READING,
            unavailable=UNAVAILABLE,
            in_flight=IN_FLIGHT_TABLE,
            counters=_FAIR_COUNTER + 1,
            tenant_tables="".join(_TENANT_TABLE.format(door=door) for door in _RANKED) if self.has_tenants else "",
            entries=2 * (1 + _BATCH_BITS) + 1,
            count_refusal_rest=self._count_refusal("rest"),
            count_refusal_grpc=self._count_refusal("grpc"),
            is_refused=_IS_REFUSED,
            learn_limit=_LEARN_LIMIT,
            count_rest=self._count(1, "rest"),
            count_grpc=self._count(2, "grpc"),
            mark=_MARK,
            overloaded=_OVERLOADED,
        )

    def _count_refusal(self, door: str) -> str:
        above_share = _ABOVE_SHARE.format(door=door) if self.has_tenants else ""
        counted = _COUNT_REFUSAL.format(door=door, above_share=above_share)
        if not self.has_tenants:
            return counted
        return counted + _REFUSE_LARGEST.format(
            door=door,
            part=_FLOOD_PART,
            far_above=_FAR_ABOVE_MEAN_PERCENT,
            quarters=_QUARTERS,
            tenant=_ALL_COUNTER - 1,
            counter=_FAIR_COUNTER,
            fair=_FAIR_REFUSALS,
            table=IN_FLIGHT_TABLE,
        )

    def _count(self, door: int, name: str) -> str:
        """Return the rules that count the recommendations in flight at this door, scaled by the caller's priority.

        Low priority sees twice as many in flight, normal four thirds. A batch counts once per request in it: the first
        request uses the door's table entry, and each bit of the number of further requests has its own entry, which
        counts the calls with that bit set. A caller whose key is not in the file counts as low; without a keys file all
        callers may use the whole limit.
        """
        bits = range(_BATCH_BITS)
        rules = [
            _RANKED[name],
            "http-request set-var(txn.size) int(1)",
            "http-request set-var(txn.size) req.hdr(x-batch-size),add(0) if is_batch",
            f"http-request set-var(txn.size) int({MAX_BATCH}) if is_batch !{{ var(txn.size) -m int 1:{MAX_BATCH} }}",
            "http-request set-var(txn.more) var(txn.size),sub(1)",
            f"http-request track-sc0 int({door}) table {IN_FLIGHT_TABLE} if is_ranked",
            *(
                f"http-request track-sc{1 + bit} int({10 * door + bit}) table {IN_FLIGHT_TABLE} "
                f"if is_batch {{ var(txn.more),and({1 << bit}) gt 0 }}"
                for bit in bits
            ),
            "http-request set-var(txn.in_flight) sc0_conn_cur if is_ranked",
            *(
                f"http-request set-var(txn.in_flight) int({10 * door + bit}),table_conn_cur({IN_FLIGHT_TABLE}),"
                f"mul({1 << bit}),add(txn.in_flight) if is_ranked"
                for bit in bits
            ),
            "http-request set-var(txn.others) var(txn.in_flight),sub(txn.size)",
        ]
        if self.has_keys:
            least = share_of(Priority.LOW)
            share = f"sha2(256),hex,lower,map_str_int({KEY_SHARES},{least})"
            rules += [
                f"http-request set-var(txn.share) int({least})",
                f"http-request set-var(txn.share) req.hdr(x-api-key),{share} if {{ req.hdr(x-api-key) -m found }}",
                (
                    f"http-request set-var(txn.share) req.hdr(authorization),word(2,' '),{share} "
                    "if { req.hdr(authorization) -m found }"
                ),
                "http-request set-var(txn.in_flight) var(txn.in_flight),mul(100),div(txn.share)",
            ]
        if self.has_tenants:
            rules += _tenant_rules(name)
        return "\n    ".join(rules)

    @property
    def _has_nodes(self) -> bool:
        """Whether Ray may have several nodes, so that another node can answer."""
        return len(self.ray) > 1 or self.ray[0].is_name

    def _patience(self, door: str) -> str:
        """Return the rules that send a recommendation to another node if a node is silent for part of the deadline.

        A node whose network is cut closes no connection, so only silence shows it in time. Exceptions:

        - No other node is up: a name may have a single address.
        - More requests are in flight than the last second's rate would give if each took half of its deadline:
          the cause is then load, and second requests would add to it.
        - The request wants a rationale, which may take until the deadline.
        """
        if not (self._has_nodes and self.node_patience_percent):
            return ""
        if door == "rest":
            rationale, is_rationale = "json_query('$.rationale')", "-m str true"
        else:
            rationale, is_rationale = "ungrpc(9,int32)", "-m int 1"
        return f"""    retry-on conn-failure empty-response response-timeout
{self._deadline(door)}    acl is_short var(txn.deadline) -m int lt {_LEAST_DEADLINE_MS}
    http-request set-var(txn.rationale) req.body,{rationale}
    acl is_rationale var(txn.rationale) {is_rationale}
    http-request set-var(txn.usual) sc0_http_req_rate,mul(txn.deadline),div(2000),add({_ALWAYS_ROOM})
    acl is_crowded var(txn.in_flight),sub(txn.usual) -m int gt 0
    http-request set-var(txn.patience) var(txn.deadline),mul({self.node_patience_percent}),div(100)
    acl has_others nbsrv({door}) ge 2
    http-request set-timeout server var(txn.patience) \
if is_recommendation has_others !is_short !is_rationale !is_crowded
"""

    def _time_limit(self, door: str) -> str:
        """Return the rules that end a recommendation that no gateway has answered long after its deadline.

        A gateway without processor time reads requests seconds after they arrived; it still answers what it reads in
        time, so the limit is far above the deadline.
        """
        return f"""{self._deadline(door)}    http-request set-var(txn.limit) var(txn.deadline),mul({_LATE_FACTOR})
    http-request set-var(txn.limit) int({self.default_deadline_ms}) \
if {{ var(txn.limit) -m int lt {self.default_deadline_ms} }}
    http-request set-timeout server var(txn.limit) if is_recommendation
"""

    def _deadline(self, door: str) -> str:
        """Return the rules that read a recommendation's deadline as the gateways do."""
        if door == "rest":
            path, sent = "/v1/recommendations", "json_query('$.deadline_ms','int')"
        else:
            path, sent = "/tailrace.v1.Recommender/Recommend", "ungrpc(7,int32)"
        return f"""    http-request set-var(txn.deadline) int({self.default_deadline_ms})
    http-request set-var(txn.sent) req.hdr(x-deadline-ms)
    http-request set-var(txn.deadline) var(txn.sent),add(0) if {{ var(txn.sent) -m int gt 0 }}
    http-request set-var(txn.sent) req.body,{sent}
    http-request set-var(txn.deadline) var(txn.sent),add(0) if {{ var(txn.sent) -m int gt 0 }}
    acl is_recommendation path {path}
"""

    def _tls(self, protocols: str) -> str:
        if self.certificate is None:
            return ""
        verify = "" if self.client_ca_file is None else f" ca-file {_quoted(self.client_ca_file)} verify required"
        return f" ssl crt {_quoted(self.certificate)} alpn {protocols}{verify}"

    def _servers(self, port_field: str, protocol: str) -> str:
        """Return the servers of one door's backend.

        Both doors are checked at the REST port, each separately: HAProxy cannot send a gRPC message as a health check.
        The standby is not checked: it is the last resort, and a slow check on a busy machine must not disable it.

        Every request goes to Ray while Ray is up, and a request that fails there is sent to another server. If Ray has
        one address, that is the standby, at once: as a `backup` it would get the request only after a second failure
        had marked Ray down, and HAProxy 2.8 loses a gRPC request whose second try is refused. If Ray has several, by a
        name or a list, another is tried first.
        """
        lines = [
            ingress.server(
                RAY_SERVER if len(self.ray) == 1 else f"{RAY_SERVER}{number}",
                port_field,
                f"{protocol} check port {ingress.http_port} check-proto h1 observe layer4 error-limit 1 "
                "on-error mark-down",
            )
            for number, ingress in enumerate(self.ray, start=1)
        ]
        if self.standby is None:
            return "\n".join(lines)
        backup = self.standby.server(STANDBY_SERVER, port_field, protocol + (" backup" if self._has_nodes else ""))
        first = [] if self._has_nodes else [f"    use-server {RAY_SERVER} if TRUE"]
        return "\n".join([*first, *lines, backup])


def _tenant_rules(door: str) -> list[str]:
    """Return the rules that count the recommendations in flight of the caller's tenant, and the active tenants."""
    tenant, counter = f"sha2(256),hex,lower,map_str({KEY_TENANTS},{OPERATOR})", _ALL_COUNTER - 1
    return [
        f"http-request set-var(txn.tenant) str({OPERATOR})",
        f"http-request set-var(txn.tenant) req.hdr(x-api-key),{tenant} if {{ req.hdr(x-api-key) -m found }}",
        (
            f"http-request set-var(txn.tenant) req.hdr(authorization),word(2,' '),{tenant} "
            "if { req.hdr(authorization) -m found }"
        ),
        f"http-request track-sc{counter} var(txn.tenant) table tenants_{door} if is_ranked",
        f"http-request track-sc{_ALL_COUNTER} str({_ALL_TENANTS}) table tenants_{door} if is_ranked",
        f"http-request set-var(txn.own) sc_conn_cur({counter}) if is_ranked",
        f"http-request set-var(txn.rate) sc_http_req_rate({counter}) if is_ranked",
        f"http-request set-var(txn.refused) sc_gpc_rate(0,{counter}) if is_ranked",
        f"http-request set-var(txn.rate_of_all) sc_http_req_rate({_ALL_COUNTER}) if is_ranked",
        f"http-request set-var(txn.tenants) table_cnt(tenants_{door}),sub(1)",
        f"http-request set-var(txn.weight) var(txn.tenant),map_str_int({TENANT_WEIGHTS},100)",
    ]


def _quoted(path: Path) -> str:
    """Return a path as one word of HAProxy's language; single quotes disable special characters."""
    escaped = str(path.absolute()).replace("'", "'\\''")
    return f"'{escaped}'"


_MIN_CONNECTIONS = 4_096
_MAX_STREAMS = 1_000
_TEMPLATE = """\
global
    maxconn {max_connections}
    nbthread 2
    tune.stick-counters {counters}
    # beyond HAProxy's 100, calls of one connection would wait in their client, where nothing refuses them
    tune.h2.fe.max-concurrent-streams {max_streams}
    # no log: HAProxy writes to standard error when a server goes up or down
    stats socket unix@{socket} mode 600 level admin
    ssl-default-bind-options ssl-min-ver TLSv1.2 no-tls-tickets
    ssl-load-extra-del-ext
    hard-stop-after 5s

{resolvers}
defaults
    mode http
    option http-no-delay
    option abortonclose
    # the gateways decide how long a request may take; these timeouts equal those of Ray's ingress
    timeout client 3600s
    timeout server 3600s
    timeout http-request 10s
    timeout http-keep-alive 75s
    timeout connect {connect}
    timeout check 500ms
    retries {retries}
    option redispatch 1
    retry-on conn-failure empty-response
{retryable}    option httpchk GET /healthz
    http-check expect status 200
    # the limits, also where no caller uses REST; without an announcement they become 0 in one step: there is no limit
    http-check set-var(check.limit_rest) res.hdr(x-edge-limit),word(1,' ')
    http-check set-var(check.limit_grpc) res.hdr(x-edge-limit),word(2,' ')
    http-check set-var(check.fair_rest) res.hdr(x-edge-limit),word(3,' ')
    http-check set-var(check.fair_grpc) res.hdr(x-edge-limit),word(4,' ')
    http-check set-var(proc.limit_rest) str(0),concat(,check.limit_rest),add(0)
    http-check set-var(proc.limit_grpc) str(0),concat(,check.limit_grpc),add(0)
    http-check set-var(proc.fair_rest) str(0),concat(,check.fair_rest),add(0)
    http-check set-var(proc.fair_grpc) str(0),concat(,check.fair_grpc),add(0)
    default-server inter 600ms fastinter 100ms downinter 200ms fall 2 rise 3
    http-error status 502 content-type application/json hdr retry-after 1 lf-string '{unavailable}'
    http-error status 503 content-type application/json hdr retry-after 1 lf-string '{unavailable}'
    http-error status 504 content-type application/json lf-string '{late}'

backend {in_flight}
    # recommendations in flight through each door (1: REST, 2: gRPC; 10 to 26: the bits of batches), and refusals: all,
    # those of more than low priority, and those of high priority
    stick-table type integer size {entries} \
store conn_cur,gpc(3),gpc_rate(3,1s),http_req_rate(1s)
{tenant_tables}
frontend rest
    bind {bind_http}
{named}{one_reading}    {count_rest}
    {count_refusal_rest}
    http-request return status 429 content-type application/json hdr retry-after 1 \
lf-string '{overloaded}' if {is_refused}
    {mark}
    # the caller's address replaces its headers' claims, and no caller switches Ray Serve's time limit off
    http-request set-header x-forwarded-for %[src]
    http-request del-header x-request-timeout-seconds
    {learn_limit}
{readable_id}    default_backend rest

frontend grpc
    bind {bind_grpc}
    {count_grpc}
    {count_refusal_grpc}
    http-request return status 200 content-type application/grpc lf-string %[str()] hdr grpc-status 8 \
hdr grpc-message "the edge is overloaded" hdr retry-after 1 if {is_refused}
    {mark}
    http-request set-header x-forwarded-for %[src]
    http-request del-header x-request-timeout-seconds
    {learn_limit}
    http-after-response set-status 200 if {{ status 504 }}
    default_backend grpc

backend rest
{not_twice}{patience_rest}{http_servers}

backend grpc
    http-error status 504 content-type application/grpc lf-string %[str()] hdr grpc-status 4 \
hdr grpc-message "the gateway: the deadline passed"
{not_twice}{patience_grpc}{grpc_servers}
"""
