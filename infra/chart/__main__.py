"""`python -m infra.chart`: generate the Helm chart from the overlays; with --check only list what would change."""

import sys

from infra.chart.files import generated
from infra.generated import write_stale

if __name__ == "__main__":
    sys.exit(write_stale(generated()))
