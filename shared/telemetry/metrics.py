"""Every Prometheus instrument of moonbus: name, unit and meaning, declared once.

Names follow the Prometheus conventions: base units (seconds, bytes), ``_total`` for counters. Dashboards may only
draw what stands here; a test checks that.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_TOKENS = (16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_ERROR_SHARE = (-0.9, -0.75, -0.5, -0.25, -0.1, -0.05, 0, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10)
_ERROR_S = (-10, -5, -2, -1, -0.5, -0.2, -0.1, -0.05, 0, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)

# Bus: every service.
BUS_UNDECODABLE = Counter("moonbus_bus_undecodable_total", "Messages that were not what their subject promises.", ["subject"])
BUS_DROPPED = Counter("moonbus_bus_dropped_total", "Messages dropped because a backlog was full.", ["subject"])
BUS_RECONNECTS = Counter("moonbus_bus_reconnects_total", "Times the connection to NATS was lost and made again.")
BUS_PUBLISH_FAILURES = Counter(
    "moonbus_bus_publish_failures_total", "Messages a machine wanted sent and the bus did not take.", ["subject"])

# Machines: every service.
MACHINE_BACKLOG = Gauge("moonbus_machine_backlog_events", "Events that wait for a machine.", ["machine"])
MACHINE_DROPPED = Counter("moonbus_machine_dropped_total", "Events dropped because a machine's backlog was full.", ["machine"])
MACHINE_SECONDS = Histogram("moonbus_machine_handle_seconds", "Time a machine takes to handle one event.", ["machine"],
                            buckets=(0.00001, 0.0001, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1))

# Gateway.
GATEWAY_REQUESTS = Counter(
    "moonbus_gateway_requests_total", "Finished requests by outcome (ok, cancelled, rejected, failed) and code.",
    ["model", "outcome", "code"])
GATEWAY_HTTP = Counter("moonbus_gateway_http_responses_total", "HTTP responses by route and status.", ["route", "status"])
GATEWAY_IN_FLIGHT = Gauge("moonbus_gateway_in_flight_requests", "Requests between arrival and last byte.")
GATEWAY_TTFT_SECONDS = Histogram("moonbus_gateway_ttft_seconds", "Arrival to first token.", ["model"], buckets=_LATENCY_S)
GATEWAY_TBT_SECONDS = Histogram("moonbus_gateway_tbt_seconds", "Gap between two tokens.", ["model"], buckets=_GAP_S)
GATEWAY_DURATION_SECONDS = Histogram(
    "moonbus_gateway_duration_seconds", "Arrival to last token.", ["model"], buckets=(*_LATENCY_S, 120, 300, 600))
GATEWAY_TOKENIZE_SECONDS = Histogram("moonbus_gateway_tokenize_seconds", "Rendering and tokenising a prompt.",
                                     buckets=_GAP_S)
GATEWAY_PROMPT_TOKENS = Counter("moonbus_gateway_prompt_tokens_total", "Prompt tokens of accepted requests.", ["model"])
GATEWAY_COMPLETION_TOKENS = Counter("moonbus_gateway_completion_tokens_total", "Tokens answered.", ["model"])
GATEWAY_CACHED_TOKENS = Counter("moonbus_gateway_cached_tokens_total", "Prompt tokens that were not computed.", ["model"])
GATEWAY_ATTEMPTS = Histogram("moonbus_gateway_attempts", "Placements a request needed.", buckets=(1, 2, 3))
GATEWAY_RETRIES = Counter("moonbus_gateway_retries_total", "Placements after the first, by why the last one failed.", ["code"])

# Conductor.
CONDUCTOR_PLACEMENTS = Counter("moonbus_conductor_placements_total", "Placements by prefill and decode worker.",
                               ["prefill", "decode"])
CONDUCTOR_REJECTIONS = Counter("moonbus_conductor_rejections_total", "Requests not placed, by code.", ["code"])
CONDUCTOR_DECISION_SECONDS = Histogram("moonbus_conductor_decision_seconds", "Time one placement takes.",
                                       buckets=(0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1))
CONDUCTOR_PREDICTED_TTFT_SECONDS = Histogram(
    "moonbus_conductor_predicted_ttft_seconds", "TTFT promised at placement.", buckets=_LATENCY_S)
CONDUCTOR_ACTUAL_TTFT_SECONDS = Histogram(
    "moonbus_conductor_actual_ttft_seconds", "First token of placed requests, from their last placement on.",
    buckets=_LATENCY_S)
CONDUCTOR_TTFT_ERROR_SECONDS = Histogram(
    "moonbus_conductor_ttft_error_seconds", "Actual minus predicted TTFT, both from the placement on.", buckets=_ERROR_S)
CONDUCTOR_PREDICTED_TBT_SECONDS = Histogram(
    "moonbus_conductor_predicted_tbt_seconds", "TBT promised at placement.", buckets=_GAP_S)
CONDUCTOR_ACTUAL_TBT_SECONDS = Histogram(
    "moonbus_conductor_actual_tbt_seconds", "Mean TBT of placed requests as they ended.", buckets=_GAP_S)
CONDUCTOR_PREDICTION_ERROR = Histogram(
    "moonbus_conductor_prediction_relative_error",
    "Actual minus predicted, of each ended request that got a first token, by outcome: TTFT and TBT as a share of what "
    "was predicted, hit tokens as a share of the prompt.", ["of", "outcome"], buckets=_ERROR_SHARE)
CONDUCTOR_PREDICTED_HIT_TOKENS = Counter(
    "moonbus_conductor_predicted_hit_tokens_total", "Prompt tokens placements expected to reuse.")
CONDUCTOR_ACTUAL_HIT_TOKENS = Counter(
    "moonbus_conductor_actual_hit_tokens_total", "Prompt tokens that requests did reuse.")
CONDUCTOR_INDEX_BLOCKS = Gauge("moonbus_conductor_index_blocks", "Block copies in the prefix index, by worker.", ["worker"])
CONDUCTOR_INDEX_BYTES = Gauge("moonbus_conductor_index_bytes", "Memory the prefix index takes, estimated.")
CONDUCTOR_RESYNCS = Counter("moonbus_conductor_resyncs_total", "Times a worker's blocks were asked again, by why.",
                            ["worker", "why"])
CONDUCTOR_WORKERS = Gauge("moonbus_conductor_workers", "Known workers by role and state.", ["role", "state"])
CONDUCTOR_INDEX_DROPPED = Counter(
    "moonbus_conductor_index_dropped_blocks_total", "Block copies not indexed because the index was full.")
CONDUCTOR_PROMISED_BLOCKS = Gauge(
    "moonbus_conductor_promised_blocks", "Block copies that decisions made and no worker has announced yet.")
CONDUCTOR_KV_EVENTS_DROPPED = Counter(
    "moonbus_conductor_kv_events_dropped_total",
    "Batches not applied, by why (stale: repeated, of an unknown worker, of an earlier life, too early by far; spec: of "
    "another cache spec).", ["why"])
CONDUCTOR_REFUSED = Counter(
    "moonbus_conductor_refused_reports_total",
    "Loads and observed times that cannot be true (negative, no number), by kind.", ["kind"])
CONDUCTOR_NEEDED_WORKERS = Gauge(
    "moonbus_conductor_needed_workers", "Workers that the load of a model needs, by role, whatever there are; each "
    "conductor counts all of the cluster.", ["model", "role"])
CONDUCTOR_ADVISED_WORKERS = Gauge(
    "moonbus_conductor_advised_workers", "Workers that should have each role, of as many as there are; those that have "
    "it now unless one side lacks what the other can spare, or, with too few for both, others would serve more of the "
    "load.", ["model", "role"])
CONDUCTOR_IN_FLIGHT = Gauge("moonbus_conductor_in_flight_requests", "Requests placed and not over.")
CONDUCTOR_ESTIMATE_ERROR = Gauge(
    "moonbus_conductor_estimate_relative_error",
    "Smoothed |predicted - observed| / observed of a worker's cost model.", ["worker", "model"])

# Workers: prefill and decode.
WORKER_QUEUED = Gauge("moonbus_worker_queued_requests", "Requests accepted and not yet running.", ["kind"])
WORKER_RUNNING = Gauge("moonbus_worker_running_requests", "Requests that run.", ["kind"])
WORKER_QUEUE_SECONDS = Histogram("moonbus_worker_queue_seconds", "Time from acceptance to start.", ["kind"],
                                 buckets=_LATENCY_S)
WORKER_STEP_SECONDS = Histogram("moonbus_worker_step_seconds", "One engine step: a prefill chunk or a decode step.", ["kind"],
                                buckets=_GAP_S)
WORKER_BATCH_REQUESTS = Histogram("moonbus_worker_batch_requests", "Requests in one engine step.", ["kind"], buckets=_BATCH)
WORKER_PROMPT_TOKENS = Histogram("moonbus_worker_prompt_tokens", "Prompt lengths.", buckets=_TOKENS)
WORKER_COMPUTED_TOKENS = Counter("moonbus_worker_prefill_computed_tokens_total", "Prompt tokens computed.")
WORKER_REUSED_TOKENS = Counter("moonbus_worker_prefill_reused_tokens_total",
                               "Prompt tokens reused, by where their KV came from (local, fetched).", ["origin"])
WORKER_GENERATED_TOKENS = Counter("moonbus_worker_generated_tokens_total", "Tokens sampled.")
WORKER_RECOMPUTED_BLOCKS = Counter(
    "moonbus_worker_recomputed_blocks_total", "Blocks promised by a source and computed after all, by why.", ["why"])
WORKER_PREEMPTIONS = Counter("moonbus_worker_preemptions_total", "Running requests that lost their memory to older ones.")
WORKER_WASTED_PREFILL_TOKENS = Counter(
    "moonbus_worker_wasted_prefill_tokens_total", "Prompt tokens computed for requests that then did not decode.", ["why"])
WORKER_JOBS = Counter("moonbus_worker_jobs_total", "Jobs by kind and answer (accepted, or the code of the refusal).",
                      ["kind", "answer"])
WORKER_FAILURES = Counter("moonbus_worker_failures_total", "Jobs given up, by code.", ["code"])
KV_BLOCKS = Gauge("moonbus_kv_blocks", "Slots of the pool by use (used: held by requests; cached: reusable; free).", ["use"])
KV_CACHED_BYTES = Gauge("moonbus_kv_cached_bytes", "Bytes of reusable blocks by tier.", ["tier"])
KV_STORED_BLOCKS = Counter("moonbus_kv_stored_blocks_total", "Blocks that became reusable, by origin.", ["origin"])
KV_EVICTED_BLOCKS = Counter("moonbus_kv_evicted_blocks_total", "Blocks evicted, by reason.", ["reason"])
STORE_DOOR_REQUESTS = Counter(
    "moonbus_store_door_requests_total", "What clients of the store asked at the door, by kind and outcome (ok, or why not).", ["kind", "outcome"])
STORE_DOOR_VALUES = Counter("moonbus_store_door_values_total", "Values that clients of the store put and asked for, by what became of it (put, hit, miss; foreign: another tenant has it, which is a miss).", ["kind"])
STORE_CLIENT_ERRORS = Counter("moonbus_store_client_errors_total", "In programs that are clients of the store: calls that ended with an error, by its code.", ["code"])
KV_LARGEST_HOLE = Gauge("moonbus_kv_largest_hole_blocks", "Longest run of neighbouring free slots of the pool.")
KV_PROMOTED_BLOCKS = Counter("moonbus_kv_promoted_blocks_total", "Blocks read back from the SSD into DRAM.")
KV_SYNCS = Counter("moonbus_kv_syncs_total", "Resyncs served, by kind (events, snapshot).", ["kind"])

# SSD tier: every worker that has one.
SSD_BLOCKS = Gauge("moonbus_ssd_blocks", "Slots for blocks by use (used: hold one; ready: have room on the disk; limit: the most there may be).",
                  ["use"])
SSD_WRITTEN_BLOCKS = Counter("moonbus_ssd_written_blocks_total", "Blocks copied to the SSD.")
SSD_READ_BLOCKS = Counter("moonbus_ssd_read_blocks_total",
                          "Blocks wanted from the SSD, by outcome (ok, corrupt, error, stalled, busy, missing).", ["outcome"])
SSD_SECONDS = Histogram("moonbus_ssd_seconds", "One read or write of several blocks, waiting included.", ["call"],
                        buckets=_LATENCY_S)
SSD_FAILURES = Counter("moonbus_ssd_failures_total",
                       "What the SSD did not do, by call and why (corrupt, error, stalled, full).", ["call", "why"])
SSD_PAUSE_SECONDS = Gauge("moonbus_ssd_pause_seconds", "For how long the SSD is still left alone because it failed or was too slow; 0: it is used.")
SSD_RESTORED_BLOCKS = Counter(
    "moonbus_ssd_restored_blocks_total",
    "Blocks found at the start, by what they were (usable, damaged, orphaned: their parent is lost).", ["what"])

# Transfer engine.
TRANSFER_BYTES = Counter("moonbus_transfer_bytes_total", "KV bytes acknowledged, by path and direction (sent, received).",
                         ["path", "direction"])
TRANSFER_SECONDS = Histogram("moonbus_transfer_seconds", "One push, first byte to acknowledgement.", ["path"], buckets=_LATENCY_S)
TRANSFER_FAILURES = Counter("moonbus_transfer_failures_total", "Pushes that did not arrive, by path and code.", ["path", "code"])
TRANSFER_FAILOVERS = Counter("moonbus_transfer_failovers_total", "Pushes that went on by another path, by path before and after.",
                             ["before", "after"])
TRANSFER_PATH_CHOICES = Counter("moonbus_transfer_path_choices_total",
                                "Pushes by the path they began with and why it was that one; path none when there was no way.",
                                ["path", "reason"])
TRANSFER_IN_FLIGHT_BYTES = Gauge("moonbus_transfer_in_flight_bytes", "Bytes sent and not yet acknowledged.")

# Store-manager.
STORE_FEED_PENDING = Gauge("moonbus_store_feed_pending_messages", "Messages of the durable feed not yet in the catalog.")
STORE_ROWS = Counter("moonbus_store_rows_written_total", "Rows written, by table.", ["table"])
STORE_WRITE_FAILURES = Counter("moonbus_store_write_failures_total", "Batches the database did not take, by why.", ["why"])
STORE_REPAIRED = Counter("moonbus_store_repaired_total",
                         "Copies that a comparison with their worker put right, by kind (missing, stale).", ["kind"])
STORE_WRITE_SECONDS = Histogram("moonbus_store_write_seconds", "One batch into the database.", buckets=_LATENCY_S)
STORE_LEASE_SECONDS = Gauge(
    "moonbus_store_lease_seconds", "How much longer this store-manager leads unless it renews its lease; 0 for one that does not lead.")
STORE_MAP_BLOCKS = Gauge("moonbus_store_map_blocks", "Blocks in the replica map.")
STORE_MAP_COPIES = Gauge("moonbus_store_map_held_blocks", "Blocks in the replica map, once for each worker that holds them.")
STORE_MAP_BYTES = Gauge("moonbus_store_map_bytes", "Memory the replica map takes, about.")
STORE_UNSEEN_BLOCKS = Counter("moonbus_store_unseen_blocks_total", "Blocks that the full replica map did not take, or gave up for others.")
STORE_HOT_BLOCKS = Gauge("moonbus_store_hot_blocks", "Blocks used often lately.")
STORE_COPY_REQUESTS = Gauge("moonbus_store_copy_requests", "Requests to copy that wait for their answer.")
STORE_COPIED_BYTES = Counter("moonbus_store_copied_bytes_total", "Bytes copied between workers at the leader's request.")
STORE_ASKED_BLOCKS = Counter(
    "moonbus_store_asked_blocks_total",
    "Blocks that workers were asked about, by kind (copy, protect, trim, retire) and outcome (done, failed).", ["kind", "outcome"])
STORE_SUSPENDED_WORKERS = Gauge("moonbus_store_suspended_workers", "Workers that are left alone for a while after failures.")
