"""`python -m infra.slo`: generate everything that derives from the objectives; --check only lists differences."""

import sys

from infra.generated import ROOT, write_stale
from infra.slo.files import generated
from services.observability.objectives import load_objectives

if __name__ == "__main__":
    sys.exit(write_stale(generated(load_objectives(), ROOT)))
