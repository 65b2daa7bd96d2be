"""The dashboard of the LLM engine: memory, prefix cache, batches, queues. Names are vLLM's where vLLM has them."""

from infra.slo.dashboards.board import RANGE, Board, Panel, Query, Row
from infra.slo.dashboards.queries import mean, quantile, rate


def _share_of_limit(what: str, limit: str) -> Query:
    """What a second of steps moves or computes, out of the most that the machine could."""
    by = "model_name, kind"
    done, spent = (f"sum by ({by}) (rate(tailrace_engine_step_{name}_total[{RANGE}]))" for name in (what, "seconds"))
    return Query(
        f"{done} / {spent} / on (model_name) group_left () max by (model_name) ({limit})", "{{model_name}} {{kind}}"
    )


BOARD = Board(
    name="engine",
    title="engine",
    says="The decoder's replicas: KV blocks, prefix hits, batches, queues.",
    rows=(
        Row(
            "Replicas",
            (
                Panel(
                    title="Replicas by bundle",
                    queries=(
                        Query("sum by (version) (tailrace_llm_replicas)", "{{version}}"),
                        Query("max(tailrace_llm_replicas_wanted)", "wanted"),
                    ),
                ),
                Panel(
                    title="Breaker",
                    queries=(Query("max(tailrace_breaker_open)", "open"),),
                    bad_from=1,
                    says="1 while a gateway does not ask the LLM, because it failed several times in a row.",
                ),
                Panel(
                    title="How requests end",
                    queries=(rate("vllm:request_success_total", "finished_reason"),),
                    unit="reqps",
                    kind="areas",
                ),
            ),
        ),
        Row(
            "KV cache",
            (
                Panel(
                    title="KV blocks held by live requests",
                    queries=(Query("max by (model_name) (vllm:kv_cache_usage_perc)", "{{model_name}}"),),
                    unit="percentunit",
                    bad_from=0.95,
                ),
                Panel(
                    title="Prompt tokens found in the prefix cache",
                    queries=(
                        Query(
                            f"sum (rate(vllm:prefix_cache_hits_total[{RANGE}])) / sum (rate(vllm:prefix_cache_queries_total[{RANGE}]))",
                            "hits",
                        ),
                    ),
                    unit="percentunit",
                ),
                Panel(
                    title="Size",
                    queries=(
                        Query(
                            "max by (num_gpu_blocks, block_size) (vllm:cache_config_info)",
                            "{{num_gpu_blocks}} blocks of {{block_size}} tokens",
                        ),
                    ),
                    kind="stat",
                ),
            ),
        ),
        Row(
            "Batches",
            (
                Panel(
                    title="Requests in one step",
                    queries=(mean("tailrace_engine_batch_size"), quantile(0.99, "tailrace_engine_batch_size")),
                ),
                Panel(
                    title="Tokens in one step",
                    queries=(mean("vllm:iteration_tokens_total"), quantile(0.99, "vllm:iteration_tokens_total")),
                ),
                Panel(title="Steps", queries=(rate("tailrace_engine_batch_size_count"),), unit="ops"),
            ),
        ),
        Row(
            "Against the machine's limits, by what a step's rows were",
            (
                Panel(
                    title="Memory: share of the rate that reading reaches",
                    queries=(_share_of_limit("bytes", "tailrace_engine_memory_limit_bytes_per_second"),),
                    unit="percentunit",
                    says="What steps had to move at least, by their time and the rate measured at the replica's start.",
                ),
                Panel(
                    title="Compute: share of the rate that a large product reaches",
                    queries=(_share_of_limit("flops", "tailrace_engine_compute_limit_flops_per_second"),),
                    unit="percentunit",
                    says="What steps had to compute at least, by their time and the rate measured at the replica's start.",
                ),
                Panel(
                    title="Time in steps, each second",
                    queries=(rate("tailrace_engine_step_seconds_total", "model_name, kind"),),
                    kind="areas",
                ),
            ),
        ),
        Row(
            "Requests",
            (
                Panel(
                    title="Running and waiting",
                    queries=(
                        Query("sum by (model_name) (vllm:num_requests_running)", "{{model_name}} running"),
                        Query("sum by (model_name) (vllm:num_requests_waiting)", "{{model_name}} waiting"),
                    ),
                ),
                Panel(
                    title="Time in queue, at work and in all, p99",
                    queries=tuple(
                        Query(quantile(0.99, f"vllm:{name}_seconds", "model_name").expr, f"{{{{model_name}}}} {legend}")
                        for name, legend in (
                            ("request_queue_time", "queue"),
                            ("request_inference_time", "work"),
                            ("e2e_request_latency", "all"),
                        )
                    ),
                    unit="s",
                ),
                Panel(
                    title="Prompt tokens prefilled",
                    queries=(rate("vllm:prompt_tokens_total", "model_name"),),
                    unit="short",
                ),
            ),
        ),
        Row(
            "Words, beams and graphs",
            (
                Panel(
                    title="Tokens of text and beams, each second",
                    queries=(
                        rate("vllm:generation_tokens_total", "model_name"),
                        Query(rate("tailrace_engine_beam_rows_total").expr, "beams"),
                    ),
                ),
                Panel(
                    title="First token and next token, p99",
                    queries=(
                        Query(quantile(0.99, "vllm:time_to_first_token_seconds").expr, "first"),
                        Query(quantile(0.99, "vllm:inter_token_latency_seconds").expr, "next"),
                        Query(quantile(0.99, "vllm:request_prefill_time_seconds").expr, "prefill"),
                        Query(quantile(0.99, "vllm:request_decode_time_seconds").expr, "decode"),
                    ),
                    unit="s",
                ),
                Panel(
                    title="What should not happen",
                    queries=(
                        Query(rate("tailrace_engine_late_captures_total").expr, "graphs captured late"),
                        Query(rate("tailrace_engine_eager_fallbacks_total").expr, "steps without a graph"),
                        Query(rate("vllm:num_preemptions_total").expr, "preemptions"),
                    ),
                ),
            ),
        ),
    ),
)
