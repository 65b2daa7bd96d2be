"""Facts for tests of the router's policy: a request whose LLM is in time."""

from typing import Any

from services.router.policy import Facts


def facts(**changes: Any) -> Facts:
    """Build the facts of a user with five items, with these changes."""
    usual: dict[str, Any] = {
        "num_allowed": 10,
        "num_allowed_if_seen": 10,
        "list_covers": False,
        "is_shed": False,
        "features_unavailable": False,
        "user_known": True,
        "num_history": 5,
        "min_history_for_llm": 3,
        "llm_allowed": True,
        "student_allowed": True,
        "is_trained": True,
        "llm_pays": True,
        "breaker_allows": True,
        "num_in_flight": 2,
        "max_in_flight": 8,
        "predicted_s": 0.0123,
        "budget_s": 0.05,
    }
    return Facts(**{**usual, **changes})
