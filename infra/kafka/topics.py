"""Create a deployment's missing topics, with retention and durability: `python -m infra.kafka.topics`.

Topic properties are in services/settings/kafka_topics.py; names and partitions are settings. Existing topics are not
changed. Producers do not create topics, so this must run first.
"""

import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from kafka import KafkaAdminClient

from services.errors import DependencyUnavailable
from services.settings import kafka_topics
from services.settings.kafka_clients import broker_as_dependency
from services.settings.kafka_topics import Topic, wanted_topics
from services.settings.settings import ending_with_error, load_settings

_CONNECT_MS = 10_000
_RETRY_AFTER_S = 1.0


def create_missing(connection: Mapping[str, Any], topics: Iterable[Topic]) -> list[str]:
    """Create missing topics and return their names. `connection` has client arguments. Raises DependencyUnavailable."""
    with broker_as_dependency():
        admin = KafkaAdminClient(**connection, bootstrap_timeout_ms=_CONNECT_MS)
        try:
            return kafka_topics.create_missing(admin, topics)
        finally:
            admin.close()


@ending_with_error()
def main() -> None:
    """Create missing topics as soon as a broker answers. Bad settings exit with their error."""
    settings = load_settings()
    while True:
        try:
            made = create_missing(settings.kafka_address.client_options(), wanted_topics(settings))
        except DependencyUnavailable as error:
            address = f"TAILRACE_KAFKA_BOOTSTRAP: {settings.kafka_address.bootstrap}"
            sys.stderr.write(f"{address}: {error} ({error.__cause__!r}); waiting for it\n")
            time.sleep(_RETRY_AFTER_S)
        else:
            sys.stdout.writelines(f"made topic {name}\n" for name in made)
            return


if __name__ == "__main__":
    main()
