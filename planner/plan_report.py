"""A plan as text."""

import re

from planner.compiled import Step
from planner.planning import Plan
from sharding.mesh import STAGE


def show(plan: Plan, name: str, quantize: str, kv_cache_dtype: str) -> None:
    """Print the plan for the model of that name."""
    print(f"{name}, {plan.layers} layers, on {plan.topology}: {plan.devices} device(s)")
    print(f"batch {plan.batch}, context {plan.context}, weights {quantize}, cache {kv_cache_dtype}")
    for x in plan.ranking[:4]:
        note = "" if x.fits else ", does not fit"
        ms = f"{x.estimated_step_seconds * 1e3:.2f} ms before compiling"
        taken = (x.dp, x.ep, x.tp) == tuple(plan.mesh.values())[:3]
        stages = f"pp {plan.mesh[STAGE]} x " if STAGE in plan.mesh else ""
        print(f"{'mesh' if taken else 'or'} {stages}dp {x.dp} x ep {x.ep} x tp {x.tp}: {ms}{note}")
    show_step("A turn of the decode step" if STAGE in plan.mesh else "Decode step", plan.decode, plan)
    if plan.prefill:
        rows = "one row" + " of each data shard" * (plan.mesh["data"] > 1)
        show_step(f"Prefill, a chunk of {plan.prefill_piece} tokens of {rows}", plan.prefill, plan)


def show_step(title: str, step: Step, plan: Plan) -> None:
    """Print a compiled step: facts first, then estimates."""
    verdict = "fits" if step.fits else "DOES NOT FIT"
    print(f"\n{title}: {verdict}, {_gib(step.peak_bytes)} of {_gib(plan.hbm_capacity_bytes)}")
    print(f"  Needed per device: weights {_gib(plan.weights_bytes)}, cache {_gib(plan.cache_bytes)}")
    if step.seconds is None:
        return
    print(f"  As compiled, per device (in {step.compile_seconds:.0f} s)")
    if step.programs and len(step.programs) > 1:
        print(f"    programs: {_counts(step.programs)}")
    print(f"    arguments {_gib(step.argument_bytes)}, temporaries {_gib(step.temp_bytes)}", end="")
    print(f", {step.kernels:,} kernels" if step.code_bytes is None else f", code {_gib(step.code_bytes)}")
    moved, floor = step.hbm_bytes_per_step, step.floor_bytes_per_step
    print(f"    HBM traffic {moved / 1e6:,.1f} MB: {moved / floor:.3f} x the floor of {floor / 1e6:,.1f} MB")
    for part, size in step.hbm_bytes_by_part.items():
        print(f"      {part.replace('_', ' '):10}{size / 1e6:11,.1f} MB")
    for x in step.copies[:5]:
        if x["bytes"] * x["count"] > moved / 100:
            print(f"    copied: {x['count']} x {x['shape']}, {x['argument'] or 'temporary'}")
    if step.collectives_per_layer is not None:
        print(f"    collectives per layer: {_counts(step.collectives_per_layer)}")
    if STAGE in plan.mesh:
        print(f"    between stages: {_counts(step.between_stages)}; all collectives:")
    for x in step.collectives:
        scopes = re.split(r"/?jit\(\w*\)/|/?shard_map/|/", x["scope"])
        scope = next(filter(None, scopes), "")
        where = "between stages" if x.get("between_stages") else f"among {x['group']}"
        where += f", in {scope}" if scope else ""
        print(f"      {x['count']} x {x['kind']} of {x['shape']} {where}")
    print("  Estimate from the compiler's schedule (data sheet speeds)")
    ms = {what: f"{seconds * 1e3:.2f} ms" for what, seconds in step.schedule.items()}
    print(f"    {step.scheduled_seconds * 1e3:.2f} ms: computing {ms['computing']}", end="")
    print(f", waiting for HBM {ms['memory']}, for other devices {ms['collectives']}")
    sending = step.seconds["interconnect"]
    if sending:
        print(f"    collectives add {step.exposed_seconds * 1e3:.2f} ms, and take {sending * 1e3:.2f} ms")
    print("  Estimate without it (data sheet speeds, no collective hidden)")
    print("   ", ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in step.seconds.items()))
    per_row, in_all = step.tokens_per_second_per_sequence, step.tokens_per_second
    print(f"    {step.estimated_step_seconds * 1e3:.2f} ms, bound by {step.bound_by}: ", end="")
    print(f"{per_row:,.1f} tokens/s per row, {in_all:,.1f} in all")


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def _counts(kinds: dict[str, float]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in kinds.items()) or "none"
