"""The dashboard of the LLM engine: memory, prefix cache, batches, queues. Metrics carry vLLM's names where it has them."""

from infra.slo.dashboards.board import RANGE, Board, Panel, Query, Row, mean, quantile, rate


def _share_of_limit(what: str, limit: str) -> Query:
    """Bytes or FLOPs per second of step time, as a share of the machine's limit."""
    by = "model_name, kind"
    done, spent = (f"sum by ({by}) (rate(tailrace_engine_step_{name}_total[{RANGE}]))" for name in (what, "seconds"))
    return Query(
        f"{done} / {spent} / on (model_name) group_left () max by (model_name) ({limit})", "{{model_name}} {{kind}}"
    )


BOARD = Board(
    name="engine",
    title="engine",
    help="The decoder's replicas: KV blocks, prefix hits, batches, queues.",
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
                    help="1 while a gateway's circuit breaker for the LLM is open after repeated failures.",
                ),
                Panel(
                    title="Finished requests by reason",
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
            "Share of the machine's limits, by kind of step",
            (
                Panel(
                    title="Memory bandwidth: share of the limit",
                    queries=(_share_of_limit("bytes", "tailrace_engine_memory_limit_bytes_per_second"),),
                    unit="percentunit",
                    help="Minimum bytes moved by steps, divided by their time and by the bandwidth measured at the replica's start.",
                ),
                Panel(
                    title="Compute: share of the limit",
                    queries=(_share_of_limit("flops", "tailrace_engine_compute_limit_flops_per_second"),),
                    unit="percentunit",
                    help="Minimum FLOPs of steps, divided by their time and by the rate measured at the replica's start.",
                ),
                Panel(
                    title="Step time per second",
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
                    title="Queue, inference and total time, p99",
                    queries=tuple(
                        Query(quantile(0.99, f"vllm:{name}_seconds", "model_name").expr, f"{{{{model_name}}}} {legend}")
                        for name, legend in (
                            ("request_queue_time", "queue"),
                            ("request_inference_time", "inference"),
                            ("e2e_request_latency", "total"),
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
            "Tokens, beams and graphs",
            (
                Panel(
                    title="Text tokens and beam rows per second",
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
