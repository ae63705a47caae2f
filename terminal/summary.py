"""The report at the end: speed in a few lines on stderr and, with --json, one object with all replies."""

import argparse
import json
import math

import jax
import numpy as np

from deployment.chips import BANDWIDTH
from deployment.memory import Deployment
from deployment.step_bytes import bytes_per_step
from generation.replies import Score
from serving.engine import Engine
from sharding.mesh import degrees
from terminal.answers import PromptReply, score_line
from terminal.launch import log
from terminal.loaded_models import Session


def report(session: Session, engine: Engine, replies: list[PromptReply]) -> None:
    args, target, started = session.args, session.models[0], session.startup.seconds
    stats, answered = engine.stats, [reply for reply in replies if reply.error is None]
    prefilled = stats.prefilled or stats
    seconds, steps = stats.seconds - prefilled.seconds, stats.steps - prefilled.steps
    rate = (stats.tokens - prefilled.tokens) / seconds if steps else None
    utilization = bandwidth_utilization(target, engine, answered, seconds / steps) if steps else None
    if "first tokens" in started:
        log(f"first tokens {started['first tokens']:.1f} s after the start")
    parts = [
        f"prompts read in {prefilled.seconds:.3f} s (prefill)",
        f"then {rate:.1f} tokens/s (decode)" if rate else "no decoding",
    ]
    if utilization:
        parts.append(f"{100 * utilization:.0f}% of the memory bandwidth")
    if stats.reused_tokens:
        parts.append(f"{stats.reused_tokens} of {stats.prompt_tokens} prompt tokens from cached prefixes")
    if stats.drafted:
        parts.append(f"{stats.acceptance_rate:.0%} of the draft tokens accepted")
        parts.append(f"{stats.tokens_per_step:.2f} tokens per step")
    log(", ".join(parts))
    cut = [reply for reply in answered if reply.answer.finish_reason == "length"]
    if cut and not args.score and not args.ignore_eos:
        what = f"{len(cut)} of {len(answered)} answers are cut"
        reasoned = sum(reply.stream.only_reasons for reply in cut)
        what += f", {reasoned} of them within the reasoning" if reasoned else ""
        log(f"{what}: they had as many tokens as --max-new-tokens allows")
    if args.json:
        print(json.dumps(dict(
            model=args.checkpoint, mesh=degrees(target.mesh),
            devices=jax.device_count(), responses=[reply.as_json() for reply in replies],
            startup_seconds=started, prefill_seconds=prefilled.seconds,
            decode_tokens_per_second=rate, engine_seconds=stats.seconds, bandwidth_utilization=utilization,
            prompt_tokens=stats.prompt_tokens, prompt_tokens_reused=stats.reused_tokens,
            decode_steps=stats.steps, tokens_per_step=stats.tokens_per_step,
            guesses_right=stats.acceptance_rate,
        )))  # fmt: skip
    elif not (args.output or args.prompt_file):
        print_totals(args, answered)


def print_totals(args: argparse.Namespace, answered: list[PromptReply]) -> None:
    """Print totals of scores or log-probabilities, which the texts do not have."""
    if args.score and len(answered) > 1:
        scores = [x for reply in answered for x in reply.answer.prompt_logprobs]
        print(f"all: {score_line(Score([], scores))}")
    elif args.logprobs:
        print("For log-probabilities by token, use --json. Of each answer as a whole:")
        print(" ".join(f"{math.fsum(reply.answer.logprobs):.4f}" for reply in answered))


def bandwidth_utilization(
    target: Deployment, engine: Engine, answered: list[PromptReply], seconds: float
) -> float | None:
    """The fraction of the device's memory bandwidth that a step of this duration used; None if not known."""
    bandwidth = BANDWIDTH.get(jax.devices()[0].device_kind)
    if not bandwidth or not answered:
        return None
    ranges = [(len(reply.request.prompt) - 1, len(reply.answer.tokens)) for reply in answered]
    positions = np.concatenate([first + np.arange(count) for first, count in ranges])
    rows = engine.stats.row_steps / engine.stats.steps / engine.programs.shards
    needed = bytes_per_step(
        engine.programs.weights, target.cfg, target.mesh, rows, positions, target.kv_dtype
    )
    return needed / seconds / bandwidth
