"""Break the program in one place at a time and see a test fail: python3 tests/mutate.py [WORD]...

Every psum, mask term and scale is removed in turn, in a copy of the repository. With words, only the mutations
whose text has one of them.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]

MESH = "tests/test_meshes.py::test_llama4[ep4-tp2]"
NAN = "tests/test_meshes.py::test_unwritten_slots_are_never_read"
SCOUT = "tests/test_transformers.py::test_tokens_and_logprobs_in_python[scout]"
TIED = "tests/test_transformers.py::test_tokens_and_logprobs_in_python[llama3-scaled-tied]"
ATTENTION = "tests/test_attention.py"
EXPERTS = "tests/test_experts.py"
SAMPLING = "tests/test_sampling.py"
ASSIGN = "tests/test_meshes.py::test_assign_rows"
GUESSES = "tests/test_meshes.py::test_guesses_of_a_step"
PIECES = "tests/test_meshes.py::test_pieces_of_any_width"
PREFILL = "tests/test_meshes.py::test_prefill_of_all_rows"
QUANTIZE = "tests/test_quantize.py"
COPY = "tests/test_meshes.py::test_prefill_does_not_copy_the_cache"
KERNELS = "tests/test_kernels.py"
CPU = "tests/test_cpu.py"
GPU = "tests/test_gpu.py"
SPEED = "tests/test_speed.py"
SLOT_MAPPING = "tests/test_meshes.py::test_slot_mapping"
CHECKPOINTS = "tests/test_checkpoints.py"
CONVERSION = "tests/test_conversion.py"
DEQUANTIZED, GGUF = "tests/test_dequantized.py", "tests/test_gguf.py"
HUB = "tests/test_hub.py"
QUALITY = "tests/test_quality.py"
SERVING = "tests/test_serving_benchmark.py"
INT4 = "tests/test_int4.py"
GRAMMAR = "tests/test_grammar.py::test_beside_others"
SERVER = "tests/test_server.py::"
GPU_INT4 = "tests/test_gpu.py::test_int4"
QWEN = "tests/test_transformers.py::test_tokens_and_logprobs_in_python[qwen3]"
FAMILY = "tests/test_transformers.py::test_tokens_and_logprobs_in_python[{}]".format
MISTRAL, GEMMA, GPT2, QWEN2, GLM = map(FAMILY, ("mistral", "gemma", "gpt2", "qwen2", "glm"))
MIXTRAL, LATENT = map(FAMILY, ("mixtral", "glm4-moe-lite"))
LATENT_TP8 = "tests/test_families.py::test_on_a_mesh[glm4-moe-lite-tp8]"
MISTRAL_TP8 = "tests/test_families.py::test_on_a_mesh[mistral-tp8]"
FAMILIES = "tests/test_families.py"
WINDOWS = "tests/test_reuse_search.py::test_many[chunks7-4-draft-float32-True]"
ROUTERS = "tests/test_experts.py::test_routers"
EXECUTORS = "tests/test_executors.py"
RINGS = "tests/test_rings.py"
INT8 = "tests/test_trained.py::test_divergence_of_int8"
READ_ONCE = "tests/test_generation.py::test_each_prompt_token_is_read_once"
EDGES = "tests/test_generation.py::test_reuse_at_the_edges_of_chunks[rings]"
STOPS = "tests/test_generation.py::test_stop_tokens"
SCORES = "tests/test_generation.py::test_log_probabilities_of_prompts[tiny-llama3-1]"
REFUSED = "tests/test_generation.py::test_requests_that_do_not_fit"
CANCEL = "tests/test_generation.py::test_cancel"
FETCHED = "tests/test_generation.py::test_a_step_is_fetched_after_the_next_is_sent"
END = "tests/test_generation.py::test_an_end_does_not_wait_for_another_prompt"
ROWS = "tests/test_generation.py::test_which_row_a_request_takes"
DRAFT = "tests/test_speculation.py::test_greedy[ring-1-itself]"
CHUNK_DRAFT = "tests/test_speculation.py::test_greedy[ring-1-chunks]"
LOOKUP = "tests/test_speculation.py::test_prompt_lookup[4-1]"
DRAFT_MESH = "tests/test_speculation.py::test_the_mesh_of_a_draft"
STOP_STRINGS = "tests/test_text.py::test_stop_strings"
SENTENCEPIECE = "tests/test_text.py::test_sentencepiece"
SINGLE_BYTES = "tests/test_text.py::test_half_a_character_of_single_bytes"
GARBAGE = "tests/test_answers.py::test_garbage_is_not_collected_until_the_programs_are_compiled"
SAMPLES = "tests/test_answers.py::test_samples"
SAMPLES_IN_A_FILE = "tests/test_answers.py::test_samples_in_a_file"
STOP_STRINGS_OF_ANSWERS = "tests/test_answers.py::test_stop_strings"
INTERRUPTED = "tests/test_answers.py::test_interrupted_anywhere"
DAMAGED = "tests/test_command_line.py::test_damaged_weights"
WAITS = "tests/test_generation.py::test_what_waits_for_a_prefix"
SHORT = "tests/test_generation.py::test_a_short_prompt_does_not_wait_for_a_long_one"
LONG = "tests/test_generation.py::test_a_long_prompt_is_not_held_up_by_short_ones"
BAD = "tests/test_generation.py::test_what_no_model_could_answer"
DAMAGED_SCORE = "tests/test_generation.py::test_a_request_that_computes_nan[1-0]"
DAMAGED_TOKEN = "tests/test_command_line.py::test_a_damaged_token"
DAMAGED_TURN = "tests/test_chat.py::test_a_turn_that_computes_nan"
SMALLEST = "tests/test_hosts.py::test_memory_of_the_smallest"
GATHER, FIRST, AGREE, PORT, NOBODY = (
    f"tests/test_distributed.py::test_{name}"
    for name in ("gather", "from_first", "agree", "port_in_use", "nobody_comes")
)
ROLL_LEFT, ROLL_STRANGERS, ROLL_OPTIONS = (
    f"tests/test_distributed.py::test_roll_call_{name}"
    for name in ("of_one_that_leaves", "among_strangers", "of_wrong_options")
)
STOPPED, KILLED, KILLED_FIRST, TERMINATED = (
    f"tests/test_distributed.py::test_endings[{name}]"
    for name in ("compiling-19-0", "decoding-9-1", "loading-9-0", "decoding-15-0")
)
VERSIONS, WEIGHTS = (
    f"tests/test_distributed.py::test_differences[{name}]" for name in ("numpy is", "'s weights is")
)
TWO = "tests/test_hosts.py::test_two_processes_by_default[3-mesh2]"
BYTES = "tests/test_command_line.py::test_bytes_per_step"
ACTIVE = "tests/test_command_line.py::test_active_experts"
STAGES = "tests/test_stages.py::test_many_requests[short-pp2-ep2-tp2-16]"
MEMORY = "tests/test_command_line.py::test_rows_that_fit"

# (file, what is there, what to put in its place, the test that must fail)
MUTATIONS = [
    ("serving/scheduler.py", "return max(self.source_computed, self.computed + self.steps_in_flight * width)", "return self.computed + self.steps_in_flight * width", "tests/test_reuse_search.py::test_a_row_that_goes_back_again_and_again"),
    ("ops/grouped_matmul.py", "weights, units = in_hbm((weights, units))", "pass", "tests/test_plan.py::test_latent_attention"),
    ("model.py", "(position - self.size + 1) * (position >= self.size)", "(position - self.size) * (position >= self.size)", MISTRAL),
    ("model.py", "return length, (jnp.where(wraps, local_slots(high), 0), local_slots(low))", "return length, None", MISTRAL),
    ("model.py", "(jnp.where(wraps, local_slots(high), 0), local_slots(low))", "(0 * local_slots(high), local_slots(low))", MISTRAL),
    ("model.py", "(jnp.where(wraps, local_slots(high), 0), local_slots(low))", "(jnp.where(wraps, high, 0), low)", MISTRAL_TP8),
    ("model.py", "return attend_causal(own, new, segment, mask.window)", "return attend_causal(own, new, segment)", MISTRAL),
    ("serving/rings.py", "return n if first >= oldest else 0", "return n", WINDOWS),
    ("families/gpt2.py", "y = y - jnp.mean(y, -1, keepdims=True)", "pass", GPT2),
    ("model.py", "y * (self.offset + w.astype(jnp.float32))", "y * w.astype(jnp.float32)", GEMMA),
    ("families/gpt2.py", "w.weight.astype(jnp.float32) + w.bias.astype(jnp.float32)", "w.weight.astype(jnp.float32)", GPT2),
    ("families/gpt2.py", "x + w.at[positions].get(mode=\"clip\")", "x", GPT2),
    ("model.py", "x * jnp.asarray(cfg.embedding_scale, x.dtype)", "x", GEMMA),
    ("model.py", 'add_bias(einsum("bTD,kgHD->bTkgH", x, w.q), w.q_bias)', 'einsum("bTD,kgHD->bTkgH", x, w.q)', QWEN2),
    ("model.py", 'add_bias(einsum("bTD,khD->bTkh", x, w.k), w.k_bias)', 'einsum("bTD,khD->bTkh", x, w.k)', QWEN2),
    ("model.py", 'add_bias(einsum("bTD,khD->bTkh", x, w.v), w.v_bias)', 'einsum("bTD,khD->bTkh", x, w.v)', QWEN2),
    ("model.py", "return add_bias(lax.psum(einsum(\"bTkgH,DkgH->bTD\", attended, w.o), MODEL), w.o_bias)", "return lax.psum(einsum(\"bTkgH,DkgH->bTD\", attended, w.o), MODEL)", GPT2),
    ("families/gpt2.py", 'add_bias(einsum("bTD,fD->bTf", x, w.up), w.up_bias)', 'einsum("bTD,fD->bTf", x, w.up)', GPT2),
    ("families/gpt2.py", 'return add_bias(lax.psum(einsum("bTf,Df->bTD", h, w.down), MODEL), w.down_bias)', 'return lax.psum(einsum("bTf,Df->bTD", h, w.down), MODEL)', GPT2),
    ("model.py", "gelu_tanh=partial(jax.nn.gelu, approximate=True)", "gelu_tanh=jax.nn.silu", GEMMA),
    ("model.py", "return jnp.concatenate([rotate(x[..., :width], rotation), x[..., width:]], -1)", "return x", GLM),
    ("model.py", "jax.nn.sigmoid(logits) + w.router_bias", "jax.nn.sigmoid(logits)", LATENT),
    ("model.py", "return chosen, score * kind.router.factor", "return chosen, score", LATENT),
    ("families/latent_attention.py", "return Columns(self.L + self.R, (0, self.L), (self.N + self.R) ** -0.5)", "return Columns(self.L + self.R, (0, self.L), (self.L + self.R) ** -0.5)", LATENT),
    ("families/latent_attention.py", "self.norm(latent, w.kv_a_norm), rotate(k_rope", "latent, rotate(k_rope", LATENT),
    ("families/latent_attention.py", 'compressed = self.norm(einsum("bTD,QD->bTQ", x, w.q_a), w.q_a_norm)', 'compressed = einsum("bTD,QD->bTQ", x, w.q_a)', LATENT),
    ("families/latent_attention.py", "rotate(k_rope, rotation)", "k_rope", LATENT),
    ("model.py", "jax.checkpoint(decoder_layer, static_argnums=5) if remat else decoder_layer", "decoder_layer", FAMILIES + "::test_recomputation"),
    ("model.py", "rotations[kind.rope]", "rotations[kinds[0].rope]", FAMILIES + "::test_variations[two_ropes]"),
    ("model.py", "return frequencies / np.float32(self.factor)", "return frequencies", FAMILIES + "::test_variations[two_ropes]"),
    ("model.py", "x + normalize(y, kind.post_norm, w.attention_post_norm)", "x + y", FAMILIES + "::test_variations[norms_after]"),
    ("model.py", "x + normalize(y, kind.post_norm, w.feed_forward_post_norm)", "x + y", FAMILIES + "::test_variations[norms_after]"),
    ("model.py", "cfg.logit_scale * logits", "logits", FAMILIES + "::test_variations[capped_logits]"),
    ("model.py", "cfg.logit_softcap * jnp.tanh(logits / cfg.logit_softcap)", "logits", FAMILIES + "::test_variations[capped_logits]"),
    ("ops/kv_cache.py", "return used if used < LANES else -(-used // LANES) * LANES", "return used", "tests/test_plan.py::test_latent_attention"),
    ("ragged_attention.py", "any_seen &= (gap[0][r] > 0) | (gap[1][r] < length[r])", "pass", ATTENTION),
    ("ragged_attention.py", "begin = jnp.where(gap[0][r] == 0, gap[1][r], 0)", "begin = gap[1][r]", ATTENTION),
    ("families/mixtral.py", '(r"\\.w1\\.weight$", ".gate_proj.weight")', '(r"\\.w1\\.weight$", ".up_proj.weight")', MIXTRAL),
    ("families/family.py", "return extra or bool", "return bool", FAMILIES + "::test_a_layer_that_predicts_the_token_after_the_next"),
    ("families/experts.py", 'Stored("mlp.experts.gate_up_proj", "E[M+M]D", 1)', 'Stored("mlp.experts.gate_up_proj", "E[M+M]D", 0)', FAMILIES + "::test_joined_experts"),
    ("checkpoints/file_plan.py", "return weight[1].stored.name, weight[1].letters", "return weight[1].stored.name", FAMILIES + "::test_converted_int8[glm4-moe-lite]"),
    ("sharding/arrays.py", '"sm" if on_tpu(mesh) else "s"', '"s"', "tests/test_plan.py::test_narrow_experts"),
    ("ops/tpu.py", "not int8 and (rows.size > LANES or D % LANES or nbytes > MOVED_BYTES)", "not int8", "tests/test_plan.py::test_a_small_embedding_stays_where_it_is"),
    # collectives
    ("model.py", 'lax.psum(einsum("bTkgH,DkgH->bTD", attended, w.o), MODEL)', 'einsum("bTkgH,DkgH->bTD", attended, w.o)', MESH),
    ("model.py", "return lax.psum(y, MODEL)", "return y", MESH),
    ("model.py", 'x = lax.psum(jnp.where(here[..., None], x, 0), MODEL)', 'x = jnp.where(here[..., None], x, 0)', MESH),
    ("sharding/sampling.py", "lax.pmax(jnp.max(logits, -1, keepdims=True), MODEL)\n    ids", "jnp.max(logits, -1, keepdims=True)\n    ids", SAMPLING),
    ("sharding/sampling.py", "lax.pmin(jnp.min(ids, -1), MODEL)", "jnp.min(ids, -1)", SAMPLING),
    ("sharding/sampling.py", "lax.psum(jnp.sum(jnp.exp(logits - peak), -1, keepdims=True), MODEL)", "jnp.sum(jnp.exp(logits - peak), -1, keepdims=True)", MESH),
    ("sharding/sampling.py", "lax.psum(jnp.sum(chosen, -1), MODEL)", "jnp.sum(chosen, -1)", MESH),
    ("model.py", "if sharing == 1:\n        return o", "return o", MESH),
    ("sharding/sampling.py", "lax.psum(jnp.stack([mass_from(digit) for digit in range(1, 1 << digit_bits)], -1), MODEL)", "jnp.stack([mass_from(digit) for digit in range(1, 1 << digit_bits)], -1)", SAMPLING),
    ("sharding/sampling.py", "peak = lax.pmax(jnp.max(logits, -1, keepdims=True), MODEL)\n    return", "peak = jnp.max(logits, -1, keepdims=True)\n    return", MESH),
    ("sharding/sampling.py", "peak = lax.pmax(jnp.max(logits, -1, keepdims=True), MODEL)\n        logits", "peak = jnp.max(logits, -1, keepdims=True)\n        logits", SAMPLING),
    ("model.py", "if lax.axis_size(SLOTS) == 1:", "if True:", MESH),
    # masks
    ("model.py", "jnp.where(here[..., None], x, 0)", "x", MESH),
    ("model.py", "(n + sharing - 1 - lax.axis_index(SLOTS)) // sharing", "n // sharing", MESH),
    ("model.py", "attend_cached(q, kv if mask.ring else written", "attend_cached(q, written", SCOUT),
    ("model.py", "attend_cached(q, kv if mask.ring else written", "attend_cached(q, kv", COPY),
    ("model.py", "parts.append(attend_chunk(q, new, chunk, kind.mask))", "parts.append(attend_chunk(q, as_cached(project(x, w, chunk, rotation, kind)[1], None, new.columns), chunk, kind.mask))", PIECES),
    ("ops/attention.py", "jnp.exp(lse - jnp.where(peak == -jnp.inf, 0, peak))", "jnp.exp(lse - peak)", ATTENTION),
    ("model.py", "chunk.positions, chunk.valid\n", "chunk.positions, chunk.positions >= 0\n", SCOUT),
    ("model.py", "keep &= slot >= (chunk.start + chunk.count)[:, None] - mask.ring", "pass", SLOT_MAPPING),
    ("model.py", "keep & (slot % sharing == lax.axis_index(SLOTS))", "keep", MESH),
    ("model.py", "return jnp.where(vocabulary_shard(logits) < cfg.V, logits, -jnp.inf)", "return logits", MESH),
    ("ops/attention.py", "        v = jnp.where(seen, v, 0)", "        pass", ATTENTION),
    ("ops/attention.py", 'k = v = jnp.where(seen, kv.values, 0)', 'k = v = kv.values', NAN),
    ("ops/attention.py", "jnp.where(mask, p * v_scale[:, :, None, None, :].astype(jnp.float32), 0)", "p * v_scale[:, :, None, None, :].astype(jnp.float32)", ATTENTION),
    ("ops/attention.py", "peak = jnp.where(peak == -jnp.inf, 0, peak)", "pass", ATTENTION),
    ("model.py", "jnp.where((local >= 0) & (local < n_local) & chunk.valid[..., None], local, n_local)", "local", EXPERTS),
    ("model.py", " & chunk.valid[..., None]", "", EXPERTS),
    ("ops/attention.py", "mask = (back >= 0) & ", "mask = (back > -T) & ", ATTENTION),
    ("ops/attention.py", "(back < (window or T)) & ", "(back < T) & ", ATTENTION),
    ("ops/attention.py", " & (segment[:, :, None] == segment[:, None])", "", ATTENTION),
    ("model.py", 'segment = 0 * chunk.positions if mask.window else mask.first_visible(chunk.positions)', 'segment = 0 * chunk.positions', SCOUT),
    ("model.py", 'any_visible = (first < end) & (chunk.count > 0)[:, None]', 'any_visible = (chunk.count > 0)[:, None]', SCOUT),
    ("model.py", 'end = jnp.where(wraps, jnp.minimum(end, mask.ring), high)', 'end = jnp.minimum(end, mask.ring)', SCOUT),
    ("model.py", "lax.dynamic_slice_in_dim(q, lax.axis_index(SLOTS) * g, g, 3)", "q[:, :, :, :g]", MESH),
    ("ops/attention.py", 'mask = (slots < length[..., None]) & filled[:, None]', 'mask = jnp.broadcast_to(filled[:, None], (*length.shape, block))', ATTENTION),
    ("ops/attention.py", 'filled = (slots >= i * block) & (slots < longest[:, None])', 'filled = slots < longest[:, None]', ATTENTION),
    ("ops/attention.py", 'mask = (slots < length[..., None]) & filled[:, None]', 'mask = jnp.broadcast_to(filled[:, None] | True, (*length.shape, block))', ATTENTION),
    ("ops/attention.py", 'mask &= (slots < gap[0][..., None]) | (slots >= gap[1][..., None])', 'pass', ATTENTION),
    ("ops/attention.py", "jnp.where(filled[:, None, :, None], x, 0)", "x", ATTENTION),
    ("ops/attention.py", "jnp.where(sees, 1, 2)", "jnp.ones_like(sees, int)", ATTENTION),
    ("ragged_attention.py", "(slots >= low) & (slots < high)", "slots < high", ATTENTION),
    ("ragged_attention.py", 'return inside & ((slots < gap[0][r] - base) | (slots >= gap[1][r] - base))', 'return inside', ATTENTION),
    ("ragged_attention.py", "p = jnp.where(seen(p.shape, 1), p, 0)", "pass", ATTENTION),
    ("ragged_attention.py", "scores = jnp.where(seen(scores.shape, 1), scores, MASKED)", "pass", ATTENTION),
    ("ragged_attention.py", "values[...] = clean.astype(values.dtype)", "pass", ATTENTION),
    ("ragged_attention.py", "inside = (place[r] >= at) & (slot < size)", "inside = slot < size", ATTENTION),
    ("ragged_attention.py", "                for copy in writes():\n                    copy.wait()", "                pass", ATTENTION),
    ("ragged_attention.py", "at if S % small == 0 else jnp.minimum(at, S - size)", "at", ATTENTION),
    ("ragged_attention.py", "q.swapaxes(1, 2).reshape(R, T * G, H)", "q.reshape(R, T * G, H)", ATTENTION),
    ("ops/attention.py", "jnp.where(sees[..., None, None, None], o, 0)", "o", ATTENTION),
    ("ops/attention.py", "jnp.where(sees[..., None, None], lse, -jnp.inf)", "lse", ATTENTION),
    ("ops/grouped_matmul.py", "jnp.where((chosen < E)[:, None], jnp.zeros_like(y).at[order].set(y), 0)", "jnp.zeros_like(y).at[order].set(y)", EXPERTS),
    ("ops/grouped_matmul.py", "jnp.where(i < n_active[0], j, M // width - 1)", "j", EXPERTS),
    ("ops/grouped_matmul.py", "    @pl.when(i < n_active[0])\n    def _():", "    if True:", EXPERTS),
    ("ops/tpu.py", "(row[b], at[b] + j) if moving", "(row[b], j) if moving", KERNELS),
    ("ops/tpu.py", "(row[b], at[b] + j) if moving", "(b, at[b] + j) if moving", KERNELS),
    ("ops/attention.py", "        kv = write_window(kv, new, before_end, row, window)\n", "", KERNELS),
    ("ops/attention.py", "jnp.where(mask, new, take_slots(cache, row, first, LANES, n, axis))", "new", KERNELS),
    ("ops/attention.py", "lse = jnp.where(lse < MASKED / 2, -jnp.inf, lse)", "lse = lse", ATTENTION),
    # scales
    ("ragged_attention.py", "scores = scores * scale[0:1].astype(jnp.float32)", "pass", ATTENTION),
    ("ragged_attention.py", "p * scale[1:2].astype(jnp.float32)", "p", ATTENTION),
    ("ragged_attention.py", "(scores[:G] << 8) + scores[G:]", "scores[:G] << 8", ATTENTION),
    ("ops/attention.py", '1 if s is None else s[..., None].astype(jnp.float32)', '1', ATTENTION),
    ("ops/grouped_matmul.py", "y * scale.at[chosen[order]].get(mode=\"clip\")", "y", EXPERTS),
    ("ops/grouped_matmul.py", "y * units[which][pl.ds(lax.rem(active[i], ROW_TILE), 1)]", "y", EXPERTS),
    ("ops/grouped_matmul.py", "(gate * factor, up * factor)", "(gate * factor, up)", EXPERTS),
    ("ops/grouped_matmul.py", "down if scales == \"input\" else down * factor", "down", EXPERTS),
    ("ops/grouped_matmul.py", "rows = (rows * factor).astype(x.dtype)", "pass", EXPERTS),
    ("ops/grouped_matmul.py", "y * factor if scales == \"output\" else y", "y", EXPERTS),
    ("ops/attention.py", 'preferred_element_type=jnp.float32) * kv.columns.scale', 'preferred_element_type=jnp.float32)', ATTENTION),
    ("ops/attention.py", "scores = scores * k_scale[:, :, None, None, :].astype(jnp.float32)", "pass", ATTENTION),
    ("ops/attention.py", "p * v_scale[:, :, None, None, :].astype(jnp.float32)", "p", ATTENTION),
    ("ops/cpu.py", "(high + low / PART) * unit", "high * unit", CPU),
    ("ops/cpu.py", "(high + low / PART) * unit", "high + low / PART", CPU),
    ("ops/cpu.py", "if decode and w.dtype == jnp.int8:", "if False:", CPU),
    ("quantize.py", "jnp.max(jnp.abs(x), tuple(range(1, x.ndim)), keepdims=True)", "jnp.max(jnp.abs(x))", CPU),
    ("ops/attention.py", "BLOCK if T > 1 else DECODE_BLOCK", "BLOCK", CPU),
    ("ops/gpu.py", "scores = scores * factor(0)", "pass", GPU),
    ("ops/gpu.py", "p = p * factor(1)", "pass", GPU),
    ("ops/gpu.py", "inside = (slots >= begin) & (slots < end)", "inside = slots < end", GPU),
    ("ops/gpu.py", "visible = (slots >= low[:, None]) & (slots < high[:, None])", "visible = inside[None]", GPU),
    ("ops/gpu.py", "mask=used & inside)", "mask=inside)", GPU),
    ("ops/gpu.py", "return jnp.sum(y, 0)", "return y[0]", GPU),
    ("benchmarks/speed.py", "+ 2 * cfg.V * cfg.D", "", SPEED),
    ("benchmarks/speed.py", "positions - kind.mask.first_visible(positions)", "positions", SPEED),
    ("benchmarks/speed.py", "share = kind.feed_forward.A / kind.feed_forward.E", "share = 1", SPEED),
    ("quantize.py", "preferred_element_type=jnp.float32) * q.scale", "preferred_element_type=jnp.float32)", QUANTIZE),
    ("ops/matmul.py", "x.astype(scale.dtype) * scale[rows][..., None]", "x", INT8),
    ("ops/tpu.py", "lax.rem(rows[pl.program_id(0)], tile_rows)", "0", KERNELS),
    ("model.py", "q = (q * growth[:, :, None, None, None]).astype(q.dtype)", "pass", SCOUT),
    ("model.py", "q, k = self.qk_norm(q, w.q_norm), self.qk_norm(k, w.k_norm)", "pass", SCOUT),
    ("model.py", "self.qk_norm(k, w.k_norm)", "self.qk_norm(k, None)", QWEN),
    ("model.py", "score / jnp.sum(score, -1, keepdims=True) if kind.router.normalized else score", "score", ROUTERS),
    ("model.py", "return y if w is None else y * w\n", "return y\n", TIED),
    # sampling
    ("sharding/sampling.py", "logits = logits / jnp.where(drawn, jnp.clip(sampling.temperature[:, None], 1e-6, 1e30), 1)", "pass", SAMPLING),
    ("sharding/sampling.py", "jnp.clip(sampling.temperature[:, None], 1e-6, 1e30)", "jnp.minimum(sampling.temperature[:, None], 1e30)", "tests/test_sampling.py::test_extremes_are_greedy"),
    ("sharding/sampling.py", "jnp.where(drawn, jax.vmap(noise)(sampling.seed, length)[:, ids], 0)", "jax.vmap(noise)(sampling.seed, length)[:, ids]", SAMPLING),
    ("sharding/sampling.py", "(sampling.seed, length)[:, ids]", "(sampling.seed, length)[:, : logits.shape[-1]]", SAMPLING),
    ("sharding/sampling.py", "jnp.where(sampling.top_k > 0, sampling.top_k, jnp.inf)", "sampling.top_k", SAMPLING),
    ("sharding/sampling.py", "jnp.where(sampling.top_p < 1, sampling.top_p, jnp.inf)", "sampling.top_p", SAMPLING),
    ("sharding/sampling.py", "peak + jnp.log(sampling.min_p)[:, None]", "jnp.log(sampling.min_p)[:, None]", SAMPLING),
    ("sharding/sampling.py", "ids = tokens - lax.axis_index(MODEL) * logits.shape[-1]", "ids = tokens", SAMPLING),
    ("sharding/sampling.py", "at >= jnp.reshape(start, (-1, 1))", "at >= 0", SAMPLING + "::test_answer_penalties"),
    ("sharding/sampling.py", "frequency * count", "frequency * (count > 0)", SAMPLING + "::test_answer_penalties"),
    ("sharding/sampling.py", "lax.dynamic_slice_in_dim(bits, lax.axis_index(MODEL) * v, v, 1)", "bits[:, :v]", SAMPLING + "::test_bias_and_allowed"),
    ("sharding/sampling.py", "lax.top_k(logits, min(n, logits.shape[-1]))", "lax.top_k(logits, 1)", SAMPLING + "::test_top_logprobs"),
    ("sharding/sampling.py", "best - log_normalizer(logits))", "best)", SAMPLING + "::test_top_logprobs"),
    ("serving/scheduler.py", "(self.constrained and self.steps_in_flight)", "False", GRAMMAR),
    ("serving/scheduler.py", "1 if row.constrained else width", "width", GRAMMAR + "[True-1]"),
    ("serving/scheduler.py", "            if row.constrained:", "            if False:", GRAMMAR),
    ("serving/scheduler.py", "count[:] = 0", "pass", "tests/test_grammar.py::test_rows_of_grammars_step_together"),
    ("serving/engine.py", "dataclasses.replace(self.sampling[number], allowed=micro_batch.allowed())", "self.sampling[number]", GRAMMAR),
    ("serving/engine.py", "next(options for options in self.option_sets if asked <= options)", "self.option_sets[-1]", "tests/test_grammar.py::test_programs_for_what_rows_ask"),
    ("serving/engine.py", "x[row, :count, :n].tolist()", "x[row, :count, -n:].tolist()", "tests/test_grammar.py::test_likeliest_of_prompts_and_answers"),
    ("serving/grammar.py", "return self.matcher.is_stopped()", "return False", "tests/test_grammar.py::test_a_real_grammar"),
    ("server/loop.py", "if job is None or job.done:", "if job is None:", SERVER + "test_echo_without_an_answer"),
    ("server/loop.py", "self.engine.cancel(job.answer)\n", "pass\n", SERVER + "test_a_client_that_leaves"),
    ("server/loop.py", "self.open_jobs -= len(ended)", "pass", SERVER + "test_echo_without_an_answer"),
    ("server/loop.py", "if beyond > 0:", "if False:", SERVER + "test_queue"),
    ("server/app.py", "            self.loop.cancel(self.jobs)\n", "            pass\n", SERVER + "test_a_client_that_leaves"),
    ("server/app.py", 'if kind != "application/json":', "if False:", SERVER + "test_other_refusals"),
    ("server/app.py", "elif self.local and not is_local(", "elif False and not is_local(", SERVER + "test_other_refusals"),
    ("server/app.py", "if not hmac.compare_digest(read(given).encode(), self.key.encode()):", "if False:", SERVER + "test_guard"),
    ("server/page.html", "headers, body, signal }", "headers, body }", "tests/test_page.py::test_stop"),
    ("server/page.html", "piece.textContent =", "piece.innerHTML =", "tests/test_page.py::test_markup_is_text"),
    ("server/page.html", "if (conversations.includes(conversation)) store(", "if (false) store(", "tests/test_page.py::test_conversations"),
    ("server/api_requests.py", "seed=(seed + i) % 2**32", "seed=seed % 2**32", SERVER + "test_samples_and_seeds"),
    ("server/api_responses.py", "[None, *answer.prompt_logprobs, *logprobs]", "[*answer.prompt_logprobs, *logprobs, None]", SERVER + "test_log_probabilities[False]"),
    ("sharding/sampling.py", "(tokens >= 0) & (ids >= 0)", "ids >= 0", SAMPLING),
    ("sharding/sampling.py", " & (at < end[:, None])", "", SAMPLING),
    ("sharding/sampling.py", "jnp.where(logits > 0, logits / penalty, logits * penalty)", "logits / penalty", SAMPLING),
    # the programs
    ("serving/steps.py", "tokens[chunk.row], chunk.positions + 1)", "tokens[chunk.row], chunk.positions)", PREFILL),
    ("serving/steps.py", "return length.at[slice(None) if chunk.row is None else chunk.row].add(chunk.count)", "return length", PREFILL),
    ("serving/steps.py", "return length.at[slice(None) if chunk.row is None else chunk.row].add(chunk.count)", "return length + chunk.count", PREFILL),
    ("serving/steps.py", "jnp.minimum(count, most_readable(length, cfg))", "count", GUESSES),
    ("serving/steps.py", "jnp.cumprod(right, 1, dtype=jnp.int32)", "right.astype(jnp.int32)", GUESSES),
    ("serving/steps.py", "return jnp.minimum(count, 1 + ", "return jnp.minimum(read.shape[1], 1 + ", GUESSES),
    ("serving/steps.py", 'with_drafts = tokens.at[rows, chunk.positions].set(read, mode="drop")', "with_drafts = tokens", GUESSES),
    ("serving/steps.py", "length = chunk.positions.reshape(-1) + 1", "length = jnp.repeat(chunk.start, T) + 1", GUESSES),
    ("serving/steps.py", "length=batch.cache.length + output.count", "length=batch.cache.length + chunk.count", GUESSES),
    ("serving/steps.py", "jnp.where(rows[i] < 0, to, source[i])", "to", ASSIGN),
    ("serving/steps.py", "jnp.where(rows[i] < 0, to, source[i])", "source[i]", ASSIGN),
    ("serving/steps.py", "jnp.where(rows < 0, old_length.size, rows)", "rows", ASSIGN),
    ("serving/steps.py", 'old_length.at[rows].set(length, mode="drop")', "old_length", ASSIGN),
    # the engine
    ("serving/engine.py", "rows[i], sources[i] = (", "sources[i], rows[i] = (", READ_ONCE),
    ("serving/programs.py", "(source != rows).any()", "(source != rows).all()", "tests/test_generation.py::test_requests_on_a_mesh[dp2-ep2-tp2]"),
    ("serving/engine.py", "            self.sampling[number] = micro_batch.sampling(options)\n", "            pass\n", SAMPLES),
    ("serving/engine.py", 'answer.finish_reason or "length"', '"length"', CANCEL),
    ("serving/programs.py", "score = max((x.score for x in chunks if x.score is not None), default=None)", "score = None", "tests/test_generation.py::test_log_probabilities_of_prompts[ring-dp8]"),
    ("serving/engine.py", "min(row.prefill_left, width) if row else 0", "row.prefill_left if row else 0", SCORES),
    ("serving/engine.py", "if np.isnan(scores.logprobs[i, :n]).any():", "if False:", DAMAGED),
    ("serving/programs.py", "if unread > width // 2", "if unread >= width", "tests/test_generation.py::test_width_of_a_prefill_chunk"),
    ("serving/engine.py", "for _ in range(expected):", "while self.in_flight:", FETCHED),
    ("serving/engine.py", "or token in answer.request.stop:", "or token in answer.request.stop and len(answer.tokens) < answer.request.max_new_tokens:", STOPS),
    ("serving/engine.py", 'answer.finish_reason or "stop"', 'answer.finish_reason or "length"', STOPS),
    ("serving/engine.py", "                if answer.finish_reason:\n                    break\n", "", "tests/test_speculation.py::test_greedy[tiny-llama3-1-lookup 1]"),
    ("serving/engine.py", "return bool(self.in_flight) or", "return bool(self.in_flight) and", END),
    ("serving/engine.py", "request.positions > max_len", "request.positions >= max_len", REFUSED),
    ("serving/engine.py", "                self.scheduler.queue.remove(answer)", "                pass", CANCEL),
    ("serving/requests.py", 'used = used | {"seed"} if', "used = used if", INTERRUPTED),
    ("serving/requests.py", 'else used - RANDOM_OPTIONS', "else set()", "tests/test_answers.py::test_each_prompt_has_its_own_options"),
    ("serving/programs.py", "prefill_width(longest - 1) >= width", "prefill_width(longest - 1) > width", "tests/test_generation.py::test_requests_on_a_mesh[dp8]"),
    ("serving/engine.py", "all(row.free or row.answer.tokens", "any(row.free or row.answer.tokens", END),
    ("serving/programs.py", "            self.masks |= self.draft.masks\n", "", CHUNK_DRAFT),
    ("serving/speculation.py", "slots < length[:, None], 0", "slots <= length[:, None], 0", LOOKUP),
    ("serving/speculation.py", "for back in range(NGRAM):", "for back in range(NGRAM - 1):", LOOKUP),
    ("serving/speculation.py", " & (slots >= back)", "", LOOKUP),
    ("serving/speculation.py", "matches * slots.size + jnp.where(matches > 0, slots, 0)", "matches", LOOKUP),
    ("serving/speculation.py", "jnp.arange(n_draft) % jnp.maximum(period, 1)", "jnp.arange(n_draft)", LOOKUP),
    ("serving/speculation.py", "jnp.where(found, count, jnp.minimum(count, 1))", "count", LOOKUP),
    ("serving/speculation.py", 'mesh_shape(cfg, mesh.shape["data"], 1, mesh.size // mesh.shape["data"])', 'mesh_shape(cfg, 1, 1, mesh.size)', DRAFT_MESH),
    ("serving/speculation.py", "mesh.devices.reshape(", "mesh.devices.T.reshape(", DRAFT_MESH),
    ("serving/programs.py", "if cfg.V != self.draft.cfg.V:", "if False:", "tests/test_speculation.py::test_a_draft_of_another_vocabulary"),
    ("serving/speculation.py", "count = jnp.minimum(count, most_readable(start, cfg))", "pass", CHUNK_DRAFT),
    ("serving/speculation.py", "lax.fori_loop(0, 1 + n_draft, read_one, batch)", "lax.fori_loop(0, n_draft, read_one, batch)", DRAFT),
    ("serving/speculation.py", "cache.length - ahead, output)", "cache.length, output)", DRAFT),
    ("serving/speculation.py", "jnp.where(i < output.count[:, None], length[:, None] + 1 + i, text.shape[1])", "length[:, None] + 1 + i", DRAFT),
    ("serving/speculation.py", 'text.at[rows, at].set(output.tokens, mode="drop"), length', "text, length", CHUNK_DRAFT),
    ("serving/generate.py", '"stop" if stream.stopped else answer.finish_reason', "answer.finish_reason", "tests/test_python_api.py::test_options"),
    ("serving/generate.py", "k: v[i] if isinstance(v, (list, tuple, range)) else v for", "k: v[0] if isinstance(v, (list, tuple, range)) else v for", "tests/test_python_api.py::test_options"),
    ("serving/generate.py", "            self._cancel([(answer, stream)])", "            pass", "tests/test_python_api.py::test_streams"),
    ("serving/requests.py", 'defaults = {"repetition_penalty": config.get("repetition_penalty")}', "defaults = {}", "tests/test_command_line.py::test_sampling_defaults_come_from_the_checkpoint"),
    ("serving/text.py", "max(ids) >= vocabulary", "max(ids) > vocabulary", "tests/test_text.py::test_tokens_beyond_the_vocabulary"),
    ("serving/text.py", "for source in (generation_config(folder), config,", "for source in (config, generation_config(folder),", "tests/test_command_line.py::test_sampling_defaults_come_from_the_checkpoint"),
    ("serving/text.py", "keep = max((", "keep = min((", STOP_STRINGS),
    ("serving/text.py", "self.held_back[: min(ends)]", "self.held_back[: max(ends)]", STOP_STRINGS),
    ("serving/text.py", "range(min(len(text), len(stop) - 1), 0, -1)", "range(1, min(len(text), len(stop) - 1) + 1)", STOP_STRINGS),
    ("serving/text.py", "[len(decode(self.last)) :]", "", STOP_STRINGS),
    ("serving/text.py", "self.new_decoder([token])", "self.new_decoder()", SINGLE_BYTES),
    ("serving/text.py", "encoding.append(normalizers.Prepend(", "encoding.insert(0, normalizers.Prepend(", SENTENCEPIECE),
    ("serving/text.py", 'get("add_bos_token", True)', 'get("add_bos_token", False)', SENTENCEPIECE),
    ("terminal/answers.py", "if n and -log_likelihood / n < 700 else None", "if n else None", "tests/test_answers.py::test_perplexity"),
    ("terminal/answers.py", "tokens=self.answer.tokens[:used]", "tokens=self.answer.tokens", STOP_STRINGS_OF_ANSWERS),
    ("terminal/answers.py", "logprobs=self.answer.logprobs[:used]", "logprobs=self.answer.logprobs", STOP_STRINGS_OF_ANSWERS),
    ("terminal/answers.py", 'self.stream.stopped or self.answer.finish_reason == "stop"', 'self.answer.finish_reason == "stop"', STOP_STRINGS_OF_ANSWERS),
    ("terminal/printers.py", "            self.waiting.pop()\n            self.printed = -1\n", "            self.waiting.pop()\n", SAMPLES),
    ("terminal/output_file.py", "for line in kept.values()) != whole:", "for line in kept.values()) == whole:", "tests/test_answers.py::test_held_answers_are_not_asked_again"),
    ("terminal/output_file.py", "if torn[: len(LINE)] != LINE[: len(torn)]:", "if False:", "tests/test_answers.py::test_wrong_output_files"),
    ("terminal/output_file.py", 'key = found["index"], found.get("sample", 0)', 'key = found["index"], 0', SAMPLES_IN_A_FILE),
    ("terminal/output_file.py", 'return found["index"], found.get("sample", 0)', 'return found["index"], 0', SAMPLES_IN_A_FILE),
    ("terminal/output_file.py", "if ordered != lines:", "if False:", INTERRUPTED),
    ("terminal/answers.py", "reply.request.positions > max_len", "reply.request.positions >= max_len", "tests/test_answers.py::test_what_memory_does_not_hold_is_refused"),
    ("terminal/prompts.py", "(first.sampling.seed + i) % 2**32", "first.sampling.seed", SAMPLES),
    ("terminal/prompts.py", "min(self.new_tokens, max(left, 1))", "self.new_tokens", "tests/test_command_line.py::test_default_lengths_do_not_depend_on_the_batch"),
    ("terminal/prompts.py", "1.0 if RESTRICTIONS & set(options) else None", "None", "tests/test_answers.py::test_options_that_ask_for_samples"),
    ("serving/memory.py", "-(-length // 128) * 128", "length // 128 * 128", MEMORY),
    ("serving/memory.py", "(1 if rows else 1 - HEADROOM)", "1", MEMORY),
    ("serving/memory.py", "positions - kind.mask.first_visible(positions)", "positions", BYTES),
    ("serving/memory.py", "* idle", "", BYTES),
    ("serving/memory.py", 'mesh_size(mesh, EXPERT))', '1)', BYTES),
    ("serving/memory.py", "/ sets[: within.size]", "", ACTIVE),
    ("serving/memory.py", "polypow([float(math.comb(size, k)) for k in range(m + 1)], shards)", "np.ones(E + 1)", ACTIVE),
    ("terminal/chat.py", "        return []\n", "        return turns\n", "tests/test_chat.py::test_a_full_conversation"),
    ("terminal/chat.py", "return turns\n    answer", "return asked\n    answer", "tests/test_chat.py::test_a_full_conversation"),
    # checkpoints
    ("checkpoints/tensor_files.py", "if tensor.start < end:", "if False:", CHECKPOINTS),
    ("checkpoints/tensor_files.py", "if tensor.start > end:", "if False:", CHECKPOINTS),
    ("checkpoints/tensor_files.py", "if len(names) < len(pairs):", "if False:", CHECKPOINTS),
    ("checkpoints/tensor_files.py", "(i * shape[axis] + first) * row", "i * shape[axis] * row", CONVERSION),
    ("quantize.py", "jnp.where(nan, jnp.inf, scale)", "scale", CONVERSION),
    ("quantize.py", "jnp.where(nan, jnp.inf, scale)", "scale", QUANTIZE),
    ("checkpoints/checkpoint.py", "same_bits(x, y)", "True", CHECKPOINTS),
    ("checkpoints/tensor_files.py", "while axis and (", "while axis and (True or ", CONVERSION),
    ("checkpoints/loading.py", "        array.block_until_ready()\n        for source in sources:\n            source.forget()", "        pass", CONVERSION),
    ("checkpoints/tensor_files.py", "% ALIGNMENT != 0", "* 0", CONVERSION),
    ("checkpoints/folders.py", "    allow_open_files()\n    tensors", "    tensors", CONVERSION),
    ("checkpoints/layouts.py", "-(-hi // self.width)", "hi // self.width", CHECKPOINTS),
    ("checkpoints/layouts.py", "slice(first[key], first[key] + hi - lo)", "slice(None)", CHECKPOINTS),
    ("checkpoints/layouts.py", "slice(*ends[part : part + 2])", "slice(None)", CHECKPOINTS),
    ("checkpoints/layouts.py", "min(max(row - first, 0), steps)", "min(row, steps)", CHECKPOINTS),
    ("checkpoints/dequantized.py", '{"gptq": 1, "gptq_v2": 0}', '{"gptq": 0, "gptq_v2": 0}', DEQUANTIZED),
    ("checkpoints/dequantized.py", 'if ordered or "g_idx" in parts.tensors:', "if False:", DEQUANTIZED),
    ("checkpoints/dequantized.py", "lo - first * per_word : hi - first * per_word", "lo : hi", DEQUANTIZED),
    ("checkpoints/gguf_model.py", "all(file_checksum(folder / name) == x for name, x in checksums.items())", "True", GGUF),
    ("checkpoints/checkpoint.py", "pool.map(lambda x: x.sample(), sampled)", "pool.map(StoredTensor.sample, sampled)", DEQUANTIZED),
    ("checkpoints/dequantized.py", "AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)", "AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)", DEQUANTIZED),
    ("checkpoints/dequantized.py", "np.arange(lo, hi) // height", "np.arange(hi - lo) // height", DEQUANTIZED),
    ("checkpoints/dequantized.py", "any(scheme != schemes[0] for scheme in schemes)", "False", DEQUANTIZED),
    ("checkpoints/dequantized.py", "fields.finish({})", "pass", DEQUANTIZED),
    ("checkpoints/dequantized.py", "if tensor.dtype not in TYPES[end]:", "if False:", DEQUANTIZED),
    ("checkpoints/gguf_model.py", ".swapaxes(1, 2)", "", GGUF),
    ("checkpoints/gguf_model.py", "stored[lo : lo + step]", "stored[:step]", GGUF),
    ("checkpoints/gguf_model.py", "values[order[lo:hi]]", "values[order][lo : hi - 1]", GGUF),
    ("checkpoints/gguf_tokenizer.py", "tokenizer.model.ignore_merges = True", "pass", GGUF),
    ("checkpoints/gguf_tokenizer.py", 'like_llama3 or settings.get("ggml.model") == "llama"', "False", GGUF),
    ("checkpoints/gguf_model.py", "float(str(np.float32(value)))", "value", GGUF),
    ("checkpoints/gguf_model.py", "file.kinds[name] in PLAIN and file.kinds[name] in matrices", "file.kinds[name] in PLAIN", GGUF),
    ("checkpoints/gguf_file.py", "if stop > self.size:", "if False:", GGUF),
    ("checkpoints/gguf_file.py", "-(-self.position // alignment) * alignment", "self.position", GGUF),
    ("checkpoints/layouts.py", "ours.start * width + lo * step", "lo * step", CHECKPOINTS),
    ("checkpoints/layouts.py", "1 if alone else whole", "whole", CHECKPOINTS),
    ("checkpoints/checkpoint.py", "if checksum is None or checksum != tensor.file.metadata.get(name):", "if False:", CHECKPOINTS),
    ("checkpoints/tensor_files.py", "start = -buffer.ctypes.data % ALIGNMENT", "start = 8", CHECKPOINTS),
    ("families/family.py", "in self.tensor_names:", "in ():", CHECKPOINTS),
    ("checkpoints/checkpoint.py", "not family.ignores(name, len(config.layers))", "True", CHECKPOINTS),
    ("families/fields.py", "value not in supported.get(name, ())", 'True', CHECKPOINTS),
    ("checkpoints/hub.py", "commit = folder.name", "commit = revision", HUB),
    ("checkpoints/writing.py", "if not (allow_nonfinite or _is_finite(made[-1])):", "if False:", CONVERSION),
    ("checkpoints/unfinished.py", "fcntl.flock(file, how | fcntl.LOCK_NB)", "pass", CONVERSION),
    ("checkpoints/writing.py", " if _checksums(folder, file_set) is None]", "]", CONVERSION),
    ("checkpoints/unfinished.py", "file.path.stat().st_mtime_ns", "0", CONVERSION),
    ("quantize.py", "np.allclose(step, largest, rtol=1e-6,", "np.allclose(step, step, rtol=1e-6,", CONVERSION),
    ("benchmarks/quality.py", "jnp.exp(log_q) - p - p * ratio", "-p * ratio", QUALITY),
    ("quantize.py", "jnp.concatenate([divisors, -divisors])", "divisors", INT4),
    ("quantize.py", "jnp.arange(1.0, 9.0)", "jnp.arange(7.0, 9.0)", INT4),
    ("quantize.py", "better = error < best[0]", "better = error > best[0]", INT4),
    ("quantize.py", "jnp.where(jnp.all(jnp.isfinite(x), at), scale, jnp.inf)", "scale", INT4),
    ("quantize.py", "(pairs << 4) >> 4, pairs >> 4", "pairs >> 4, (pairs << 4) >> 4", INT4),
    ("quantize.py", "low | (high << 4)", "high | (low << 4)", INT4),
    ("quantize.py", "group_size < MIN_GROUP_SIZE", "False", INT4),
    ("ops/matmul.py", "(high + low / PART) * unit", "high * unit", INT4),
    ("ops/matmul.py", "math.prod(lead) > FEW_ROWS", "math.prod(lead) >= FEW_ROWS", INT4),
    ("ops/matmul.py", "rows > FEW_ROWS or not gpu", "not gpu", GPU_INT4),
    ("ops/gpu.py", "lax.div(at, D // scale.shape[1])", "0 * at", GPU_INT4),
    ("ops/gpu.py", "missing or x.shape[-1] % each", "missing", GPU_INT4),
    ("ops/matmul.py", "jnp.expand_dims(w.scale, n)", "1", INT4),
    ("ops/grouped_matmul.py", "number == j * weights[2].shape[0] + group", "number == group", EXPERTS),
    ("ops/grouped_matmul.py", "unit[...] * factor if scales", "unit[...] if scales", EXPERTS),
    ("sharding/arrays.py", "math.lcm(unit, self.format.pad_multiple(size * step))", "unit", INT4),
    ("sharding/arrays.py", "format=self.format, groups=groups)", "format=self.format)", INT4),
    ("quantize.py", "info.min_bits > self.bits or", "", INT4),
    ("quantize.py", 'if letter in "pe"', 'if letter in ""', INT4),
    ("checkpoints/layouts.py", "// block * block, block)", ", 1)", INT4),
    ("checkpoints/file_plan.py", "lo //= axes[axis].width", "pass", INT4),
    ("quantize.py", "~jnp.any(worse & known)", "True", INT4),
    ("quantize.py", "jnp.clip(x / step, INT4_MIN, INT4_MAX)", "ours.values.astype(jnp.float32)", INT4),
    ("quantize.py", 'Requantized(self, INT8) if platform == "cpu" else', 'INT8 if platform == "cpu" else', INT4),
    ("serving/memory.py", "format.on(platform(models[0].mesh)).bits", "format.bits", "tests/test_command_line.py::test_what_does_not_fit_is_refused_before_loading"),
    ("checkpoints/checkpoint.py", "if info.quantization == INT8 else {}", "if False else {}", DEQUANTIZED),
    ("checkpoints/writing.py", "for x in checkpoint.stored(*weight)] for", "for x in weight[:1]] for", DEQUANTIZED),
    ("benchmarks/quality.py", "targets >= 0", "targets >= -1", QUALITY),
    ("benchmarks/serve.py", "x.first - x.due for x", "x.first - x.first for x", SERVING),
    ("benchmarks/serve.py", "/ (x.tokens - 1)", "/ x.tokens", SERVING),
    ("benchmarks/serve.py", "- min(x.due for x in outcomes)", "- min(x.first for x in answered)", SERVING),
    ("benchmarks/serve.py", "self.first or now", "now", SERVING),
    ("benchmarks/serve.py", "rng.exponential(1 / rate, n)", "np.full(n, 1 / rate)", SERVING),
    ("benchmarks/serve.py", "beginning not in beginnings", "True", SERVING),
    ("benchmarks/serve.py", "if not outcome.finished:", "if False:", SERVING),
    ("benchmarks/serve.py", "tokens / found[\"engine_seconds\"]", "tokens", SERVING),
    # the scheduler
    ("serving/scheduler.py", "n = min(matching, row.computed)", "n = matching", WAITS),
    ("serving/scheduler.py", "return start + int(differs.argmax())", "return n", READ_ONCE),
    ("serving/scheduler.py", "while (less :=", "if (less :=", EDGES),
    ("serving/rings.py", "n if first == mask.first_visible(latest) else first", "n if n >= latest - mask.ring else first", EDGES),
    ("serving/executors.py", "for i in range(0, len(kinds), n)}) == 1)", "for i in range(0, len(kinds), n)}) > 0)", EXECUTORS),
    ("serving/rings.py", "return mask.ring - length % mask.ring", "return mask.ring - length % mask.ring + 1", RINGS),
    ("serving/rings.py", "return (mask.ring - mask.window) // 2", "return mask.ring - mask.window", RINGS),
    ("serving/rings.py", "latest + drafts_in_ring(mask) - mask.ring", "latest - mask.ring", RINGS),
    ("model.py", "rotations[kind.rope], kind)", "rotations[kinds[0].rope], kind)", "tests/test_decoding.py::test_two_ropes_in_one_model[1]"),
    ("model.py", "jnp.take_along_axis(x, count[:, None, None] - 1, 1)", "x[:, -1:]", "tests/test_decoding.py::test_unlike_prompts_in_several_calls[llama3-tp8]"),
    ("serving/scheduler.py", "answer.prefix_caching and not answer.request.score", "answer.prefix_caching", SCORES),
    ("serving/scheduler.py", "if row.free), key=lambda row: row.number", "if row.free), key=lambda row: -row.number", ROWS),
    ("serving/scheduler.py", "key=lambda row: (cached[row], row.free)", "key=lambda row: cached[row]", ROWS),
    ("serving/scheduler.py", "if source.free and source.computed < 2 * cached[source]:", "if source.free:", ROWS),
    ("serving/scheduler.py", "source if cached[source] >= MIN_COPIED else oldest", "source", ROWS),
    ("serving/scheduler.py", "source if cached[source] >= MIN_COPIED else oldest", "oldest", READ_ONCE),
    ("serving/scheduler.py", "return longest if worth else None", "return None", WAITS),
    ("serving/scheduler.py", "itertools.islice(queue, LOOKAHEAD)", "itertools.islice(queue, 1)", WAITS),
    ("serving/scheduler.py", "longest.shared - max(cached.values()) >= MIN_COPIED", "True", WAITS),
    ("serving/scheduler.py", "left[wait.row] = min(left[wait.row], wait.left)", "pass", WAITS),
    ("serving/scheduler.py", "        if oldest:", "        if True:", SHORT),
    ("serving/scheduler.py", "        if oldest:", "        if False:", LONG),
    ("serving/requests.py", "if prompt.min() < 0 or prompt.max() >= vocabulary:", "if False:", BAD),
    ("serving/requests.py", "                check_sampling(name, value)", "                pass", BAD),
    ("serving/scheduler.py", "len(self.answer.tokens) - self.steps_in_flight", "len(self.answer.tokens)", FETCHED),
    ("serving/scheduler.py", "self.text[self.computed + 1 :][: len(tokens)]", "self.text[self.computed :][: len(tokens)]", READ_ONCE),
    ("serving/engine.py", "                    self._end_if_read(row, step)\n            assignments", "            assignments", SCORES),
    ("serving/engine.py", "if math.isnan(logprob) or token >= self.programs.cfg.V:", "if False:", DAMAGED),
    ("serving/engine.py", "if np.isnan(scores.logprobs[i, :n]).any():", "if False:", DAMAGED_SCORE),
    ("serving/engine.py", "if row.number != number:  #", "if False:  #", STOPS),
    ("serving/engine.py", "known = len(prompt) <= self.longest and", "known =", REFUSED),
    ("serving/engine.py", "if answer.finish_reason is None:\n            answer.finish_reason = \"cancelled\"", "if True:\n            answer.finish_reason = \"cancelled\"", CANCEL),
    ("terminal/answers.py", "if found.error is not None:", "if False:", DAMAGED_TOKEN),
    ("terminal/chat.py", "if answer.error is not None:", "if False:", DAMAGED_TURN),
    # stages of layers
    ("sharding/stages.py", "jnp.where(lax.axis_index(STAGE) == 0, x, received)", "jnp.where(lax.axis_index(STAGE) == 0, x, 0 * received)", STAGES),
    ("sharding/stages.py", "lax.axis_index(MODEL) * d, d, 2)", "0 * lax.axis_index(MODEL), d, 2)", STAGES),
    ("sharding/stages.py", "lax.psum(jnp.where(is_last(), x, 0), STAGE)", "lax.psum(jnp.where(is_last(), 0, x), STAGE)", STAGES),
    ("serving/executors.py", "jnp.where(own < 0, chosen[:, 0], own)", "own", STAGES),
    ("serving/executors.py", "return jnp.where(stages.is_last(), tokens, unknown)", "return tokens", STAGES),
    ("serving/executors.py", "tokens=stages.to_all_stages(chosen, mesh)", "tokens=batch.stage_inputs.tokens", STAGES),
    ("serving/executors.py", "    result = stages.from_last_stage(own, mesh)", "    result = own", "tests/test_stages.py::test_command_line"),
    ("serving/programs.py", "self.waiting.append(self.batch)", "self.waiting.appendleft(self.batch)", STAGES),
    ("serving/programs.py", "if chunks[-1] is last_chunk", "if chunks[0] is last_chunk", "tests/test_stages.py::test_command_line"),
    ("serving/memory.py", "shard_bytes(abstract(infos, self.mesh)) * stages", "shard_bytes(abstract(infos, self.mesh))", "tests/test_stages.py::test_nothing_is_stored_twice"),
    ("checkpoints/loading.py", "return read(stage, tuple(bounds))[None]", "return read(0, tuple(bounds))[None]", "tests/test_stages.py::test_command_line"),
    ("sharding/mesh.py", "if stage > 1 and cfg.layers != cfg.layers[: depth // stage] * stage:", "if depth % stage:", "tests/test_stages.py::test_refused_in_python"),
    # several processes
    ("serving/memory.py", "every = gather(", "every = (lambda own: [own])(", SMALLEST),
    ("serving/memory.py", "return min(shares)", "return shares[0]", SMALLEST),
    ("serving/memory.py", "// sharing[process[\"host\"]]", "// len(process[\"own\"])", SMALLEST),
    ("distributed/exchange.py", "for i in range(process_count())]", "for i in range(process_count() - 1)]", GATHER),
    ("distributed/exchange.py", "raise failure or UserError(found[\"error\"])", "return None", FIRST),
    ("distributed/exchange.py", "            if a != b:", "            if False:", AGREE),
    ("distributed/exchange.py", "sorted({*first[1], *other[1]})", "sorted(first[1])", AGREE),
    ("distributed/watch.py", "            if since < time.monotonic() - self.seconds:".strip(), "if False:", STOPPED),
    ("distributed/watch.py", "while any(since < seen for", "while False and any(since < seen for", KILLED),
    ("distributed/watch.py", "            time.sleep(2 * INTERVAL)  # the others read", "            pass  # the others read", TERMINATED),
    ("distributed/runtime.py", "    set_handler(signal.SIGABRT, ", "    print(", KILLED_FIRST),
    ("distributed/runtime.py", "if ABOUT_PEERS.match(line):", "if False:", KILLED_FIRST),
    ("distributed/roll_call.py", "if e.errno == errno.EADDRINUSE:", "if False:", PORT),
    ("distributed/roll_call.py", "raise UserError(_missing(count, hosts, left, f\"in {seconds} s\"))", "return [host] * count", NOBODY),
    ("distributed/roll_call.py", "left[index] = hosts.pop(index)", "left[index] = hosts[index]", ROLL_LEFT),
    ("distributed/roll_call.py", "elif message := _receive(connection):", "elif message := json.loads(connection.recv(4096)):", ROLL_STRANGERS),
    ("distributed/roll_call.py", "if message[\"count\"] != count:", "if False:", ROLL_OPTIONS),
    ("distributed/roll_call.py", "if index in hosts:", "if False:", ROLL_OPTIONS),
    ("distributed/join.py", "with _unless_done_in(min(PATIENCE, seconds / 2), lambda: print(waiting, file=sys.stderr)):", "if True:", NOBODY),
    ("distributed/join.py", "with _unless_done_in(seconds, give_up):", "if True:", "tests/test_distributed.py::test_endings[joining-9-1]"),
    ("terminal/launch.py", "agree(asked | versions(),", "agree({},", VERSIONS),
    ("serving/deploy.py", "if process_count() > 1:\n        checksums", "if False:\n        checksums", WEIGHTS),
    ("terminal/models.py", "        gc.enable()", "        pass", GARBAGE),
    ("main.py", "    gc.disable()", "    pass", GARBAGE),
    ("terminal/command_line.py", "    signal.pthread_sigmask(signal.SIG_BLOCK, endings)", "    pass", TERMINATED),
    ("serving/programs.py", "        tree = _replicated(tree, mesh=mesh)", "        pass", TWO),
    ("terminal/prompts.py", "found = from_first(lambda: [dataclasses.astuple(prompt) for prompt in read_prompts(args)])", "found = [dataclasses.astuple(prompt) for prompt in read_prompts(args)]", TWO),
]  # fmt: skip


def out_of_date(mutations: list[tuple[str, str, str, str]]) -> list[str]:
    """A line for each mutation whose text is not exactly once in its file, and for each test that is not there."""
    found = []
    for file, old, _, _ in mutations:
        count = (ROOT / file).read_text().count(old) if (ROOT / file).exists() else 0
        if count != 1:
            found.append(f"{file} has {count} of {old!r}")
    wanted = {test for *_, test in mutations}
    files = sorted({test.partition("::")[0] for test in wanted})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-n", "0", "--all", *files]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    # A file of tests, or one without its parameters, stands for all of them.
    names = {name for line in collected for name in (line, line.partition("[")[0], line.partition("::")[0])}
    return found + [f"there is no {test}" for test in sorted(wanted - names)]


def main() -> None:
    words = sys.argv[1:]
    chosen = [m for m in MUTATIONS if not words or any(word in m[1] for word in words)]
    if lines := out_of_date(chosen):
        sys.exit("\n".join(["error: bring the list of mutations up to date:", *lines]))
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "repository"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__"))
        for number, (file, old, new, test) in enumerate(chosen, 1):
            source = (ROOT / file).read_text()
            (copy / file).write_text(source.replace(old, new))
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "--all", test]
            failed = subprocess.run(command, cwd=copy, capture_output=True).returncode == 1
            (copy / file).write_text(source)
            survived += not failed
            print(
                f"{number}/{len(chosen)} {'caught' if failed else 'SURVIVED'}: {file}: {old.strip()}",
                flush=True,
            )
    sys.exit(f"{survived} mutations survived" if survived else 0)


if __name__ == "__main__":
    main()
