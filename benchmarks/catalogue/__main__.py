"""Measures how soon a hidden item disappears from every answer of every gateway and tier, and the live catalogue's cost.

    python -m benchmarks.catalogue --json OUT [--changes 1000] [--faults 100] [--rate 50] [--items 1000000] [--up]

    hide                  one item after another is hidden, under `--rate` recommendations a second at both doors
    hide_redis_kill       the same with `--faults` changes, the store killed at the first
    hide_worker_takeover  the same, the worker killed at the first
    size                  memory, start and cost of a request with `--items` items that have a stated state

Time counts from the acknowledgement. Three callers ask: at both doors through the edge, and at the standby. A change's time ends
when the first answer of their final run without the item is sent. `num_shown_after_1s` counts answers, background included, that
were requested a second or more after the acknowledgement and contain the item. The callers ask for users of each tier in turn,
and the item is the first of that user's answer. Uses the running stack; `--up` starts a stack, which the faults need.
"""

import asyncio
import sys

from benchmarks.catalogue.hide import measure_hides
from benchmarks.catalogue.size import measure_size
from benchmarks.load.command import about_run, above_zero, at_least_one, report_parser, write_report
from benchmarks.load.own_stack import add_stack_options, stack_for
from infra.local.supervisor.ports import of_running_stack
from services.settings.settings import load_settings


def main() -> None:
    """Measure, print lines, write the JSON."""
    settings = load_settings()
    parser = report_parser(__doc__)
    parser.add_argument("--changes", type=at_least_one, default=1_000, help="items hidden one after another")
    parser.add_argument("--faults", type=int, default=100, help="items hidden around each fault; 0: no faults")
    parser.add_argument("--rate", type=above_zero, default=50.0, help="background recommendations a second")
    parser.add_argument("--items", type=int, default=1_000_000, help="items of the measured size; 0: none")
    add_stack_options(parser, settings)
    options = parser.parse_args()
    if options.faults and not options.up:
        sys.exit("error: faults kill parts of the stack; give --up for one of your own, or --faults 0")
    report = about_run("catalogue") | {"background_rps": options.rate}
    with stack_for(settings, is_started=options.up):
        settings = of_running_stack(settings)
        report["hide"] = asyncio.run(measure_hides(settings, options.url, options.changes, options.rate))
        for name, part in (("redis_kill", "store"), ("worker_takeover", "worker")) if options.faults else ():
            found = asyncio.run(measure_hides(settings, options.url, options.faults, options.rate, part))
            report[f"hide_{name}"] = found
    if options.items:
        report["size"] = measure_size(options.items)
    write_report(options.json, report)


if __name__ == "__main__":
    main()
