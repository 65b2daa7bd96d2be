"""The repository agrees with itself: README, Makefile, generated code, lock, knobs."""

import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

from services.settings.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("recommend_pb2.py", "recommend_pb2.pyi", "recommend_pb2_grpc.py")
HIDDEN_OR_LOCAL = re.compile(r"^(\.|__pycache__$|build$|dist$|.*\.egg-info$)")
KNOBS = """
state_dir cache_dir http_host http_port grpc_port metrics_port max_body_bytes max_events_per_request redis_host redis_port
kafka_bootstrap interactions_topic dead_letter_topic impressions_topic topic_partitions default_deadline_ms
min_deadline_ms max_deadline_ms deadline_reserve_ms feature_timeout_ms min_history_for_llm llm_routing breaker_failures
breaker_open_s max_llm_in_flight gateway_replicas llm_replicas bundle_poll_s popular_refresh_s events_ack_timeout_s
events_max_in_flight gateway_max_ongoing impressions_max_in_flight llm_first_guess_s llm_device llm_dtype
llm_threads engine_max_step_s kv_block_tokens kv_num_blocks max_step_tokens max_beam_rows max_running max_waiting worker_index
num_workers worker_batch_events history_max_items events_file log_keep_days log_level api_keys_file allow_anonymous allowed_hosts tls_dir tls_client_ca_file
inner_host inner_http_port inner_grpc_port standby_http_port standby_grpc_port max_k redis_username redis_password_file redis_tls_ca_file kafka_username kafka_password_file kafka_sasl_mechanism
kafka_tls_ca_file otlp_endpoint trace_share explain_keep_s explain_max_bytes console kv_kind text_path text_url text_url_key_file text_model text_dtype
keep_bundles kafka_allow_cleartext text_replicas text_threads text_kv_num_blocks text_max_tokens text_max_choices text_deadline_ms standby
llm_weight_kind text_weight_kind kv_memory_share max_chunk_tokens default_beam_width
"""


def listed_paths() -> list[str]:
    """The paths of the tree in README.md."""
    tree = re.search(r"^## The tree\n+```\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert tree, "README.md has no fenced tree under '## The tree'"
    return [line.split()[0] for line in tree.group(1).splitlines() if line.strip()]


def test_every_listed_path_exists() -> None:
    """Every path of README's tree exists."""
    assert [path for path in listed_paths() if not (ROOT / path).exists()] == []


def test_every_folder_is_listed() -> None:
    """Each top-level folder, or something in it, and each folder of services is in README's tree."""
    listed = {path.rstrip("/") for path in listed_paths()}
    listed |= {path.partition("/")[0] for path in listed}
    folders = [path for place in (ROOT, ROOT / "services") for path in place.iterdir() if path.is_dir()]
    names = {path.relative_to(ROOT).as_posix() for path in folders if not HIDDEN_OR_LOCAL.match(path.name)}

    assert names - listed == set()


def test_the_generated_code_is_fresh(tmp_path: Path) -> None:
    """Running protoc again writes the committed files."""
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, "services/contracts/recommend.proto"]

    subprocess.run(command, cwd=ROOT, check=True)

    for name in GENERATED:
        committed = (ROOT / "services/contracts" / name).read_text()
        assert (tmp_path / "services/contracts" / name).read_text() == committed, f"{name} is stale: run `make proto`"


def test_the_clients_messages_are_fresh(tmp_path: Path) -> None:
    """The descriptors in the client are those of recommend.proto and of Google's error details."""
    made = tmp_path / "messages.binpb"
    sources = ["services/contracts/recommend.proto", "google/rpc/status.proto", "google/rpc/error_details.proto"]
    places = ["-I.", f"-I{sysconfig.get_path('purelib')}", "--include_imports", f"--descriptor_set_out={made}"]

    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *places, *sources], cwd=ROOT, check=True)

    committed = (ROOT / "services/client/tailrace_client/messages.binpb").read_bytes()
    assert made.read_bytes() == committed, "messages.binpb is stale: run `make proto`"


def test_the_lock_pins_everything_and_names_no_host() -> None:
    """Each line of the lock is name==version, without a build's suffix, a path or an address."""
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]

    assert [line for line in lines if not re.fullmatch(r"[a-z0-9.-]+==[0-9][0-9a-z.!]*", line)] == []


def test_the_lock_covers_what_is_declared() -> None:
    """Every dependency in pyproject.toml is in the lock, and where a version is declared it is that one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["dependencies"] + project["optional-dependencies"]["dev"]
    lock = dict(line.split("==") for line in (ROOT / "requirements.lock").read_text().splitlines() if "==" in line)

    for requirement in declared:
        name, _, version = re.sub(r"\[.*?\]", "", requirement).partition("==")
        name = re.split(r"[<>=~! ]", name)[0].lower().replace("_", "-")
        assert name in lock, f"{requirement} is not locked: run `make lock`"
        assert not version or lock[name] == version, f"{requirement} is locked at {lock[name]}"


def test_the_list_of_settings_is_frozen() -> None:
    """The list of settings is this one; a change of it is a change of the product."""
    assert sorted(Settings.model_fields) == sorted(KNOBS.split())
