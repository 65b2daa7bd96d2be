"""The query shapes that most panels use."""

from infra.slo.dashboards.board import RANGE, Query


def rate(metric: str, by: str = "", match: str = "") -> Query:
    """Per second, summed by labels."""
    grouped = f" by ({by})" if by else ""
    return Query(f"sum{grouped} (rate({metric}{_braced(match)}[{RANGE}]))", _legend(by))


def share(metric: str, part: str, whole: str = "", by: str = "") -> Query:
    """The share of a counter that matches `part`, out of what matches `whole`."""
    grouped = f" by ({by})" if by else ""
    some, all_ = (f"sum{grouped} (rate({metric}{_braced(match)}[{RANGE}]))" for match in (part, whole))
    return Query(f"{some} / {all_}", _legend(by))


def quantile(q: float, histogram: str, by: str = "") -> Query:
    """A quantile of a histogram's observations, by labels."""
    labels = f"{by}, le" if by else "le"
    expr = f"histogram_quantile({q:g}, sum by ({labels}) (rate({histogram}_bucket[{RANGE}])))"
    return Query(expr, f"{_legend(by)} p{q * 100:g}".strip())


def mean(histogram: str) -> Query:
    """The mean of a histogram's observations."""
    return Query(f"sum (rate({histogram}_sum[{RANGE}])) / sum (rate({histogram}_count[{RANGE}]))", "mean")


def _braced(match: str) -> str:
    return f"{{{match}}}" if match else ""


def _legend(by: str) -> str:
    return " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(",")) if by else ""
