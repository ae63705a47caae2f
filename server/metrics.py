"""The server's metrics, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serving.engine import Engine

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)


class Metrics:
    """Counters, gauges and histograms. A request of n samples counts n times. `ended` and `update` must be
    called by one thread.
    """

    def __init__(self):
        self.registry = CollectorRegistry()

        def make(kind, name: str, what: str, *labels: str, **options):
            return kind(f"llama_{name}", what, labels, registry=self.registry, **options)

        outcomes = "stop, length, cancelled, timeout, error"
        self.requests = make(Counter, "requests", f"requests that ended, by outcome: {outcomes}", "outcome")
        self.refused = make(
            Counter, "refused", "requests refused before they were queued, by status", "status"
        )
        self.prompt_tokens = make(Counter, "prompt_tokens", "tokens of prompts that were admitted")
        self.reused_tokens = make(
            Counter, "reused_prompt_tokens", "of these, tokens found in cached prefixes"
        )
        self.tokens = make(Counter, "generated_tokens", "tokens generated")
        self.drafted = make(Counter, "drafted_tokens", "draft tokens checked")
        self.accepted = make(Counter, "accepted_tokens", "draft tokens accepted")
        self.waiting = make(Gauge, "waiting_requests", "requests without a row")
        self.untokenized = make(Gauge, "untokenized_requests", "requests that wait to be tokenized")
        self.rows_in_use = make(Gauge, "rows_in_use", "rows with a request")
        self.rows = make(Gauge, "rows", "rows of the batch")
        self.first = make(
            Histogram, "first_token_seconds", "from submission to the first token", buckets=SECONDS
        )
        self.each = make(
            Histogram, "token_seconds", "mean of a request's tokens after the first", buckets=TOKEN_SECONDS
        )
        self.whole = make(Histogram, "request_seconds", "from submission to the end", buckets=SECONDS)
        self.counted = dict.fromkeys(("prompt_tokens", "reused_tokens", "tokens", "drafted", "accepted"), 0)

    def ended(self, job, reason: str, now: float) -> None:
        """Count a server.loop.Job that has just ended."""
        self.requests.labels(reason).inc()
        self.whole.observe(now - job.submitted)
        if job.first_token is not None:
            self.first.observe(job.first_token - job.submitted)
            if len(job.answer.tokens) > 1:
                self.each.observe((now - job.first_token) / (len(job.answer.tokens) - 1))

    def update(self, engine: Engine, open_requests: int) -> None:
        """Take over the engine's counts, and set the gauges."""
        for name, before in self.counted.items():
            value = getattr(engine.stats, name)
            getattr(self, name).inc(max(value - before, 0))  # Engine._fail takes some back
            self.counted[name] = max(value, before)
        in_use = sum(not row.free for row in engine.scheduler.rows)
        self.rows.set(len(engine.scheduler.rows))
        self.rows_in_use.set(in_use)
        self.waiting.set(max(open_requests - in_use, 0))

    def text(self) -> bytes:
        return generate_latest(self.registry)
