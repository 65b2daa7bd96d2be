"""The stages of a release: valid lists of stages, and moves to a stage."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.errors import InvalidRequest
from models.registry.canary import Canary, CanaryStage, check_stages

SHARES = st.sampled_from([-0.1, 0.0, 0.01, 0.05, 0.5, 0.99, 1.0, 1.01, math.nan])
HOLDS = st.sampled_from([0.0, 60.0, -1.0, math.inf, math.nan])


@given(
    st.lists(st.tuples(SHARES, HOLDS), max_size=5)
    | st.lists(st.floats(0.01, 1.0), min_size=19, max_size=21, unique=True).map(
        lambda shares: [(share, 1.0) for share in sorted(shares)]
    )
)
def test_stages_grow_and_leave_somebody_to_compare_with(rows: list[tuple[float, float]]) -> None:
    """Valid stages are returned unchanged; otherwise the error names the first invalid field."""
    shares = [share for share, _ in rows]
    ok = (
        1 <= len(rows) <= 20
        and all(0 < share <= 1 for share in shares)
        and all(share < after for share, after in pairwise(shares))
        and all(hold_s >= 0 and hold_s != math.inf for _, hold_s in rows)
        and shares[0] != 1
    )
    stages = tuple(CanaryStage(*row) for row in rows)

    if ok:
        assert check_stages(stages) == stages
    else:
        with pytest.raises(InvalidRequest, match=r"^stages(\[\d+\]\.(share|hold_s))?: .+; .+"):
            check_stages(stages)


@pytest.mark.parametrize("stage", [-1, 2])
def test_a_stage_that_is_none_is_refused(stage: int) -> None:
    """The error lists the valid stages."""
    canary = Canary(version="v", salt="s", stages=(CanaryStage(0.1, 0.0), CanaryStage(1.0, 0.0)), by="b", at="now")

    with pytest.raises(InvalidRequest, match=rf"stage: {stage} is out of range; give 0 to 1"):
        canary.moved(stage, 0, 0)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_until_a_stage_begins_users_keep_their_version(stage: int) -> None:
    """Before an earlier, the same or a later stage begins, the share at the move holds, also after a second move."""
    stages = (CanaryStage(0.1, 0.0), CanaryStage(0.5, 0.0), CanaryStage(1.0, 0.0))
    canary = Canary(version="v", salt="s", stages=stages, by="b", at="now", stage=1, since_ms=100)

    moved = canary.moved(stage, 210, 200)
    again = moved.moved(2, 215, 205)

    assert [moved.share_at(now_ms) for now_ms in (200, 209, 210)] == [0.5, 0.5, stages[stage].share]
    assert [again.share_at(now_ms) for now_ms in (205, 214, 215)] == [0.5, 0.5, 1.0]
