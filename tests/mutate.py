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

MESH = "tests/test_meshes.py::test_llama4[ep4-tp2-None]"
NAN = "tests/test_meshes.py::test_unwritten_slots_are_never_read"
SCOUT = "tests/test_transformers.py::test_tokens_and_logprobs_in_python[scout]"
TIED = "tests/test_transformers.py::test_tokens_and_logprobs_in_python[llama3-scaled-tied]"
ATTENTION = "tests/test_attention.py"
EXPERTS = "tests/test_experts.py"
SAMPLING = "tests/test_sampling.py"
ASSIGN = "tests/test_meshes.py::test_assign_rows"
PACE = "tests/test_prefill_scheduling.py::test_"
GUESSES = "tests/test_meshes.py::test_guesses_of_a_step"
PIECES = "tests/test_meshes.py::test_pieces_of_any_width"
PREFILL = "tests/test_meshes.py::test_prefill_of_all_rows"
QUANTIZE = "tests/test_quantize.py"
COPY = "tests/test_meshes.py::test_prefill_does_not_copy_the_cache"
KERNELS = "tests/test_kernels.py"
CPU = "tests/test_cpu.py"
GPU = "tests/test_gpu.py"
SPEED, FIRST_HOUR = "tests/test_speed.py", "tests/test_first_hour.py"
SLOT_MAPPING = "tests/test_meshes.py::test_slot_mapping"
CHECKPOINTS = "tests/test_checkpoints.py"
CONVERSION = "tests/test_conversion.py"
BUCKETS = "tests/test_bucket_conversion.py::test_"
DEQUANTIZED, GGUF = "tests/test_dequantized.py", "tests/test_gguf.py"
GGUF_MODEL, SPLIT_REFUSED = (
    "tests/test_gguf_models.py::test_same_model",
    "tests/test_gguf.py::test_split_refused",
)
TOKENIZER, FILE_FIELDS = "tests/test_gguf_tokenizer.py", "tests/test_fields.py"
HUB = "tests/test_hub.py"
OBJECTS = "tests/test_object_storage.py"
QUALITY = "tests/test_quality.py"
INT4, MXFP4 = "tests/test_int4.py", "tests/test_mxfp4.py"
EXPERTS_MXFP4 = "tests/test_experts.py::test_active_experts_kernel"
MANY_ROWS = "tests/test_experts.py::test_active_experts_kernel[tiles-int8-input-False]"
GRAMMAR = "tests/test_grammar.py::test_beside_others"
FORCED = "tests/test_forced_tokens.py::test_"
SERVER = "tests/test_server.py::"
GPU_INT4 = "tests/test_gpu.py::test_int4"
QWEN = "tests/test_transformers.py::test_tokens_and_logprobs_in_python[qwen3]"
FAMILY = "tests/test_transformers.py::test_tokens_and_logprobs_in_python[{}]".format
MISTRAL, GEMMA, GPT2, QWEN2, GLM = map(FAMILY, ("mistral", "gemma", "gpt2", "qwen2", "glm"))
GPT_OSS = FAMILY("gpt-oss")
DEEPSEEK, GROUPS = FAMILY("deepseek-v3"), "tests/test_families.py::test_hidden_states[deepseek-v3-1]"
CHANNELS = "tests/test_channels.py::test_"
FIELDS, MESSAGES = "tests/test_server_fields.py::test_", "tests/test_messages.py::test_"
CHOSEN_MESH = "tests/test_placement.py::test_"
REASONING = "tests/test_reasoning.py::test_"
TOOLS = "tests/test_tools.py::test_"
PLAN_GPU = "tests/test_plan_gpu.py::test_"
SCHEDULE = "tests/test_schedule.py::test_"
COLUMNS = "tests/test_collective_matmul.py::test_"
PREFIX_CACHE = "tests/test_prefix_cache.py::test_"
KEPT_PROGRAMS = "tests/test_compilation_cache.py::test_"
GLM4_MOE = FAMILY("glm4-moe")
MIXTRAL, LATENT, MUSE_GLIMMER = map(FAMILY, ("mixtral", "glm4-moe-lite", "muse-glimmer"))
LATENT_TP8 = "tests/test_families.py::test_on_a_mesh[glm4-moe-lite-tp8]"
MISTRAL_TP8 = "tests/test_families.py::test_on_a_mesh[mistral-tp8]"
FAMILIES, FAMILY_CHECKPOINTS = "tests/test_families.py", "tests/test_family_checkpoints.py"
WINDOWS = "tests/test_reuse_search.py::test_many[chunks4-4-draft-float32-True]"
ROUTERS = "tests/test_experts.py::test_routers"
BIASES, KERNEL_BIASES = EXPERTS + "::test_biases", EXPERTS + "::test_active_experts_kernel"
ROPES = "tests/test_fields.py::test_rope"
ROUNDING = "tests/test_transformers.py::test_where_a_norm_rounds"
REVERSED = "tests/test_meshes.py::test_any_order_in_memory"
PLACEMENT = "tests/test_meshes.py::test_rows_that_nearly_fill_tiles_stay_rows"
GROUPS_OF_EXPERTS = "tests/test_meshes.py::test_groups_of_experts_keep_their_order"
EXECUTORS = "tests/test_executors.py"
RINGS = "tests/test_rings.py"
INT8 = "tests/test_trained.py::test_divergence_of_int8"
READ_ONCE = "tests/test_generation.py::test_each_prompt_token_is_read_once"
EDGES = "tests/test_generation.py::test_reuse_at_the_edges_of_chunks[rings]"
STOPS = "tests/test_generation.py::test_stop_tokens"
SCORES = "tests/test_generation.py::test_log_probabilities_of_prompts[plain-1]"
REFUSED = "tests/test_generation.py::test_requests_that_do_not_fit"
CANCEL = "tests/test_generation.py::test_cancel"
FETCHED = "tests/test_generation.py::test_a_step_is_fetched_after_the_next_is_sent"
END = "tests/test_generation.py::test_an_end_does_not_wait_for_another_prompt"
ROWS = "tests/test_generation.py::test_which_row_a_request_takes"
DRAFT = "tests/test_speculation.py::test_the_same_answers[ring-1-itself-False]"
CHUNK_DRAFT = "tests/test_speculation.py::test_the_same_answers[ring-1-chunks-False]"
DECODE_ROWS = "tests/test_decode_rows.py"
FEWEST_ROWS = DECODE_ROWS + "::test_the_smallest_program"
SOME_ROWS = DECODE_ROWS + "::test_some_rows[0-1-float32]"
LOOKUP = "tests/test_speculation.py::test_prompt_lookup[4-1]"
DRAFT_MESH = "tests/test_speculation.py::test_the_mesh_of_a_draft"
CONTROL, LANES = "tests/test_control_tokens.py::test_", "tests/test_lanes.py::test_"
TOO_LONG = "tests/test_text.py::test_prompts_that_are_too_long"
STOP_STRINGS = "tests/test_text.py::test_stop_strings"
SENTENCEPIECE = "tests/test_text.py::test_sentencepiece"
SINGLE_BYTES = "tests/test_text.py::test_half_a_character_of_single_bytes"
GARBAGE = "tests/test_answers.py::test_garbage_is_not_collected_until_the_programs_are_compiled"
SAMPLES = "tests/test_answers.py::test_samples"
STOP_STRINGS_OF_ANSWERS = "tests/test_answers.py::test_stop_strings"
INTERRUPTED = "tests/test_answers.py::test_interrupted_anywhere"
DAMAGED = "tests/test_command_line.py::test_damaged_weights"
WAITS = "tests/test_generation.py::test_what_waits_for_a_prefix"
SHORT = PACE + "a_short_prompt_beside_four_long_ones"
LONG = PACE + "a_long_prompt_beside_a_stream_of_short_ones"
BAD = "tests/test_generation.py::test_what_no_model_could_answer"
DAMAGED_SCORE = "tests/test_generation.py::test_a_request_that_computes_nan[1-0]"
DAMAGED_TOKEN = "tests/test_command_line.py::test_a_damaged_token"
CONTENTS = "tests/test_page_contents.py::test_"
DAMAGED_TURN = "tests/test_chat.py::test_a_turn_that_computes_nan"
SMALLEST = "tests/test_hosts.py::test_memory_of_the_smallest"
PROGRAMS = "tests/test_command_line.py::test_programs_need_memory"
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
    for name in ("compiling-19-0", "compiling-9-1", "loading-9-0", "decoding-15-0")
)
VERSIONS, WEIGHTS = (
    f"tests/test_distributed.py::test_differences[{name}]" for name in ("numpy is", "'s weights is")
)
TWO = "tests/test_hosts.py::test_two_processes_by_default"
BYTES = "tests/test_command_line.py::test_bytes_per_step"
ACTIVE = "tests/test_command_line.py::test_active_experts"
STAGES = "tests/test_stages.py::test_many_requests[short-pp2-ep2-tp2]"
MEMORY = "tests/test_command_line.py::test_rows_that_fit"

# (file, what is there, what to put in its place, the test that must fail)
MUTATIONS = [
    ("serving/scheduler.py", "return max(self.source_computed, self.computed + self.steps_in_flight * width)", "return self.computed + self.steps_in_flight * width", "tests/test_reuse_search.py::test_a_row_that_goes_back_again_and_again"),
    ("ops/grouped_matmul.py", "weights, units = in_hbm((weights, units))", "pass", "tests/test_plan.py::test_latent_attention"),
    ("model.py", "(position - self.size + 1) * (position >= self.size)", "(position - self.size) * (position >= self.size)", MISTRAL),
    ("sharding/slots.py", "return length, (jnp.where(wraps, local_slots(high), 0), local_slots(low))", "return length, None", MISTRAL),
    ("sharding/slots.py", "(jnp.where(wraps, local_slots(high), 0), local_slots(low))", "(0 * local_slots(high), local_slots(low))", MISTRAL),
    ("sharding/slots.py", "(jnp.where(wraps, local_slots(high), 0), local_slots(low))", "(jnp.where(wraps, high, 0), low)", MISTRAL_TP8),
    ("model.py", "return attend_causal(own, chunk_kv, segment, mask.window)", "return attend_causal(own, chunk_kv, segment)", MISTRAL),
    ("serving/rings.py", "return n if first >= oldest else 0", "return n", WINDOWS),
    ("families/gpt2.py", "y = y - mean(y)", "pass", GPT2),
    ("model.py", "y * (self.offset + w.astype(jnp.float32))", "y * w.astype(jnp.float32)", GEMMA),
    ("families/gpt2.py", "w.weight.astype(jnp.float32) + w.bias.astype(jnp.float32)", "w.weight.astype(jnp.float32)", GPT2),
    ("families/gpt2.py", "x + w.at[positions].get(mode=\"clip\")", "x", GPT2),
    ("model.py", "x * jnp.asarray(cfg.embedding_scale, x.dtype)", "x", GEMMA),
    ("model.py", "normalize(x, cfg.embedding_norm, None)", "x", MUSE_GLIMMER),
    ("model.py", "if self.offset is None:", "if not self.offset:", ROUNDING),
    ("families/gpt_oss.py", "read.norm(fields, offset=0.0)", "read.norm(fields)", ROUNDING),
    ("families/rope_scaling.py", "(math.floor(low), math.ceil(high)) if self.truncate else (low, high)", "(math.floor(low), math.ceil(high))", ROPES),
    ("families/rope_scaling.py", "(math.floor(low), math.ceil(high)) if self.truncate else (low, high)", "(low, high)", ROPES),
    ("families/rope_scaling.py", "low, high = index(self.fast), index(self.slow)", "low, high = index(32), index(self.slow)", ROPES),
    ("families/rope_scaling.py", "low, high = index(self.fast), index(self.slow)", "low, high = index(self.fast), index(1)", ROPES),
    ("model.py", "Rotation(self.magnitude * jnp.cos(angle), ", "Rotation(jnp.cos(angle), ", GPT_OSS),
    ("model.py", "self.magnitude * jnp.sin(angle)", "jnp.sin(angle)", GPT_OSS),
    ("families/muse_glimmer.py", 'o * jax.nn.sigmoid(einsum("bTD,kgHD->bTkgH", x, w.gate))', "o", MUSE_GLIMMER),
    ("families/muse_glimmer.py", "rope if rotated else None", "rope", MUSE_GLIMMER),
    ("families/muse_glimmer.py", "Norm(norm.eps, offset=0.0)", "norm", MUSE_GLIMMER),
    ("families/muse_glimmer.py", "x not in (0, theta)", "False", "tests/test_family_checkpoints.py::test_wrong_fields"),
    ("model.py", "add_bias(q, w.q_bias)", "q", QWEN2),
    ("model.py", "add_bias(k, w.k_bias)", "k", QWEN2),
    ("model.py", "add_bias(v, w.v_bias)", "v", QWEN2),
    ("model.py", "return add_bias(y, w.o_bias), kv", "return y, kv", GPT2),
    ("families/gpt2.py", 'add_bias(einsum("bTD,fD->bTf", x, w.up), w.up_bias)', 'einsum("bTD,fD->bTf", x, w.up)', GPT2),
    ("families/gpt2.py", "return add_bias(y, w.down_bias)", "return y", GPT2),
    ("families/gemma.py", "return jax.nn.gelu(gate, approximate=True) * up", "return jax.nn.silu(gate) * up", GEMMA),
    ("model.py", "return jnp.concatenate([rotate(x[..., :width], rotation), x[..., width:]], -1)", "return x", GLM),
    ("model.py", "jax.nn.sigmoid(logits) + bias", "jax.nn.sigmoid(logits)", LATENT),
    ("model.py", "return chosen, score * self.factor", "return chosen, score", LATENT),
    ("families/latent_attention.py", "scale = (self.N + self.R) ** -0.5 if", "scale = (self.L + self.R) ** -0.5 if", LATENT),
    ("families/latent_attention.py", "self.norm(latent, w.kv_a_norm), rotate(k_rope", "latent, rotate(k_rope", LATENT),
    ("families/latent_attention.py", "compressed = self.norm(compressed, w.q_a_norm)", "pass", LATENT),
    ("families/latent_attention.py", "rotate(k_rope, rotation)", "k_rope", LATENT),
    ("families/gpt_oss.py", "return (o * weight[..., None]).astype(o.dtype)", "return o", GPT_OSS),
    ("families/gpt_oss.py", "jax.nn.sigmoid(lse - w.sinks.astype(lse.dtype))", "1 - jnp.exp(w.sinks.astype(lse.dtype) - lse)", GPT_OSS),
    ("families/gpt_oss.py", "jnp.minimum(gate, self.limit), jnp.clip", "gate, jnp.clip", GPT_OSS),
    ("families/gpt_oss.py", "jnp.minimum(gate, self.limit), jnp.clip", "jnp.clip(gate, -self.limit, self.limit), jnp.clip", GPT_OSS),
    ("families/gpt_oss.py", "jnp.clip(up, -self.limit, self.limit)", "jnp.minimum(up, self.limit)", GPT_OSS),
    ("families/gpt_oss.py", "jax.nn.sigmoid(self.alpha * gate) * (up + 1)", "jax.nn.sigmoid(self.alpha * gate) * up", GPT_OSS),
    ("families/gpt_oss.py", "jax.nn.sigmoid(self.alpha * gate)", "jax.nn.sigmoid(gate)", GPT_OSS),
    ("families/gpt_oss.py", '"mlp.experts.gate_up_proj", "ED(M[1+1])"', '"mlp.experts.gate_up_proj", "ED[M+M]"', GPT_OSS),
    ("families/gpt_oss.py", '"mlp.experts.gate_up_proj_bias", "E(M[1+1])"', '"mlp.experts.gate_up_proj_bias", "E[M+M]"', GPT_OSS),
    ("families/gpt_oss.py", '"E(M[1+1])D"', '"E[M+M]D"', FAMILY_CHECKPOINTS + "::test_expert_tensors_of_dequantized_blocks"),
    ("families/gpt_oss.py", '"sliding_attention", "full_attention"] * depth', '"full_attention", "sliding_attention"] * depth', FAMILY_CHECKPOINTS + "::test_defaults_of_gpt_oss"),
    ("families/gpt_oss.py", ", truncate=False", "", FAMILY_CHECKPOINTS + "::test_defaults_of_gpt_oss"),
    ("families/glm4_moe.py", "norm if fields.take(\"use_qk_norm\", bool, False) else None", "fields.take(\"use_qk_norm\", bool, False) and None", GLM4_MOE),
    ("families/glm4_moe.py", "bias=fields.take(\"attention_bias\", bool, False)", "bias=fields.take(\"attention_bias\", bool, False) and False", GLM4_MOE),
    ("families/glm4_moe.py", "rotated=0.5", "interleaved=True", GLM4_MOE),
    ("families/glm4_moe.py", "rotated=0.5", "rotated=1", FAMILY_CHECKPOINTS + "::test_defaults_of_glm4_moe"),
    ("families/deepseek_v3.py", "\"dense\" if i < first else \"sparse\"", "\"sparse\"", GLM4_MOE),
    ("families/deepseek_v3.py", "super().rank(logits, bias)", "super().rank(logits, 0)", GROUPS),
    ("families/deepseek_v3.py", "best_two = jnp.sort(grouped, -1, stable=False)[..., -2:]", "best_two = jnp.sort(grouped, -1, stable=False)[..., -1:]", GROUPS),
    ("families/deepseek_v3.py", "jnp.where(is_kept[..., None], grouped, -jnp.inf)", "grouped", DEEPSEEK),
    ("families/deepseek_v3.py", "read.yarn_growth(rope.scaling.factor, mscale) ** 2", "read.yarn_growth(rope.scaling.factor, mscale)", DEEPSEEK),
    ("families/deepseek_v3.py", "if kept > groups:", "if False:", FAMILY_CHECKPOINTS + "::test_wrong_fields"),
    ("families/deepseek_v3.py", "E % groups or E // groups < 2", "E % groups", FAMILY_CHECKPOINTS + "::test_wrong_fields"),
    ("checkpoints/dequantized.py", "np.repeat(of_blocks, width, 1)[:, :C]", "np.resize(of_blocks, x.shape)", FAMILY_CHECKPOINTS + "::test_fp8_blocks_of_single_experts"),
    ("model.py", "jax.checkpoint(decoder_layer, static_argnums=5) if remat else decoder_layer", "decoder_layer", FAMILIES + "::test_recomputation"),
    ("model.py", "rotations[kind.rope]", "rotations[kinds[0].rope]", FAMILY("gemma3")),
    ("families/rope_scaling.py", "return frequencies / np.float32(self.factor)", "return frequencies", FAMILY("gemma3")),
    ("model.py", "x = x + normalize(y, kind.post_norm, w.attention_post_norm)", "x = x + y", FAMILIES + "::test_variations"),
    ("model.py", "x + normalize(y, kind.post_norm, w.feed_forward_post_norm)", "x + y", FAMILIES + "::test_variations"),
    ("model.py", "cfg.logit_scale * logits", "logits", FAMILIES + "::test_variations"),
    ("model.py", "cfg.logit_softcap * jnp.tanh(logits / cfg.logit_softcap)", "logits", FAMILIES + "::test_variations"),
    ("ops/kv_cache.py", "return used if used < LANES else -(-used // LANES) * LANES", "return used", "tests/test_plan.py::test_latent_attention"),
    ("ragged_attention.py", "any_seen &= (walk.gap[0][r] > 0) | (walk.gap[1][r] < length)", "pass", ATTENTION),
    ("ragged_attention.py", "begin = jnp.where(walk.gap[0][r] == 0, walk.gap[1][r], 0)", "begin = walk.gap[1][r]", ATTENTION),
    ("families/mixtral.py", '(r"\\.w1\\.weight$", ".gate_proj.weight")', '(r"\\.w1\\.weight$", ".up_proj.weight")', MIXTRAL),
    ("families/family.py", "return extra or bool", "return bool", FAMILY_CHECKPOINTS + "::test_fp8_blocks_of_single_experts"),
    ("families/stored_layouts.py", "Stored(name, letters, part)", "Stored(name, letters, 0)", FAMILY_CHECKPOINTS + "::test_joined_experts"),
    ("checkpoints/file_plan.py", "return weight[1].stored.name, weight[1].letters", "return weight[1].stored.name", FAMILY_CHECKPOINTS + "::test_converted_int8[glm4-moe-lite]"),
    ("sharding/arrays.py", '"sm" if on_tpu(mesh) else "s"', '"s"', "tests/test_plan.py::test_narrow_experts"),
    ("sharding/arrays.py", "if on_tpu(mesh) and (groups_of_experts", "if (groups_of_experts", PLACEMENT),
    ("sharding/arrays.py", "(groups_of_experts or nearly_whole)", "nearly_whole", GROUPS_OF_EXPERTS),
    ("sharding/arrays.py", 'self.groups is not None and "e" in self.letters', "self.groups is not None", GROUPS_OF_EXPERTS),
    ("sharding/arrays.py", "self.letters[-1].isupper() and 0 <", "0 <", PLACEMENT),
    ("sharding/arrays.py", "0 < -columns % LANES <= columns / 16", "0 < -columns % LANES", PLACEMENT),
    ("sharding/arrays.py", "sharding=info.placement(mesh)", "sharding=NamedSharding(mesh, info.spec)", REVERSED),
    ("checkpoints/loading.py", "component.placement(mesh)", "jax.sharding.NamedSharding(mesh, component.spec)", REVERSED),
    ("checkpoints/loading.py", "plan.info.placement(mesh), shard)", "jax.sharding.NamedSharding(mesh, plan.info.spec), shard)", REVERSED),
    ("ops/tpu.py", "not int8 and (rows.size > LANES or D % LANES or nbytes > MOVED_BYTES)", "not int8", "tests/test_plan.py::test_a_small_embedding_stays_where_it_is"),
    # collectives
    ("model.py", 'psum(einsum("bTkgU,DkgU->bTD", o, w.o), MODEL)', 'einsum("bTkgU,DkgU->bTD", o, w.o)', MESH),
    ("model.py", "first_visible(query) <= key) & (key <= query)", "first_visible(query) <= key)", FAMILIES + "::test_hidden_states"),
    ("model.py", "q, k, v = q[:, :, :, :G],", "q, k, v = q,", FAMILIES + "::test_hidden_states"),
    ("model.py", "x += normalize(y, kind.post_norm, w.attention_post_norm)", "pass", FAMILIES + "::test_hidden_states"),
    ("sharding/shapes.py", "expected is not None and expected != size", "False", "tests/test_shapes.py"),
    ("sharding/shapes.py", "    if len(entries) != len(found):", "    if False:", "tests/test_shapes.py"),
    ("model.py", "return psum(self.partial_sum(x, w), MODEL)", "return self.partial_sum(x, w)", MESH),
    ("families/gpt2.py", 'psum(einsum("bTf,Df->bTD", h, w.down), MODEL)', 'einsum("bTf,Df->bTD", h, w.down)', COLUMNS + "every_family[gpt2]"),
    ("sharding/collective_matmul.py", " or cfg.moe:", ":", COLUMNS + "which_chunks_are_by_columns"),
    ("sharding/collective_matmul.py", "return jax.tree.map(own_columns, w)", "return w", COLUMNS + "few_devices"),
    ("model.py", "device_ring = prefill_ring(cfg, tokens.size // mesh_size(mesh, ROWS), mesh)", "device_ring = None", COLUMNS + "prefill"),
    ("model.py", "device_ring = prefill_ring(cfg, tokens.size // mesh_size(mesh, ROWS), mesh)", "device_ring = prefill_ring(cfg, tokens.size, mesh)", COLUMNS + "prefill"),
    ("model.py", "return psum(y, MODEL)", "return y", MESH),
    ("model.py", "x = psum(x, MODEL).astype", "x = x.astype", MESH),
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
    ("model.py", "jnp.where(here[..., None], take_rows(w.embed, index), 0)", "take_rows(w.embed, index)", MESH),
    ("sharding/slots.py", "(n + sharing - 1 - lax.axis_index(SLOTS)) // sharing", "n // sharing", MESH),
    ("model.py", "attend_cached(q, kv if is_ring else written", "attend_cached(q, written", SCOUT),
    ("model.py", "attend_cached(q, kv if is_ring else written", "attend_cached(q, kv", COPY),
    ("model.py", "o, lse, kv = attend(q, chunk_kv, kv, chunk, kind.mask)", "exact = as_cached(kind.attention.project(x, w, chunk, rotation)[1], None, kind.attention.slot_layout)\n    o, lse, kv = (*merge(attend_to_cache(q, new, kv, chunk, kind.mask)[0], attend_to_chunk(q, exact, chunk, kind.mask)), attend_to_cache(q, new, kv, chunk, kind.mask)[1]) if kv is not None and q.shape[1] > 1 else attend(q, new, kv, chunk, kind.mask)", PIECES),
    ("ops/attention.py", "finite = jnp.where(peak == -jnp.inf, 0, peak)", "finite = peak", ATTENTION + "::test_merge"),
    ("sharding/slots.py", "chunk.positions, chunk.valid,", "chunk.positions, chunk.positions >= 0,", SCOUT),
    ("sharding/slots.py", "keep = keep & (slot >= (chunk.start + chunk.count)[:, None] - mask.ring)", "pass", SLOT_MAPPING),
    ("sharding/slots.py", "keep & (slot % sharing == lax.axis_index(SLOTS))", "keep", MESH),
    ("model.py", "return jnp.where(vocabulary_shard(logits) < cfg.V, logits, -jnp.inf)", "return logits", MESH),
    ("ops/attention.py", "        v = jnp.where(jnp.any(mask, 1)[:, None, :, None], v, 0)", "        pass", ATTENTION),
    ("ops/attention.py", "jnp.where(jnp.any(mask, 1)[:, None, :, None], kv.values, 0)", "kv.values", NAN),
    ("ops/attention.py", "jnp.where(mask, p * v_scale[:, :, None, None, :].astype(jnp.float32), 0)", "p * v_scale[:, :, None, None, :].astype(jnp.float32)", ATTENTION),
    ("ops/attention.py", "peak = jnp.where(peak == -jnp.inf, 0, peak)", "pass", ATTENTION),
    ("model.py", "jnp.where((local >= 0) & (local < n_local) & chunk.valid[..., None], local, n_local)", "local", EXPERTS),
    ("model.py", " & chunk.valid[..., None]", "", EXPERTS),
    ("ops/attention.py", "mask = (back >= 0) & ", "mask = (back > -T) & ", ATTENTION),
    ("ops/attention.py", "(back < (window or T)) & ", "(back < T) & ", ATTENTION),
    ("ops/attention.py", " & (segment[:, :, None] == segment[:, None])", "", ATTENTION),
    ("model.py", 'segment = 0 * chunk.positions if mask.window else mask.first_visible(chunk.positions)', 'segment = 0 * chunk.positions', SCOUT),
    ("sharding/slots.py", 'any_visible = (first < filled) & (chunk.count > 0)[:, None]', 'any_visible = (chunk.count > 0)[:, None]', SCOUT),
    ("sharding/slots.py", 'length = jnp.where(wraps, jnp.minimum(filled, mask.ring), high)', 'length = jnp.minimum(filled, mask.ring)', SCOUT),
    ("model.py", "lax.dynamic_slice_in_dim(q, lax.axis_index(SLOTS) * g, g, 3)", "q[:, :, :, :g]", MESH),
    ("ops/attention.py", 'mask = (slots < length[..., None]) & filled[:, None]', 'mask = jnp.broadcast_to(filled[:, None], (*length.shape, block))', ATTENTION),
    ("ops/attention.py", "filled = (slots >= i * block) & (slots", "filled = (slots", ATTENTION),
    ("ops/attention.py", 'mask = (slots < length[..., None]) & filled[:, None]', 'mask = jnp.broadcast_to(filled[:, None] | True, (*length.shape, block))', ATTENTION),
    ("ops/attention.py", 'mask &= (slots < gap[0][..., None]) | (slots >= gap[1][..., None])', 'pass', ATTENTION),
    ("ops/tpu.py", "jnp.where(filled[:, None, :, None], x, 0)", "x", ATTENTION),
    ("ops/tpu.py", "jnp.where(length > 0, 1, 2)", "jnp.ones_like(length)", ATTENTION),
    ("ragged_attention.py", "(slots >= block.at - base) & (slots < high)", "(slots < high)", ATTENTION),
    ("ragged_attention.py", "return inside & ((slots < walk.gap[0][r] - base) | (slots >= walk.gap[1][r] - base))", "return inside", ATTENTION),
    ("ragged_attention.py", "p = jnp.where(visible(walk, block, p.shape, 1), p, 0)", "pass", ATTENTION),
    ("ragged_attention.py", "scores = jnp.where(visible(walk, block, scores.shape, 1), scores, MASKED)", "pass", ATTENTION),
    ("ragged_attention.py", "values[...] = clean.astype(values.dtype)", "pass", ATTENTION),
    ("ragged_attention.py", "inside = (place >= block.at) & (slot < size)", "inside = slot < size", ATTENTION),
    ("ragged_attention.py", "    if wait:  # before the buffer is filled again\n        wait()\n", "", ATTENTION),
    ("ragged_attention.py", "jnp.minimum(block.at, S - block.size) if walk.overlaps else block.at", "block.at", ATTENTION),
    ("ragged_attention.py", "q.swapaxes(1, 2).reshape(R, T * G, H)", "q.reshape(R, T * G, H)", ATTENTION),
    ("ragged_attention.py", "jnp.where(sees[..., None, None, None], o, 0)", "o", ATTENTION),
    ("ragged_attention.py", "jnp.where(sees[..., None, None], lse, -jnp.inf)", "lse", ATTENTION),
    ("ops/grouped_matmul.py", "jnp.where((chosen < E)[:, None], jnp.zeros_like(y).at[order].set(y), 0)", "jnp.zeros_like(y).at[order].set(y)", EXPERTS),
    ("ops/grouped_matmul.py", "jnp.where(i < n_active[0], j, M // width - 1)", "j", EXPERTS),
    ("ops/grouped_matmul.py", "    @pl.when(i < n_active[0])\n    def _():\n        here", "    if True:\n        here", EXPERTS),
    ("ops/tpu.py", "(row[b], at[b] + j) if moving", "(row[b], j) if moving", KERNELS),
    ("ops/tpu.py", "(row[b], at[b] + j) if moving", "(b, at[b] + j) if moving", KERNELS),
    ("ops/tpu.py", "    kv = write_window(kv, new, before_end, row, window)\n", "", KERNELS),
    ("ops/tpu.py", "jnp.where(mask, new, take_slots(cache, row, first, LANES, n, axis))", "new", KERNELS),
    ("ops/tpu.py", "lse = jnp.where(lse < attention.MASKED / 2, -jnp.inf, lse)", "lse = lse", ATTENTION),
    # scales
    ("ragged_attention.py", "scores = scores * scale[0:1].astype(jnp.float32)", "pass", ATTENTION),
    ("ragged_attention.py", "p * scale[1:2].astype(jnp.float32)", "p", ATTENTION),
    ("ragged_attention.py", "parts[:G] * PART + parts[G:]", "parts[:G] * PART", ATTENTION),
    ("ops/tpu.py", '1 if s is None else s[..., None].astype(jnp.float32)', '1', ATTENTION),
    ("ops/grouped_matmul.py", "y if scale is None else y * of_rows(scale)", "y", EXPERTS),
    ("ops/grouped_matmul.py", "y if units[which] is None else y * of_expert(units[which], expert)", "y", EXPERTS),
    ("ops/grouped_matmul.py", "return y if bias is None else y + of_rows(bias)", "return y", BIASES),
    ("ops/grouped_matmul.py", "return y if bias is None else y + of_expert(bias, expert)", "return y", KERNEL_BIASES),
    ("ops/grouped_matmul.py", "jnp.dot(factors, down_bias.astype(jnp.float32)", "jnp.dot(1.0 * (factors > 0), down_bias.astype(jnp.float32)", KERNEL_BIASES),
    ("model.py", "on_first_device(w.down_bias, TENSOR)", "w.down_bias", BIASES),
    ("ops/grouped_matmul.py", "dot(x, which) * factor for", "dot(x, which) * (1 if which else factor) for", EXPERTS),
    ("ops/grouped_matmul.py", "biases, activation) * after", "biases, activation)", EXPERTS),
    ("ops/grouped_matmul.py", "    @pl.when(i < n_active[0])\n    def _():\n        lax", "    if True:\n        lax", MANY_ROWS),
    ("ops/grouped_matmul.py", "jnp.where(expert > 0, end[jnp.maximum(expert - 1, 0)], 0)", "end[jnp.maximum(expert - 1, 0)]", MANY_ROWS),
    ("ops/grouped_matmul.py", "start = begin + number * most", "start = begin", MANY_ROWS),
    ("ops/grouped_matmul.py", "= row * factor[start + n] if scales == \"input\" else row", "= row", MANY_ROWS),
    ("ops/grouped_matmul.py", "+= row if scales == \"input\" else row * factor[start + n]", "+= row", EXPERTS + "::test_active_experts_kernel[tiles-float32-output-True]"),
    ("ops/grouped_matmul.py", "rows = (rows * factor).astype(x.dtype)", "pass", EXPERTS),
    ("ops/grouped_matmul.py", "y * factor if scales == \"output\" else y", "y", EXPERTS),
    ("ops/attention.py", "scores(q, k) * kv.layout.scale", "scores(q, k)", ATTENTION),
    ("ops/attention.py", "s = s * k_scale[:, :, None, None, :].astype(jnp.float32)", "pass", ATTENTION),
    ("ops/attention.py", "p * v_scale[:, :, None, None, :].astype(jnp.float32)", "p", ATTENTION),
    ("quantize.py", "part + rest / PART", "part", CPU),
    ("ops/cpu.py", "jnp.float32), parts) * unit", "jnp.float32), parts)", CPU),
    ("ops/cpu.py", "y = int8_product(x, w, 3)", "y = int8_product(x, w, 2)", CPU),
    ("ops/cpu.py", "lax.dynamic_slice_in_dim(x, first, rows)", "x[:rows]", EXPERTS),
    ("ops/tiles.py", "(last_row - sizes)[group] +", "", EXPERTS),
    ("ops/tiles.py", " + (tile - (last_tile - count)[group]) * rows", "", EXPERTS),
    ("ops/cpu.py", "if decode and w.dtype == jnp.int8:", "if False:", CPU),
    ("quantize.py", "jnp.max(jnp.abs(x), tuple(range(1, x.ndim)), keepdims=True)", "jnp.max(jnp.abs(x))", CPU),
    ("ops/cpu.py", "block = min(max(BLOCK // (K * C), TERMS), S)", "block = S", CPU),
    ("ops/cpu.py", "math.gcd(B, PAIR)", "B", CPU),
    ("ops/cpu.py", "runs = [(first, rows)] if row is None else [(r, 1) for r in row]", "runs = [(first, rows)]", ATTENTION + "::test_cached_on_a_cpu"),
    ("ops/cpu.py", "runs = [(first, rows)]", "runs = [(0, rows)]", ATTENTION + "::test_cached_on_a_cpu"),
    ("ops/cpu.py", "lambda a, b: a - (-b)", "lambda a, b: a + b", CPU),
    ("ops/attention.py", "starts[axis], sizes[axis] = first, block", "starts[axis], sizes[axis] = 0, block", ATTENTION + "::test_cached_on_a_cpu"),
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
    ("families/llama4.py", "return (q * factor[:, :, None, None, None]).astype(q.dtype)", "return q", SCOUT),
    ("model.py", "q, k = self.qk_norm(q, w.q_norm), self.qk_norm(k, w.k_norm)", "pass", SCOUT),
    ("model.py", "self.qk_norm(k, w.k_norm)", "self.qk_norm(k, None)", QWEN),
    ("model.py", "score / jnp.sum(score, -1, keepdims=True) if self.normalized else score", "score", ROUTERS),
    ("model.py", "return y.astype(x.dtype) * w", "return y.astype(x.dtype)", TIED),
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
    ("serving/prefix_cache.py", "min(self.latest, slots)", "min(len(self.text) // 2, slots)", PREFIX_CACHE + "many_requests_in_few_rows[1]"),
    ("serving/prefix_cache.py", "(shard.index[0].start or 0) == self.shard", "(shard.index[0].start or 0) != self.shard", PREFIX_CACHE + "many_requests_in_few_rows[dp2-ep2-tp2]"),
    ("serving/prefix_cache.py", "sum(x.bytes for x in self.saved) + size > self.limit", "False", PREFIX_CACHE + "which_texts_are_kept"),
    ("serving/scheduler.py", "common_prefix(saved.text, own), saved.latest", "common_prefix(saved.text, own), len(saved.text)", "tests/test_reuse_search.py::test_guesses_rings_and_prefixes_in_host_memory"),
    ("serving/scheduler.py", "kept, reused, latest = 0, loaded, load.latest", "kept, reused, latest = 0, loaded, loaded", PREFIX_CACHE + "which_prefix_a_request_takes"),
    ("serving/steps.py", "jnp.where(skip, lax.dynamic_slice_in_dim(x, row, 1), new)", "new", PREFIX_CACHE + "many_requests_in_few_rows[dp2-ep2-tp2]"),
    ("serving/scheduler.py", "(self.constrained and self.steps_in_flight)", "False", GRAMMAR),
    ("serving/scheduler.py", "1 if row.constrained else width", "width", GRAMMAR + "[True-1]"),
    ("serving/scheduler.py", "        if row.constrained:", "        if False:", GRAMMAR),
    ("serving/scheduler.py", "count[:] = 0", "pass", "tests/test_grammar.py::test_rows_of_grammars_step_together"),
    ("serving/engine.py", "dataclasses.replace(old, allowed=allowed)", "old", GRAMMAR),
    ("serving/engine.py", "if rows <= x.rows and options <= x.options)", "if rows <= x.rows and len(x.options) > 9)", "tests/test_grammar.py::test_programs_for_what_rows_ask"),
    ("serving/engine.py", "x[row, :count, :n].tolist()", "x[row, :count, -n:].tolist()", "tests/test_grammar.py::test_likeliest_of_prompts_and_answers"),
    ("conversation/grammar.py", "return self.matcher.is_stopped()", "return False", "tests/test_grammar.py::test_a_real_grammar"),
    ("conversation/streams.py", "final=not named or ", "final=", CHANNELS + "channels"),
    ("conversation/streams.py", "self.stop_strings if final else ()", "self.stop_strings", CHANNELS + "stop_strings_are_of_the_text"),
    ("conversation/streams.py", "self._append(self.message.finish())", "pass", CHANNELS + "stop_strings_are_of_the_text"),
    ("conversation/streams.py", "        self.marked = True\n", "", CHANNELS + "channels"),
    ("conversation/streams.py", "and marks[found[-1]] == channels.start", "", CHANNELS + "prompts_that_start_no_message"),
    ("serving/engine.py", "        assignments += self._send_forced(micro_batch)\n", "", FORCED + "windows"),
    ("serving/engine.py", "if request.score or request.sampling.top_logprobs is not None:", "if False:", FORCED + "log_probabilities"),
    ("serving/engine.py", "forced_tokens() if self.chunk_shapes else []", "forced_tokens()", FORCED + "how_many_are_enough"),
    ("serving/engine.py", "            if row.free:  # the answer has ended\n                return\n", "", FORCED + "where_an_answer_ends"),
    ("serving/scheduler.py", "max(self.given - 1 - self.computed, 0)", "max(len(self.answer.prompt) - 1 - self.computed, 0)", FORCED + "windows"),
    ("serving/scheduler.py", "self.limits.chunk_steps * sum(not each.free for each in shard.rows)", "self.limits.chunk_steps", FORCED + "how_many_are_enough"),
    ("terminal/chat.py", 'if terminal else ""', "", CHANNELS + "chat_over_a_pipe"),
    ("server/api_requests.py", "divided = self.chat and (request.grammar is None or self.tools is not None)", "divided = True", CHANNELS + "what_the_server_does_not_divide"),
    ("server/api_requests.py", "max(min(new, room), min(new, 1))", "new", FIELDS + "max_tokens_beyond_the_row"),
    ("server/api_requests.py", "max(min(new, room), min(new, 1))", "min(new, room)", FIELDS + "max_tokens_beyond_the_row"),
    ("server/api_requests.py", "[x for name, x in value.items() if name not in WITH_NULLS]", "value.values()", FIELDS + "null_is_absent_at_any_depth"),
    ("server/api_requests.py", 'options.setdefault("enable_thinking", False)', "pass", FIELDS + "grammars_leave_no_room_for_reasoning"),
    ("server/api_requests.py", "if not reasons and ends_within_reasoning(", "if False and ends_within_reasoning(", FIELDS + "grammars_leave_no_room_for_reasoning"),
    ("server/api_requests.py", 'others |= {"top_k": None} if every_token else {}', "pass", FIELDS + "top_k_of_all_tokens"),
    ("server/inert_fields.py", "if values is ANY or value in values:", "if True:", FIELDS + "fields_that_are_refused"),
    ("server/api_requests.py", 'NOT_VARIABLES = {"messages", "tools", ', 'NOT_VARIABLES = {"messages", ', FIELDS + "tools_are_no_option_of_the_template[/tokenize]"),
    ("server/inert_fields.py", '"user": ANY,', "", "tests/test_client_requests.py::test_requests_of_clients"),
    ("server/tokenizing.py", "    drop_nulls(fields)\n", "", SERVER + "test_tokenize"),
    ("server/formats.py", 'described = asked.get("json_schema", asked)', 'described = asked.get("json_schema", {})', FIELDS + "spellings_of_a_schema"),
    ("conversation/text.py", 'options["tools"] = tools', "pass", MESSAGES + "a_conversation_is_the_same_everywhere"),
    ("conversation/text.py", "messages = describe_tools(messages, tools, tool_format)", "pass", MESSAGES + "a_conversation_is_the_same_everywhere"),
    ("terminal/answers.py", "builder.encode(prompt.text, tools=prompt.tools)", "builder.encode(prompt.text)", MESSAGES + "a_conversation_is_the_same_everywhere"),
    ("conversation/messages.py", 'message.setdefault("name", name)', "pass", MESSAGES + "results_of_tools_have_the_names_of_their_functions"),
    ("conversation/messages.py", "for name, value in given.items() if value is not None", "for name, value in given.items()", MESSAGES + "messages"),
    ("conversation/messages.py", "- FIELDS_OF_ROLE.get(role, set())", '- FIELDS_OF_ROLE["assistant"]', MESSAGES + "wrong_messages"),
    ("conversation/templates.py", 'and not mentions(template, "developer")', "", REASONING + "words_of_templates"),
    ("conversation/streams.py", "partial = 0 if tag or last else overlap(new, END_THINK)", "partial = 0", REASONING + "tags"),
    ("conversation/streams.py", "begun = self.undecided.lstrip()", "begun = self.undecided", REASONING + "tags"),
    ("conversation/streams.py", 'self.section != "text" and token in self.tags', "False", REASONING + "tags"),
    ("conversation/templates.py", 'tokenizer.decode(prompt[-32:]).rstrip().endswith(THINK)', "False", REASONING + "prompts_that_begin_the_reasoning"),
    ("conversation/tool_calls.py", "self.escaped, self.quote = c == \"\\\\\", ", "self.escaped, self.quote = False, ", TOOLS + "calls_of_a_format[llama]"),
    ("conversation/tool_calls.py", "if c in \",)\" and self.nesting.outside:", "if c in \",)\":", TOOLS + "calls_of_a_format[pythonic]"),
    ("conversation/tool_calls.py", 'value if name in self.texts else read_value(value)', "read_value(value)", TOOLS + "calls_of_a_format[muse]"),
    ("conversation/tool_calls.py", "if not self.has_text and self.heads:", "if self.heads:", TOOLS + "texts_that_are_no_calls"),
    ("conversation/tool_calls.py", "keep = max((overlap(self.rest, mark) for mark in self.marks), default=0)", "keep = 0", TOOLS + "calls_of_a_format[tags]"),
    ("conversation/tool_calls.py", 'return "" if self.forced else text', "return text", TOOLS + "cut_call"),
    ("generation/replies.py", "            stream.reasoning_tokens,\n", "            0,\n", FIELDS + "reasoning"),
    ("generation/replies.py", "len(stream.text), len(stream.reasoning)", "len(stream.text), 0", CHANNELS + "server"),
    ("conversation/tool_grammar.py", "if use.several and shape.several:", "if shape.several:", TOOLS + "calls_of_a_format"),
    ("conversation/tool_grammar.py", 'text = f"/(?s:.*)/ & ~/{excluded}/"', "pass", TOOLS + "any_tokens_of_the_grammar_are_valid_calls[False-llama]"),
    ("conversation/tool_grammar.py", "if name in required:", "if True:", TOOLS + "calls_of_a_format[pythonic]"),
    ("conversation/tools.py", "    return {\"type\": \"object\"} | parameters | closed\n", "    return {\"type\": \"object\"} | parameters\n", TOOLS + "forced_calls"),
    ("server/api_responses.py", 'if choice.called and event.finish_reason == "stop":', "if choice.called:", TOOLS + "cut_call"),
    ("server/api_responses.py", "for x in stream.tool_calls if x.complete", "for x in stream.tool_calls", TOOLS + "cut_call"),
    ("generation/replies.py", "                    del self.open[answer]\n", "                    pass\n", SERVER + "test_echo_without_an_answer"),
    ("generation/replies.py", "self.engine.cancel(reply.answer)\n", "pass\n", SERVER + "test_a_client_that_leaves"),
    ("server/loop.py", "self.open_jobs -= len(ended)", "pass", SERVER + "test_echo_without_an_answer"),
    ("server/loop.py", "if beyond > 0:", "if False:", SERVER + "test_queue"),
    ("server/app.py", "            self.loop.cancel(self.jobs)\n", "            pass\n", SERVER + "test_a_client_that_leaves"),
    ("server/app.py", 'if kind != "application/json":', "if False:", SERVER + "test_other_refusals"),
    ("server/app.py", "elif self.local and not is_local(", "elif False and not is_local(", SERVER + "test_other_refusals"),
    ("server/app.py", "if not hmac.compare_digest(read(given).encode(), self.key.encode()):", "if False:", SERVER + "test_guard"),
    ("server/page/client.js", "headers, body, signal }", "headers, body }", "tests/test_page.py::test_stop"),
    ("server/page/client.js", "whole.arguments += ", "whole.arguments = ", CONTENTS + "reasoning_and_calls"),
    ("server/page/page.js", "if (conversations.includes(conversation)) store(", "if (false) store(", "tests/test_page.py::test_conversations"),
    ("server/page/page.js", "frame ??= requestAnimationFrame(", "frame = requestAnimationFrame(", CONTENTS + "one_drawing_per_frame"),
    ("server/page/page.js", "if (atEnd) log", "log", CONTENTS + "scrolling"),
    ("server/page/page.js", "sampling.seed += chosen;", "", CONTENTS + "alternatives"),
    ("server/page/page.js", '"temperature" in given ? {} : CAREFUL', "CAREFUL", CONTENTS + "sampling"),
    ("server/page/page.js", "filled.error || filled.note", "filled.note", CONTENTS + "a_screen_reader"),
    ("server/page/page.js", "(x) => x.content || x.reasoning || x.calls.length", "() => true", "tests/test_page.py::test_an_error"),
    ("server/page/markdown.js", "html: false, linkify", "html: true, linkify", CONTENTS + "scripts_are_text"),
    ("server/page/markdown.js", "made.textContent = text;", "made.innerHTML = text;", CONTENTS + "scripts_are_text"),
    ("server/page/markdown.js", "/^(https?|mailto):/i.test(url)", "true", CONTENTS + "scripts_are_text"),
    ("server/page/markdown.js", "line + 1 < starts.length", "true", CONTENTS + "a_growing_text"),
    ("server/page/markdown.js", "if (!this.definitions.references) return;", "return;", CONTENTS + "a_growing_text"),
    ("server/page/markdown.js", "this.start += starts[", "this.start += 0 * starts[", CONTENTS + "a_growing_text"),
    ("server/page/markdown.js", "if (old) change(old, made);", "if (old) old.replaceWith(made);", CONTENTS + "what_stays_in_a_growing_text"),
    ("server/page/markdown.js", "made.tabIndex = 0;", "", CONTENTS + "focus_order"),
    ("server/page/page.css", "[data-theme=dark] { color-scheme: dark; }", "", CONTENTS + "theme"),
    ("server/app.py", "; require-trusted-types-for 'script'", "", CONTENTS + "policy"),
    ("server/app.py", "default-src 'none'; ", "", CONTENTS + "policy"),
    ("terminal/serve_command.py", 'name != "seed" and value is not None', "True", "tests/test_server.py::test_models_and_health"),
    ("serving/engine.py", "row.answer.reused = row.reused", "pass", SERVER + "test_cached_tokens"),
    ("server/api_responses.py", "cached[prompt] = min(reused, cached.get(prompt, reused))", "cached[prompt] = reused", SERVER + "test_cached_tokens"),
    ("server/loop.py", "for job in self.undelivered])", "for job in self.replies.open.values()])", SERVER + "test_engine_failure"),
    ("server/loop.py", "self.failed = True", "pass", SERVER + "test_engine_failure"),
    ("server/access_log.py", 're.sub(r"[^!-~]", "?", str(value))', "str(value)", SERVER + "test_access_log"),
    ("server/access_log.py", "own if re.fullmatch(", "own if re.match(", SERVER + "test_request_ids"),
    ("server/access_log.py", "except queue.Full:\n", "except ValueError:\n", SERVER + "test_lines_that_nobody_reads"),
    ("server/access_log.py", "with contextlib.suppress(OSError, ValueError):", "if True:", SERVER + "test_lines_that_nobody_reads"),
    ("terminal/serve_command.py", "    watch.leave(1, ", "    print(", "tests/test_server_processes.py::test_the_engine_fails"),
    ("server/responses_input.py", "if old and added and max(old) < min(added):", "if False:", "tests/test_responses.py::test_input[one-message]"),
    ("server/responses_input.py", "if added == old[-1:] == [2]:", "if False:", "tests/test_responses.py::test_input[one-message]"),
    ("server/responses_output.py", "self.sequence_number += 1", "pass", "tests/test_responses.py::test_stream"),
    ("server/responses_output.py", "[] if piece.id is None else self._begin(", "self._begin(", "tests/test_responses.py::test_function_call[named]"),
    ("generation/request_builder.py", "seed=(request.sampling.seed + i) % 2**32", "seed=request.sampling.seed", SERVER + "test_samples_and_seeds"),
    ("server/api_responses.py", "[None, *answer.prompt_logprobs, *logprobs]", "[*answer.prompt_logprobs, *logprobs, None]", SERVER + "test_log_probabilities[False]"),
    ("server/api_responses.py", "return bisect.bisect(choice.job.stream.offsets, len(choice.text), hi=choice.used)", "return choice.used", SERVER + "test_text_offsets"),
    ("server/api_responses.py", "min(start + offset, end) for offset", "start + offset for offset", SERVER + "test_text_offsets"),
    ("server/api_responses.py", "count, offsets = codecs.getincrementaldecoder(\"utf-8\")(\"replace\"), -added, []", "count, offsets = codecs.getincrementaldecoder(\"utf-8\")(\"replace\"), 0, []", SERVER + "test_text_offsets"),
    ("server/api_responses.py", "count + len(begun[:-1])", "count", SERVER + "test_text_offsets"),
    ("server/api_responses.py", "if known else b\"\"", "", SERVER + "test_ids_without_a_token"),
    ("conversation/streams.py", "self.offsets[-1] += len(new) - len(new.lstrip(\"\\ufffd\"))", "pass", SERVER + "test_text_offsets_of_broken_characters"),
    ("sharding/sampling.py", "(tokens >= 0) & (ids >= 0)", "ids >= 0", SAMPLING),
    ("sharding/sampling.py", " & (at < end[:, None])", "", SAMPLING),
    ("sharding/sampling.py", "jnp.where(logits > 0, logits / penalty, logits * penalty)", "logits / penalty", SAMPLING),
    # the programs
    ("serving/steps.py", "of_rows(chunk.row, tokens), chunk.positions + 1)", "of_rows(chunk.row, tokens), chunk.positions)", PREFILL),
    ("serving/steps.py", "return length.at[slice(None) if rows is None else rows].add(count)", "return length", PREFILL),
    ("serving/steps.py", "return length.at[slice(None) if rows is None else rows].add(count)", "return length + count", PREFILL),
    ("serving/steps.py", "return length.at[slice(None) if rows is None else rows].add(count)", "return length.at[jnp.arange(count.size)].add(count)", SOME_ROWS),
    ("serving/steps.py", "own = of_rows(chunk.row, tokens)", "own = tokens[: read.shape[0]]", SOME_ROWS),
    ("serving/steps.py", "tokens, length = of_rows(rows, (tokens, length))\n            chunk = model.chunk_at(length, jnp.minimum(", "tokens, length = tokens[: count.size], length[: count.size]\n            chunk = model.chunk_at(length, jnp.minimum(", SOME_ROWS),
    ("serving/steps.py", "rows if chunk.row is None else chunk.row[:, None]", "rows", SOME_ROWS),
    ("serving/steps.py", "jnp.minimum(count, most_readable(length, cfg))", "count", GUESSES),
    ("serving/steps.py", "jnp.cumprod(right, 1, dtype=jnp.int32)", "right.astype(jnp.int32)", GUESSES),
    ("serving/steps.py", "return jnp.minimum(count, 1 + ", "return jnp.minimum(read.shape[1], 1 + ", GUESSES),
    ("serving/steps.py", 'with_drafts = own.at[rows, chunk.positions].set(read, mode="drop")', "with_drafts = own", GUESSES),
    ("serving/steps.py", "length = chunk.positions.reshape(-1) + 1", "length = jnp.repeat(chunk.start, T) + 1", GUESSES),
    ("serving/steps.py", "chunk.row, output.count, mesh)", "chunk.row, chunk.count, mesh)", GUESSES),
    ("serving/steps.py", "jnp.where(rows[i] < 0, to, source[i])", "to", ASSIGN),
    ("serving/steps.py", "jnp.where(rows[i] < 0, to, source[i])", "source[i]", ASSIGN),
    ("serving/steps.py", "jnp.where(rows < 0, old_length.size, rows)", "rows", ASSIGN),
    ("serving/steps.py", 'old_length.at[rows].set(length, mode="drop")', "old_length", ASSIGN),
    # the engine
    ("serving/engine.py", "rows[i], sources[i] = map(", "sources[i], rows[i] = map(", READ_ONCE),
    ("serving/programs.py", "(source != rows).any()", "(source != rows).all()", "tests/test_generation.py::test_requests_in_8_rows[dp2-ep2-tp2]"),
    ("serving/engine.py", "            self.sampling[number] = sampling_of(rows, options, self.programs.cfg.V)\n", "            pass\n", SAMPLES),
    ("serving/engine.py", 'answer.finish_reason or "length"', '"length"', CANCEL),
    ("serving/programs.py", "score = max((x.score for x in chunks if x.score is not None), default=None)", "score = None", "tests/test_generation.py::test_log_probabilities_of_prompts[ring-dp2-ep2-tp2]"),
    ("serving/engine.py", "[min(row.prefill_left, shape.width) for row in own]", "[row.prefill_left for row in own]", SCORES),
    ("serving/engine.py", "[(first + j, x, x.number)", "[(i + j, x, x.number)", PACE + "scores_of_several_prompts[dp2-tp4]"),
    ("serving/engine.py", "if np.isnan(scores.logprobs[i, :n]).any():", "if False:", DAMAGED),
    ("serving/chunks.py", "OVERHEAD = 64", "OVERHEAD = 0", "tests/test_generation.py::test_width_of_a_prefill_chunk"),
    ("serving/chunks.py", "WORTH_MORE_ROWS if shape.rows > best.rows else 1", "1", "tests/test_generation.py::test_shape_of_a_prefill_chunk"),
    ("serving/chunks.py", "(-min(unread[i], shape.width), unread[i])", "unread[i]", "tests/test_generation.py::test_shape_of_a_prefill_chunk"),
    ("serving/engine.py", "for _ in range(expected):", "while self.in_flight:", FETCHED),
    ("serving/engine.py", "or token in answer.request.stop:", "or token in answer.request.stop and len(answer.tokens) < answer.request.max_new_tokens:", STOPS),
    ("serving/engine.py", 'answer.finish_reason or "stop"', 'answer.finish_reason or "length"', STOPS),
    ("serving/engine.py", "                if answer.finish_reason:\n                    break\n", "", "tests/test_speculation.py::test_the_same_answers[ring-1-lookup 4-False]"),
    ("serving/engine.py", "return bool(self.in_flight) or", "return bool(self.in_flight) and", STOPS),
    ("serving/requests.py", "if self.positions > most:", "if self.positions >= most:", REFUSED),
    ("serving/engine.py", "                self.scheduler.queue.remove(answer)", "                pass", CANCEL),
    ("serving/requests.py", 'used = used | {"seed"} if', "used = used if", INTERRUPTED),
    ("serving/requests.py", 'else used - RANDOM_OPTIONS', "else set()", "tests/test_answers.py::test_each_prompt_has_its_own_options"),
    ("serving/chunks.py", "if longest > width // 2), default", "if longest > width), default", PACE + "only_shapes_within_the_limits_are_compiled"),
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
    ("serving/speculation.py", "length[rows] - ahead,", "length[rows],", DRAFT),
    ("serving/speculation.py", "jnp.where(i < output.count[:, None], start[:, None] + 1 + i, text.shape[1])", "start[:, None] + 1 + i", DRAFT),
    ("serving/speculation.py", 'text.at[rows[:, None], at].set(output.tokens, mode="drop")', "text", CHUNK_DRAFT),
    ("serving/speculation.py", "text, length = of_rows(rows, (text, length))", "text, length = text[: count.size], length[: count.size]", FEWEST_ROWS + "[lookup]"),
    ("serving/speculation.py", "start = select(rows, batch.cache.length)", "start = batch.cache.length[: count.size]", FEWEST_ROWS + "[draft]"),
    ("serving/speculation.py", "tokens_at(select(rows, batch.tokens), positions)", "tokens_at(batch.tokens[: count.size], positions)", FEWEST_ROWS + "[draft]"),
    ("serving/engine.py", "if rows <= x.rows and options", "if rows < x.rows and options", FEWEST_ROWS + "[None]"),
    ("serving/engine.py", "rows = [rows[i] for i in chosen]", "pass", FEWEST_ROWS + "[None]"),
    ("serving/engine.py", "(lambda x: x[chosen], (count, sampling))", "(lambda x: x[: chosen.size], (count, sampling))", FEWEST_ROWS + "[None]"),
    ("generation/llm.py", "active=len(self.replies.open) + len(requests))", "active=1)", DECODE_ROWS + "::test_answers_at_a_time"),
    ("generation/llm.py", "            self.engine.use(new)\n", "            pass\n", DECODE_ROWS + "::test_answers_at_a_time"),
    ("serving/needed.py", "for shape in programs.chunk_shapes if shape.rows <= rows]", "for shape in programs.chunk_shapes]", DECODE_ROWS + "::test_answers_at_a_time"),
    ("serving/needed.py", "[program for program in found if program != ChooseTokens(all_rows, sets[-1])]", "found", DECODE_ROWS + "::test_a_server_compiles_the_rest"),
    ("generation/llm.py", "        compile_programs(shapes, needed_programs(shapes, demand_of_kinds(shapes, first), active=1))", "        pass", "tests/test_python_api.py::test_load_compiles_for_the_first_prompt"),

    ("generation/replies.py", "if stream.stopped and self.error is None:", "if False:", "tests/test_python_api.py::test_options"),
    ("generation/llm.py", "k: v[i] if isinstance(v, (list, tuple, range)) else v for", "k: v[0] if isinstance(v, (list, tuple, range)) else v for", "tests/test_python_api.py::test_options"),
    ("generation/llm.py", "                    self.replies.cancel(reply)\n", "                    pass\n", "tests/test_python_api.py::test_streams"),
    ("serving/requests.py", 'defaults = {"repetition_penalty": config.get("repetition_penalty")}', "defaults = {}", "tests/test_command_line.py::test_sampling_defaults_come_from_the_checkpoint"),
    ("conversation/control_tokens.py", "is_control = token.special or written", "is_control = token.special", CONTROL + "spelled_tokens_are_text[chatml]"),
    ("conversation/control_tokens.py", "is_control = token.special or written", "is_control = True", CONTROL + "harmless_texts[gemma]"),
    ("conversation/control_tokens.py", "and not token.content.isspace()", "", CONTROL + "added_tokens_of_ordinary_text"),
    ("conversation/control_tokens.py", " - {None, tokenizer.unk_token_id}", " - {None}", CONTROL + "harmless_texts[unigram]"),
    ("conversation/control_tokens.py", "lstrip=token.lstrip, rstrip=token.rstrip,", "", CONTROL + "harmless_texts[gpt_oss]"),
    ("conversation/control_tokens.py", "            self.backend.normalizer = original.normalizer\n", "            pass\n", CONTROL + "harmless_texts[chatml]"),
    ("conversation/control_tokens.py", "return {self.mark(name): self.mark(x)", "return {name: self.mark(x)", CONTROL + "every_text_of_a_chat"),
    ("conversation/control_tokens.py", "self._respelled(parts, tokens, self.gap)", "self._respelled(parts, tokens)", CONTROL + "spelled_tokens_are_text[unigram]"),
    ("conversation/control_tokens.py", " or found != text.count(self.suffix)", "", CONTROL + "tokens_that_cannot_be_told_apart"),
    ("conversation/control_tokens.py", "if self.spelled.findall(rendered) == [name for name, _ in whole]:", "if False:", CONTROL + "every_text_of_a_chat"),
    ("conversation/control_tokens.py", "if self.spelled.findall(rendered) == [name for name, _ in whole]:", "if True:", CONTROL + "joined_by_the_template"),
    ("conversation/control_tokens.py", "self.original_ids.get(i, i) for i in ids if i != self.gap_id", "self.original_ids.get(i, i) for i in ids", CONTROL + "spelled_tokens_are_text[unigram]"),
    ("conversation/text.py", "(parameters - TEMPLATE_OPTIONS).intersection(options)", "set().intersection(options)", CONTROL + "variables_of_a_template"),
    ("conversation/text.py", "tokenizer.backend_tokenizer.no_truncation()", "pass", "tests/test_text.py::test_tokenizer_that_truncates"),
    ("conversation/text.py", "if count > 2 * max_tokens:", "if count > max_tokens:", TOO_LONG),
    ("conversation/text.py", "if count > 2 * max_tokens:", "if False:", TOO_LONG),
    ("server/lanes.py", "return await asyncio.shield(call)", "return await call", LANES + "cancelled_calls"),
    ("server/lanes.py", "if self.free.locked() and self.waiting >= self.max_waiting:", "if False:", LANES + "a_full_lane"),
    ("server/lanes.py", "        finally:\n            self.waiting -= 1", "        finally:\n            pass", LANES + "cancelled_calls"),
    ("server/lanes.py", "if len(body) > LARGE_BODY:", "if False:", SERVER + "test_large_prompts_delay_one_another_only"),
    ("server/app.py", "        if not working.done():\n", "        await working\n        if False:\n", SERVER + "test_a_client_that_leaves_before_its_prompt_is_tokenized"),
    ("generation/request_builder.py", "encode(self.tokenizer, text, self.vocabulary, self.max_len)", "encode(self.tokenizer, text, self.vocabulary)", SERVER + "test_prompts_that_cannot_fit"),
    ("generation/request_builder.py", "self.max_len, spelled, self.tools,", "None, spelled, self.tools,", SERVER + "test_prompts_that_cannot_fit"),
    ("generation/request_builder.py", "self.max_len, spelled, self.tools,", "self.max_len, False, self.tools,", CONTROL + "command_line"),
    ("generation/llm.py", "=special_tokens_in_messages,", "=False,", "tests/test_python_api.py::test_special_tokens_in_messages"),
    ("conversation/text.py", "max(ids) >= vocabulary", "max(ids) > vocabulary", "tests/test_text.py::test_tokens_beyond_the_vocabulary"),
    ("conversation/text.py", "for source in (generation_config(folder), config,", "for source in (config, generation_config(folder),", "tests/test_command_line.py::test_sampling_defaults_come_from_the_checkpoint"),
    ("conversation/streams.py", "partial = max((", "partial = min((", STOP_STRINGS),
    ("conversation/streams.py", "self.held_back[: min(ends)]", "self.held_back[: max(ends)]", STOP_STRINGS),
    ("conversation/tool_calls.py", "range(min(len(text), len(literal) - 1), 0, -1)", "range(1, min(len(text), len(literal) - 1) + 1)", STOP_STRINGS),
    ("conversation/streams.py", "[len(decode(self.last)) :]", "", STOP_STRINGS),
    ("conversation/streams.py", "self.new_decoder([token])", "self.new_decoder()", SINGLE_BYTES),
    ("conversation/text.py", "encoding.append(normalizers.Prepend(", "encoding.insert(0, normalizers.Prepend(", SENTENCEPIECE),
    ("conversation/text.py", 'get("add_bos_token", True)', 'get("add_bos_token", False)', SENTENCEPIECE),
    ("generation/replies.py", "if n and -likelihood / n < 700 else None", "if n else None", "tests/test_answers.py::test_perplexity"),
    ("terminal/answers.py", "tokens=self.answer.tokens[: stream.used]", "tokens=self.answer.tokens", STOP_STRINGS_OF_ANSWERS),
    ("terminal/answers.py", "logprobs=self.answer.logprobs[: stream.used]", "logprobs=self.answer.logprobs", STOP_STRINGS_OF_ANSWERS),
    ("terminal/printers.py", "begun, text = reply.taken[0] > 0, ", "begun, text = False, ", STOP_STRINGS_OF_ANSWERS),
    ("terminal/output_file.py", "for line in kept.values()) != whole:", "for line in kept.values()) == whole:", "tests/test_answers.py::test_held_answers_are_not_asked_again"),
    ("terminal/output_file.py", "if torn[: len(LINE)] != LINE[: len(torn)]:", "if False:", "tests/test_answers.py::test_wrong_output_files"),
    ("terminal/output_file.py", 'key = found["index"], found.get("sample", 0)', 'key = found["index"], 0', SAMPLES),
    ("terminal/output_file.py", 'return found["index"], found.get("sample", 0)', 'return found["index"], 0', SAMPLES),
    ("terminal/output_file.py", "if ordered != lines:", "if False:", INTERRUPTED),
    ("serving/requests.py", "if self.positions > most:", "if self.positions >= most:", "tests/test_answers.py::test_what_memory_does_not_hold_is_refused"),
    ("generation/request_builder.py", "seed=(request.sampling.seed + i) % 2**32", "seed=request.sampling.seed", SAMPLES),
    ("generation/request_builder.py", "min(self.new_tokens, max(self.max_len - len(prompt), 1))", "self.new_tokens", "tests/test_command_line.py::test_default_lengths_do_not_depend_on_the_batch"),
    ("serving/requests.py", 'asked.setdefault("temperature", 1.0)', "pass", "tests/test_answers.py::test_options_that_ask_for_samples"),
    ("deployment/memory.py", "-(-length // 128) * 128", "length // 128 * 128", MEMORY),
    ("deployment/memory.py", "else HEADROOM) if headroom else 0", "else 0) if headroom else 0", MEMORY),
    ("deployment/memory.py", "(ESTIMATE_HEADROOM if self.programs else", "(0 if self.programs else", PROGRAMS),
    ("deployment/memory.py", "+ programs.code + programs.temporaries", "+ programs.temporaries", PROGRAMS),
    ("deployment/memory.py", "+ programs.code + programs.temporaries", "+ programs.code", PROGRAMS),
    ("deployment/memory.py", "max(x.temporaries for x in programs)", "sum(x.temporaries for x in programs)", PROGRAMS),
    ("deployment/memory.py", "sum(x.code for x in programs)", "max(x.code for x in programs)", PROGRAMS),
    ("deployment/memory.py", "cache += copied * sum(", "cache += 0 * sum(", PROGRAMS),
    ("deployment/floor.py", "return job.rows / job.batch", "return 1", "tests/test_plan.py::test_what_is_needed"),
    ("planner/traffic.py", "if x.kernel and x.kernel == self.block_kernel:", "if False:", "tests/test_plan.py::test_a_loop_that_copies_blocks_of_a_row_walks_over_that_cache"),
    ("planner/traffic.py", "count=x.count * runs", "count=x.count", "tests/test_plan.py::test_prefill_in_groups_of_layers"),
    ("planner/traffic.py", """x.opcode != kind and '"is_sync":true' not in x.attributes""", "x.opcode != kind", PLAN_GPU + "kernels_of_a_gpu"),
    ("planner/hlo.py", r"""r'\bname = "(\w+)"'""", """'ir = "(ML)'""", PLAN_GPU + "kernels_of_a_gpu"),
    ("planner/traffic.py", "elif self.only_moves(x, JOINS):", "elif False:", PLAN_GPU + "joined_and_padded_weights_are_copies"),
    ("deployment/estimates.py", "(group - 1) * (2 if kind", "(group - 1) * (1 if kind", PLAN_GPU + "collectives_over_a_switch"),
    ("deployment/estimates.py", "START_SECONDS + steps * STEP_SECONDS", "START_SECONDS + STEP_SECONDS", PLAN_GPU + "collectives_over_a_switch"),
    ("planner/schedule.py", "right[1] * right[2]", "right[2]", PLAN_GPU + "kernels_run_one_after_another"),
    ("planner/schedule.py", "max(self.memory, self.now) + moved", "self.now + moved", SCHEDULE + "transfers_go_one_after_the_other"),
    ("planner/schedule.py", "max(self.links[link], self.now) +", "self.now +", SCHEDULE + "permutations_beside_products"),
    ("planner/schedule.py", "self.spent + rest, self.now", "self.spent, self.now", SCHEDULE + "trips_of_a_loop"),
    ("sharding/collective_matmul.py", "start = device_ahead(ring, -steps) * d", "start = device_ahead(ring, steps) * d", COLUMNS + "few_devices"),
    ("sharding/collective_matmul.py", "add_products(add_products(sums, behind, i), ahead, -i)", "add_products(add_products(sums, behind, i), ahead, i)", COLUMNS + "few_devices"),
    ("sharding/collective_matmul.py", "if n % 2 == 0:  # the", "if False:  # the", COLUMNS + "few_devices"),
    ("sharding/collective_matmul.py", "part(2 * device_ahead(ring, 1 + i) + 1)", "part(2 * device_ahead(ring, i) + 1)", COLUMNS + "few_devices"),
    ("sharding/collective_matmul.py", "lambda x: lax.pmean(column_mean(x), MODEL)", "column_mean", COLUMNS + "few_devices"),
    ("sharding/collective_matmul.py", "y * jnp.expand_dims(x.scale, tuple(range(2, y.ndim)))", "y", COLUMNS + "rounded_columns"),
    ("sharding/collective_matmul.py", "isinstance(x, Scattered) else lax.psum(x, axes)", "isinstance(x, Scattered) else x", COLUMNS + "few_devices"),
    ("sharding/collective_matmul.py", "or tokens < LEAST_TOKENS", "", COLUMNS + "which_chunks_are_by_columns"),
    ("sharding/interconnect.py", "line[1:] if i % 2 == 0 else line[:0:-1]", "line[1:]", COLUMNS + "rings"),
    ("planner/schedule.py", "2 * 3 * x.results", "2 * x.results", SCHEDULE + "operations_of_experts"),
    ("planner/schedule.py", "if tokens <= FEW_ROWS", "if True", SCHEDULE + "rows_of_experts"),
    ("planner/schedule.py", "full * max(TILES) +", "", SCHEDULE + "rows_of_experts"),
    ("planner/schedule.py", "max(narrow, LEAST_ROWS)", "narrow", SCHEDULE + "permutations_beside_products"),
    ("deployment/step_bytes.py", "positions - kind.mask.first_visible(positions)", "positions", BYTES),
    ("deployment/step_bytes.py", 'return experts if part_of(name, cfg) == "experts" else 1', "return 1", BYTES),
    ("deployment/step_bytes.py", "mesh_size(mesh, EXPERT))", "1)", BYTES),
    ("deployment/step_bytes.py", "/ sets[: within.size]", "", ACTIVE),
    ("deployment/step_bytes.py", "polypow([float(math.comb(size, k)) for k in range(m + 1)], shards)", "np.ones(E + 1)", ACTIVE),
    ("terminal/chat.py", "                    turns = []\n", "                    pass\n", "tests/test_chat.py::test_a_full_conversation"),
    ("terminal/chat.py", "return turns\n    answer", "return asked\n    answer", "tests/test_chat.py::test_a_full_conversation"),
    # checkpoints
    ("checkpoints/tensor_files.py", "if tensor.start < end:", "if False:", CHECKPOINTS),
    ("checkpoints/tensor_files.py", "if tensor.start > end:", "if False:", CHECKPOINTS),
    ("checkpoints/tensor_files.py", "if len(found) < len(pairs):", "if False:", CHECKPOINTS),
    ("checkpoints/tensor_files.py", "(i * shape[axis] + first) * row", "i * shape[axis] * row", CONVERSION),
    ("quantize.py", "jnp.where(nan, jnp.inf, scale)", "scale", CONVERSION),
    ("quantize.py", "jnp.where(nan, jnp.inf, scale)", "scale", QUANTIZE),
    ("checkpoints/checkpoint.py", "same_bits(x, y)", "True", CHECKPOINTS),
    ("checkpoints/tensor_files.py", "while axis and (", "while axis and (True or ", CONVERSION),
    ("checkpoints/loading.py", "        array.block_until_ready()\n        for source in plan.sources:\n            source.forget()", "        pass", CONVERSION),
    ("checkpoints/tensor_files.py", "% ALIGNMENT != 0", "* 0", CONVERSION),
    ("checkpoints/folders.py", "    allow_open_files()\n    tensors", "    tensors", CONVERSION),
    ("checkpoints/layouts.py", "-(-hi // self.block)", "hi // self.block", CHECKPOINTS),
    ("checkpoints/layouts.py", "slice(first[key], first[key] + hi - lo)", "slice(None)", CHECKPOINTS),
    ("checkpoints/layouts.py", "slice(*ends[part : part + 2])", "slice(None)", CHECKPOINTS),
    ("checkpoints/layouts.py", "min(max(row - first, 0), steps)", "min(row, steps)", CHECKPOINTS),
    ("checkpoints/dequantized.py", '{"gptq": 1, "gptq_v2": 0}', '{"gptq": 0, "gptq_v2": 0}', DEQUANTIZED),
    ("checkpoints/dequantized.py", 'if ordered or "g_idx" in parts.tensors:', "if False:", DEQUANTIZED),
    ("checkpoints/dequantized.py", "lo - first * per_group : hi - first * per_group", "lo : hi", DEQUANTIZED),
    ("checkpoints/folders.py", "all(file_checksum(folder / name) == x for name, x in checksums.items())", "True", GGUF),
    ("checkpoints/checkpoint.py", "in_order(lambda x: x.sample(), sampled", "in_order(StoredTensor.sample, sampled", DEQUANTIZED),
    ("checkpoints/dequantized.py", "AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)", "AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)", DEQUANTIZED),
    ("checkpoints/dequantized.py", "np.arange(lo, hi) // height", "np.arange(hi - lo) // height", DEQUANTIZED),
    ("checkpoints/dequantized.py", "any(scheme != schemes[0] for scheme in schemes)", "False", DEQUANTIZED),
    ("checkpoints/dequantized.py", "fields.finish({})", "pass", DEQUANTIZED),
    ("checkpoints/dequantized.py", "if tensor.dtype not in types:", "if False:", DEQUANTIZED),
    ("checkpoints/gguf/translation.py", ".swapaxes(1, 2)", "", GGUF),
    ("checkpoints/gguf/translation.py", "stored[lo : lo + step]", "stored[:step]", GGUF),
    ("checkpoints/gguf/translation.py", "wanted = order[lo:hi]", "wanted = order[lo : hi - 1]", GGUF),
    ("checkpoints/gguf/vocabulary.py", "ignore_merges=pre.whole", "ignore_merges=False", TOKENIZER),
    ("checkpoints/gguf/vocabulary.py", "by_default = settings", "by_default = False and settings", TOKENIZER),
    ("checkpoints/gguf/vocabulary.py", "&&[^\\p{Han}]]", "]", TOKENIZER),
    ("checkpoints/gguf/vocabulary.py", "for x in vocabulary.of(*types)", "for x in ()", TOKENIZER),
    ("checkpoints/gguf/vocabulary.py", "((CONTROL, UNKNOWN), True), ((USER_DEFINED,), False)", "((CONTROL, UNKNOWN), True),", TOKENIZER),
    ("checkpoints/gguf/vocabulary.py", "CONTROL if x in ENDS else kind", "kind", TOKENIZER),
    ("checkpoints/gguf/vocabulary.py", "if HARMONY.issubset(self.tokens):", "if False:", TOKENIZER),
    ("checkpoints/gguf/vocabulary.py", "control = {*ENDS, *self.of(CONTROL)}", "control = {*ENDS, *CONTROL_ENDS}", TOKENIZER),
    ("checkpoints/gguf/vocabulary.py", "    if pre.nfc:", "    if False:", TOKENIZER),
    ("checkpoints/gguf/vocabulary.py", '_flag(settings, "add_space_prefix", not gemma)', "not gemma", TOKENIZER),
    ("checkpoints/gguf/vocabulary.py", "reverse=True)", "reverse=False)", TOKENIZER),
    ("checkpoints/gguf/vocabulary.py", "found.sort(key=lambda pair: pair[:2]", "found.sort(key=lambda pair: pair[1:2]", TOKENIZER),
    ("checkpoints/gguf/vocabulary.py", "_refuse_unknown(settings)\n    vocab", "vocab", FILE_FIELDS),
    ("checkpoints/gguf/architectures.py", "        if not harmless:", "        if False:", FILE_FIELDS),
    ("checkpoints/gguf/translation.py", "if len(set(value)) != 1:", "if False:", GGUF),
    ("checkpoints/gguf/architectures.py", 'found.get("factor", 1) != 1', 'found.get("factor")', FILE_FIELDS),
    ("checkpoints/gguf/architectures.py", 'return {} if kind == "none" else', "return", FILE_FIELDS),
    ("checkpoints/dequantized.py", "+ offset) % 2**bits", "+ offset)", DEQUANTIZED),
    ("checkpoints/dequantized.py", "versions.extend(known or [stated])", "versions.extend([stated])", DEQUANTIZED),
    ("checkpoints/dequantized.py", "np.minimum(word + 1, count - 1)", "word", DEQUANTIZED),
    ("families/read.py", "if not unscaled and kept.get(name) != value:", "if False:", FILE_FIELDS),
    ("families/read.py", "return older or newer", "return newer or older", FILE_FIELDS),
    ("families/read.py", '"original_max_position_embeddings", NUMBER, positions)\n    factor', '"original_max_position_embeddings", NUMBER)\n    factor', FILE_FIELDS),
    ("families/registry.py", "if value != inside and (value or name in config):", "if False:", FILE_FIELDS),
    ("families/registry.py", "if None not in (value, other) and value != other:", "if False:", FILE_FIELDS),
    ("families/deepseek_v3.py", "if fields.take(name, int, follows) != follows:", "if fields.take(name, int, follows) == 0:", FILE_FIELDS + "::test_each_field_of_config_json[deepseek-v3]"),
    ("serving/requests.py", "if ignored := ", "if False and (ignored := True) and ", FILE_FIELDS),
    ("conversation/text.py", "if b'\"add_prefix_space\":true' not in", "if None is", FILE_FIELDS),
    ("checkpoints/gguf/translation.py", "float(str(np.float32(value)))", "value", GGUF),
    ("checkpoints/gguf/translation.py", "elif raw.kind in as_it_is:", "elif raw.kind in PLAIN:", GGUF),
    ("checkpoints/gguf/translation.py", "tensor.rows(lo, hi) - np.float32(offset)", "tensor.rows(lo, hi)", GGUF_MODEL + "[gemma3]"),
    ("checkpoints/gguf/translation.py", "not theirs or layer and int(layer) >= depth", "not theirs", GGUF),
    ("checkpoints/gguf/architectures.py", '"truncate": False', '"truncate": True', GGUF_MODEL + "[gpt-oss]"),
    ("checkpoints/gguf/architectures.py", "round(10 * log, 6)", "log", GGUF_MODEL + "[deepseek]"),
    ("checkpoints/gguf/architectures.py", "rotated / max(width, 1)", "1.0", GGUF_MODEL + "[glm4-moe]"),
    ("checkpoints/gguf/architectures.py", '"use_qk_norm": "blk.0.attn_q_norm.weight", ', "", GGUF_MODEL + "[glm4-moe]"),
    ("checkpoints/gguf/architectures.py", '_take_integer(fields, "block_count") - extra', '_take_integer(fields, "block_count")', "tests/test_gguf_models.py::test_older_deepseek"),
    ("checkpoints/gguf/architectures.py", 'widths["key"] - rotated', 'widths["key"]', GGUF_MODEL + "[kimi]"),
    ("checkpoints/gguf/architectures.py", "(8, 4) if", "(1, 1) if", "tests/test_gguf_models.py::test_groups_of_older_files"),
    ("checkpoints/gguf/architectures.py", "if depth == 62 else", "if False else", "tests/test_gguf_models.py::test_gemma3_fields"),
    ("checkpoints/gguf/container.py", 'if len(first.tensors) != (expected := first.fields.get("split.tensors.count")):', "if False:", SPLIT_REFUSED),
    ("checkpoints/gguf/container.py", "if (value := part.fields.get(name)) != expected:", "if False:", SPLIT_REFUSED),
    ("checkpoints/gguf/container.py", "if name in first.tensors:", "if False:", SPLIT_REFUSED),
    ("checkpoints/gguf/container.py", "if stop > self.size:", "if False:", GGUF),
    ("checkpoints/gguf/container.py", "-(-self.position // alignment) * alignment", "self.position", GGUF),
    ("checkpoints/layouts.py", "ours.start * width + lo * step", "lo * step", CHECKPOINTS),
    ("checkpoints/layouts.py", "1 if alone else whole", "whole", CHECKPOINTS),
    ("checkpoints/checkpoint.py", "if checksum is None or checksum != tensor.file.metadata.get(name):", "if False:", CHECKPOINTS),
    ("checkpoints/tensor_files.py", "start = -buffer.ctypes.data % ALIGNMENT", "start = 8", CHECKPOINTS),
    ("families/family.py", "in self.tensor_names:", "in ():", CHECKPOINTS),
    ("checkpoints/checkpoint.py", "copy or family.ignores(", "family.ignores(", CHECKPOINTS + "::test_index_with_a_tied_unembedding"),
    ("checkpoints/folders.py", " and not is_unused(name):", ":", CHECKPOINTS + "::test_index_with_absent_tensors"),
    ("checkpoints/folders.py", " and not is_unused(name):", " and False:", CHECKPOINTS + "::test_index_with_absent_tensors"),
    ("checkpoints/remote/hub.py", "refuse_pickled(name, names)", "pass", HUB + "::test_pickled_weights"),
    ("checkpoints/checkpoint.py", "not family.ignores(name, len(config.layers))", "True", CHECKPOINTS),
    ("families/fields.py", "value not in supported.get(name, ())", 'True', CHECKPOINTS),
    ("checkpoints/remote/hub.py", "commit = folder.name", "commit = revision", HUB),
    ("checkpoints/remote/hub.py", "if token and at_hub else {}", "if token else {}", HUB + "::test_with_little_room"),
    ("checkpoints/remote/object_storage.py", "self._located.pop(name, None)", "pass", HUB + "::test_with_little_room"),
    ("checkpoints/remote/object_storage.py", "if self._identity(answer.meta) != identity:", "if False:", OBJECTS + "::test_changed_in_between"),
    ("checkpoints/remote/object_storage.py", "if done < len(place):", "if False:", OBJECTS + "::test_asked_again"),
    ("checkpoints/remote/object_storage.py", "self._chunks(name, start + done, stop, identity)", "self._chunks(name, start, stop, identity)", OBJECTS + "::test_asked_again"),
    ("checkpoints/remote/fetching.py", "found = self.rows.setdefault(key, ours)", "found = self.rows[key] = ours", OBJECTS + "::test_loaded"),
    ("checkpoints/remote/fetching.py", "if sum(stop - first for first, stop in wanted) <= WASTE * part.nbytes:", "if True:", OBJECTS + "::test_columns_are_fetched_once"),
    ("checkpoints/loading.py", "if sources[stage].remote and", "if False and", OBJECTS + "::test_loaded"),
    ("checkpoints/remote/hub.py", 'r"-?????-of-\\1"', 'r"-00001-of-\\1"', HUB + "::test_gguf"),
    ("checkpoints/checkpoint.py", "return re.sub(r\"\\d+\", layer, tensor.name, count=1)", "return name", "tests/test_family_checkpoints.py::test_wrong_tensors"),
    ("families/gemma3.py", "    ropes.finish({})\n", "", "tests/test_family_checkpoints.py::test_wrong_fields"),
    ("checkpoints/writing.py", "if not (allow_nonfinite or _is_finite(made[-1])):", "if False:", CONVERSION),
    ("checkpoints/unfinished.py", "fcntl.flock(file, how | fcntl.LOCK_NB)", "pass", CONVERSION),
    ("checkpoints/writing.py", " if found is None]", "]", CONVERSION),
    ("checkpoints/unfinished.py", "file.content.version", "0", CONVERSION),
    ("checkpoints/remote/bucket_folder.py", "create_only=True", "create_only=False", BUCKETS + "whose_folder_it_is"),
    ("checkpoints/remote/bucket_folder.py", "if new and INDEX in self.remote.list():", "if False:", BUCKETS + "second_conversion_that_overtakes_the_first"),
    ("checkpoints/remote/bucket_folder.py", "self.remote.list().keys() <= {STATE}", "False", BUCKETS + "conversion_that_fails_at_once"),
    ("checkpoints/remote/bucket_folder.py", "and self._read(STATE) == identity", "and False", BUCKETS + "killed_conversion_goes_on[1]"),
    ("checkpoints/remote/bucket_folder.py", "first + ahead + 1]", "first + ahead]", BUCKETS + "files_that_are_here_at_a_time"),
    ("checkpoints/folders.py", "if STATE in names and INDEX not in names:", "if False:", BUCKETS + "killed_conversion_goes_on[0]"),
    ("quantize.py", "np.allclose(step, largest, rtol=1e-6,", "np.allclose(step, step, rtol=1e-6,", CONVERSION),
    ("benchmarks/kernel_checks.py", "error = np.where(np.isnan(error), np.inf, error)", "error = np.nan_to_num(error)", f"{FIRST_HOUR}::test_differences"),
    ("benchmarks/kernel_checks.py", "ok = failure is None and share <= 1", "ok = failure is None", f"{FIRST_HOUR}::test_a_wrong_kernel_and_what_avoids_it"),
    ("benchmarks/kernel_checks.py", "LLAMA_JAX_PLAIN={check.kind}", "LLAMA_JAX_PLAIN=experts", f"{FIRST_HOUR}::test_a_wrong_kernel_and_what_avoids_it"),
    ("benchmarks/first_hour.py", "    if not ok:\n        sys.exit(1)\n", "", f"{FIRST_HOUR}::test_a_wrong_kernel_and_what_avoids_it"),
    ("ops/platform.py", "plain if kind in plain_kinds() else ", "", f"{FIRST_HOUR}::test_a_wrong_kernel_and_what_avoids_it"),
    ("terminal/launch.py", "    plain_kinds()  # or its setting is refused\n", "", f"{FIRST_HOUR}::test_a_kind_that_there_is_not"),
    ("ops/grouped_matmul.py", ' and "experts" not in plain_kinds()', "", f"{FIRST_HOUR}::test_all_kernels[tpu]"),
    ("ops/matmul.py", 'values[rows] if "matmul" in plain_kinds() else ', "", f"{FIRST_HOUR}::test_all_kernels[tpu]"),
    ("benchmarks/quality.py", "jnp.exp(log_q) - p - p * ratio", "-p * ratio", QUALITY),
    ("quantize.py", "jnp.concatenate([divisors, -divisors])", "divisors", INT4),
    ("quantize.py", "jnp.arange(1.0, 9.0)", "jnp.arange(7.0, 9.0)", INT4),
    ("quantize.py", "better = error < best[0]", "better = error > best[0]", INT4),
    ("quantize.py", "jnp.where(jnp.all(jnp.isfinite(x), at), scale, jnp.inf)", "scale", INT4),
    ("quantize.py", "(pairs << 4) >> 4, pairs >> 4", "pairs >> 4, (pairs << 4) >> 4", INT4),
    ("quantize.py", "low | (high << 4)", "high | (low << 4)", INT4),
    ("quantize.py", "group_size < MIN_GROUP_SIZE", "False", INT4),
    ("quantize.py", "part + rest / PART", "part", INT4),
    ("ops/matmul.py", "math.prod(lead) > FEW_ROWS", "math.prod(lead) >= FEW_ROWS", INT4),
    ("ops/matmul.py", "rows > FEW_ROWS or not gpu", "not gpu", GPU_INT4),
    ("ops/gpu.py", "lax.div(at, D // scale.shape[1])", "0 * at", GPU_INT4),
    ("ops/gpu.py", "missing or x.shape[-1] % each", "missing", GPU_INT4),
    ("ops/matmul.py", "jnp.expand_dims(w.scale, n)", "1", INT4),
    ("ops/grouped_matmul.py", "j * weights[2].shape[0] + group", "group", EXPERTS),
    ("ops/grouped_matmul.py", "unit * factor, which", "unit, which", EXPERTS),
    ("sharding/arrays.py", "math.lcm(unit, self.format.pad_multiple(size * step))", "unit", INT4),
    ("sharding/arrays.py", "format=self.format, groups=groups)", "format=self.format)", INT4),
    ("quantize.py", "info.min_bits > self.bits or", "", INT4),
    ("quantize.py", "exponent - 3 + 127", "exponent - 2 + 127", MXFP4),
    ("quantize.py", "(0.25, 1.25, 2.5, 5)", "(0.25, 1.25, 2.5, 6)", MXFP4),
    ("quantize.py", "(size >= tie)", "(size > tie)", MXFP4),
    ("quantize.py", "jnp.where(finite, scale, 255)", "scale", MXFP4),
    ("quantize.py", "stored_as in (None, self.held_as)", "stored_as == self.held_as", MXFP4),
    ("checkpoints/checkpoint.py", "MXFP4 if published else None", "None", MXFP4),
    ("checkpoints/writing.py", "return not (x == 255).any()", "return True", MXFP4),
    ("checkpoints/dequantized.py", "if (exponent == 255).any():", "if False:", DEQUANTIZED),
    ("checkpoints/dequantized.py", "[E2M1[pairs & 15], E2M1[pairs >> 4]]", "[E2M1[pairs >> 4], E2M1[pairs & 15]]", DEQUANTIZED),
    ("ops/grouped_matmul.py", "row = 2 * (pair % 2) + block", "row = block", EXPERTS_MXFP4),
    ("ops/grouped_matmul.py", "exponents - largest + RANGE", "RANGE", EXPERTS_MXFP4),
    ("quantize.py", 'if letter in "pe"', 'if letter in ""', INT4),
    ("checkpoints/layouts.py", "// block * block, block)", ", 1)", INT4),
    ("checkpoints/file_plan.py", "lo //= axes[axis].block", "pass", INT4),
    ("quantize.py", "~jnp.any(worse & known)", "True", INT4),
    ("quantize.py", "jnp.clip(x / step, INT4_MIN, INT4_MAX)", "ours.values.astype(jnp.float32)", INT4),
    ("quantize.py", 'Requantized(self, INT8) if platform == "cpu" else', 'INT8 if platform == "cpu" else', QUANTIZE),
    ("deployment/memory.py", "format.on(platform(models[0].mesh)).bits", "format.bits", "tests/test_command_line.py::test_what_does_not_fit_is_refused_before_loading"),
    ("checkpoints/checkpoint.py", "if info.quantization == INT8 else {}", "if False else {}", DEQUANTIZED),
    ("checkpoints/writing.py", "for x in checkpoint.stored(*weight)] for", "for x in weight[:1]] for", DEQUANTIZED),
    ("benchmarks/quality.py", "targets >= 0", "targets >= -1", QUALITY),
    # the scheduler
    ("serving/scheduler.py", "min(matching, row.computed)", "matching", WAITS),
    ("serving/scheduler.py", "return start + int(differs.argmax())", "return n", READ_ONCE),
    ("serving/scheduler.py", "while (less :=", "if (less :=", EDGES),
    ("serving/rings.py", "n if first == mask.first_visible(latest) else first", "n if n >= latest - mask.ring else first", EDGES),
    ("serving/executors.py", "range(depth % n, depth, n)}) == 1", "range(depth % n, depth, n)}) > 0", EXECUTORS),
    ("serving/executors.py", "key=lambda n: depth % n", "key=lambda n: n", EXECUTORS),
    ("serving/executors.py", "if 2 * n > most]", "]", EXECUTORS),
    ("serving/executors.py", "several_programs if isinstance(step, PrefillChunk) else one_program", "one_program", EXECUTORS),
    ("serving/rings.py", "return mask.ring - length % mask.ring", "return mask.ring - length % mask.ring + 1", RINGS),
    ("serving/rings.py", "return (mask.ring - mask.window) // 2", "return mask.ring - mask.window", RINGS),
    ("serving/rings.py", "latest + drafts_in_ring(mask) - mask.ring", "latest - mask.ring", RINGS),
    ("model.py", "jnp.take_along_axis(x, count[:, None, None] - 1, 1)", "x[:, -1:]", "tests/test_decoding.py::test_unlike_prompts_in_several_calls[llama3-tp8]"),
    ("serving/scheduler.py", "answer.prefix_caching and not answer.request.score", "answer.prefix_caching", SCORES),
    ("serving/scheduler.py", "if row.free), key=lambda row: row.number", "if row.free), key=lambda row: -row.number", ROWS),
    ("serving/scheduler.py", "key=lambda row: (cached[row], row.free)", "key=lambda row: cached[row]", ROWS),
    ("serving/scheduler.py", "if source.free and source.computed < 2 * cached[source]:", "if source.free:", ROWS),
    ("serving/scheduler.py", "source if cached[source] >= MIN_COPIED else oldest", "source", ROWS),
    ("serving/scheduler.py", "source if cached[source] >= MIN_COPIED else oldest", "oldest", READ_ONCE),
    ("serving/scheduler.py", "return longest if worth else None", "return None", WAITS),
    ("serving/scheduler.py", "itertools.islice(queue, LOOKAHEAD)", "itertools.islice(queue, 1)", WAITS),
    ("serving/scheduler.py", "longest.shared - cached >= MIN_COPIED", "True", WAITS),
    ("serving/scheduler.py", "left[wait.row] = min(left[wait.row], wait.left)", "pass", WAITS),
    ("serving/scheduler.py", "        if oldest:", "        if True:", SHORT),
    ("serving/scheduler.py", "        if oldest:", "        if False:", LONG),
    ("serving/scheduler.py", "return 0 if self.debt else self.limits", "return self.limits", PACE + "the_pace_beside_long_prompts"),
    ("serving/scheduler.py", "self.debt - self.limits.budget * decoding, 0)", "self.debt - self.limits.budget, 0)", PACE + "the_budget_grows_with_the_rows_that_decode"),
    ("serving/scheduler.py", "return tokens * (1 + start / self.double_cost)", "return tokens", PACE + "tokens_late_in_a_prompt_cost_more"),
    ("serving/scheduler.py", "self.debt += cost if decoding else 0", "self.debt += cost", PACE + "all_is_read_at_once_without_decoding"),
    ("serving/scheduler.py", "if decodes or not any(row.decoding for row in self.rows):", "if decodes:", PACE + "stages_and_data_shards[2-1]"),
    ("serving/scheduler.py", "if decodes or not any(row.decoding for row in self.rows):", "if True:", PACE + "a_grammar_does_not_pay_twice"),
    ("serving/scheduler.py", "return max(sum(row.decoding for row in shard.rows) for shard in self.shards)", "return min(sum(row.decoding for row in shard.rows) for shard in self.shards)", PACE + "stages_and_data_shards[1-2]"),
    ("serving/engine.py", "micro_batch.next_to_prefill(at_most(largest, self.chunk_shapes)) if", "micro_batch.next_to_prefill(self.chunk_shapes) if", PACE + "the_pace_beside_long_prompts"),
    ("serving/engine.py", "self.scheduler.limits.cost(shape.tokens,", "self.scheduler.limits.cost(shape.width,", PACE + "short_prompts_share_the_budget"),
    ("serving/programs.py", "        jax.block_until_ready(self.last_read)\n", "", PACE + "the_host_is_at_most_one_chunk_ahead"),
    ("serving/executors.py", "    x, batch = lax.optimization_barrier((x, batch))\n", "", PACE + "a_chunk_is_read_when_its_layers_have_run"),
    ("serving/needed.py", "max(limits.alone, limits.beside_decoding))", "math.inf)", PACE + "only_shapes_within_the_limits_are_compiled"),
    ("serving/requests.py", "if prompt.min() < 0 or prompt.max() >= vocabulary:", "if False:", BAD),
    ("serving/requests.py", "                check_sampling(name, value)", "                pass", BAD),
    ("serving/scheduler.py", "len(self.answer.tokens) - self.steps_in_flight", "len(self.answer.tokens)", FETCHED),
    ("serving/scheduler.py", "self.text[self.computed + 1 :][: len(tokens)]", "self.text[self.computed :][: len(tokens)]", READ_ONCE),
    ("serving/engine.py", "                self._end_if_read(row, step)\n            assignments", "            assignments", SCORES),
    ("serving/engine.py", "if math.isnan(logprob) or token >= self.programs.cfg.V:", "if False:", DAMAGED),
    ("serving/engine.py", "if np.isnan(scores.logprobs[i, :n]).any():", "if False:", DAMAGED_SCORE),
    ("serving/engine.py", "if row.number != number:  #", "if False:  #", STOPS),
    ("serving/engine.py", "readable = len(prompt) == 1 or", "readable = True or", REFUSED),
    ("serving/engine.py", "if answer.finish_reason is None:\n            answer.finish_reason = \"cancelled\"", "if True:\n            answer.finish_reason = \"cancelled\"", CANCEL),
    ("terminal/answers.py", "if reply.error is not None:", "if False:", DAMAGED_TOKEN),
    ("terminal/chat.py", "if reply.error is not None:", "if False:", DAMAGED_TURN),
    # stages of layers
    ("sharding/stages.py", "jnp.where(lax.axis_index(STAGE) == 0, x, received)", "jnp.where(lax.axis_index(STAGE) == 0, x, 0 * received)", STAGES),
    ("sharding/collective_matmul.py", "lax.axis_index(MODEL) * d, d, x.ndim - 1)", "0 * lax.axis_index(MODEL), d, x.ndim - 1)", STAGES),
    ("sharding/stages.py", "lax.psum(jnp.where(is_last(), x, 0), STAGE)", "lax.psum(jnp.where(is_last(), 0, x), STAGE)", STAGES),
    ("serving/executors.py", "jnp.where(own < 0, chosen[:, 0], own)", "own", STAGES),
    ("serving/executors.py", "return jnp.where(stages.is_last(), tokens, unknown)", "return tokens", STAGES),
    ("serving/executors.py", "tokens=stages.to_all_stages(chosen, mesh)", "tokens=batch.stage_inputs.tokens", STAGES),
    ("serving/executors.py", "    result = stages.from_last_stage(own, mesh)", "    result = own", "tests/test_stages.py::test_command_line"),
    ("serving/programs.py", "self.waiting.append(self.batch)", "self.waiting.appendleft(self.batch)", STAGES),
    ("serving/programs.py", "if chunks[-1] is last_chunk", "if chunks[0] is last_chunk", "tests/test_stages.py::test_command_line"),
    ("deployment/memory.py", "* self.mesh.shape[STAGE]", "", "tests/test_stages.py::test_nothing_is_stored_twice"),
    ("checkpoints/loading.py", "(place[0][0], place[1:])", "(0, place[1:])", "tests/test_stages.py::test_command_line"),
    ("sharding/mesh.py", "if stage > 1 and cfg.layers != cfg.layers[: depth // stage] * stage:", "if depth % stage:", "tests/test_stages.py::test_refused_in_python"),
    # several processes
    ("deployment/memory.py", "every = gather(", "every = (lambda own: [own])(", SMALLEST),
    ("deployment/memory.py", "return min(shares)", "return shares[0]", SMALLEST),
    ("deployment/memory.py", "// sharing[process[\"host\"]]", "// len(process[\"own\"])", SMALLEST),
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
    ("deployment/chips.py", "max(axis) - min(axis) + 1", "max(axis) + 1", CHOSEN_MESH + "how_devices_are_joined"),
    ("deployment/chips.py", "if x.slice_index == devices[0].slice_index]", "]", CHOSEN_MESH + "how_devices_are_joined"),
    ("deployment/placement.py", "round(100 * math.log(x.cost)), x.ep,", "", CHOSEN_MESH + "experts_that_are_loaded_unevenly"),
    ("deployment/placement.py", "return missing, crosses,", "return crosses, missing,", CHOSEN_MESH + "mesh_over_a_slow_network"),
    ("deployment/placement.py", "round(100 * math.log(x.cost)), x.ep, x.cost", "-x.cost", CHOSEN_MESH + "what_it_says"),
    ("deployment/placement.py", "itertools.product((HEADROOM, 0), counts)", "itertools.product((HEADROOM,), counts)", CHOSEN_MESH + "fewer_rows_where_all_do_not_fit"),
    ("deployment/placement.py", "(dp * pp)) * dp * pp)", "(dp * pp)) * dp)", CHOSEN_MESH + "mesh_over_a_slow_network"),
    ("deployment/deploy.py", "best.cost < mesh.cost / WORTH_SAYING", "best.cost < mesh.cost", CHOSEN_MESH + "what_it_says"),
    ("deployment/step_bytes.py", "return mean + part * busiest_shard(E, A, less + 1, shards) if part else mean", "return mean", "tests/test_command_line.py::test_active_experts_of_maverick"),
    ("deployment/step_bytes.py", "mean += 1 - in_use[: within.size]", "mean += in_use[: within.size]", "tests/test_command_line.py::test_active_experts"),
    ("deployment/deploy.py", "if process_count() > 1:\n        checksums", "if False:\n        checksums", WEIGHTS),
    ("terminal/loaded_models.py", "        gc.enable()", "        pass", GARBAGE),
    ("main.py", "    gc.disable()", "    pass", GARBAGE),
    ("terminal/command_line.py", "    signal.pthread_sigmask(signal.SIG_BLOCK, endings)", "    pass", TERMINATED),
    ("serving/programs.py", "self.call(_replicated, tree, mesh=self.mesh) if jax.process_count() > 1 else tree", "tree", TWO),
    ("terminal/prompts.py", "found = from_first(lambda: [vars(prompt) for prompt in read_prompts(args)])", "found = [vars(prompt) for prompt in read_prompts(args)]", TWO),
    ("deployment/compilation_cache.py", "compiler._cache_write, compilation_cache.LRUCache = write, ProgramCache", "compilation_cache.LRUCache = ProgramCache", KEPT_PROGRAMS + "each_process_has_a_disk"),
    ("generation/llm.py", "    enable_compilation_cache()\n", "", KEPT_PROGRAMS + "from_python"),
    ("deployment/compilation_cache.py", "        return  # another one", "        pass  # another one", KEPT_PROGRAMS + "from_python_with_a_cache_of_its_own"),
    ("deployment/compilation_cache.py", "    if parameters != {", "    if parameters == {", KEPT_PROGRAMS + "another_jax"),
    ("deployment/compilation_cache.py", "return program if hashlib.sha256(program).digest() == checksum else None", "return program", KEPT_PROGRAMS + "a_bucket"),
    ("deployment/compilation_cache.py", "            os.utime(self.path / name)", "            pass", KEPT_PROGRAMS + "the_least_recently_used_go_first"),
    ("deployment/compilation_cache.py", "        if 0 <= self.max_bytes < len(content):", "        if False:", KEPT_PROGRAMS + "the_least_recently_used_go_first"),
    ("deployment/compilation_cache.py", "in sorted(files):", "in sorted(files, reverse=True):", KEPT_PROGRAMS + "the_least_recently_used_go_first"),
    ("deployment/compilation_cache.py", "or self.unseen <= self.max_bytes // 100:", ":", KEPT_PROGRAMS + "many_processes_keep_the_limit"),
    ("deployment/compilation_cache.py", "        self.unseen += size", "        pass", KEPT_PROGRAMS + "many_processes_keep_the_limit"),
    ("deployment/compilation_cache.py", "unfinished = self.path / f\"{uuid.uuid4().hex}{SUFFIX}\"", "unfinished = self.path / name", KEPT_PROGRAMS + "many_write_the_same_entry"),
    ("deployment/compilation_cache.py", "                unfinished.unlink()", "                pass", KEPT_PROGRAMS + "a_full_disk"),
    ("deployment/compilation_cache.py", "create_only=name in self.absent", "create_only=False", KEPT_PROGRAMS + "a_bucket"),
    ("deployment/compilation_cache.py", "create_only=name in self.absent", "create_only=True", KEPT_PROGRAMS + "a_bucket"),
    ("deployment/compilation_cache.py", "            self.readable = self.writable = False", "            pass", KEPT_PROGRAMS + "a_bucket_that_is_lost"),
    ("deployment/compilation_cache.py", "            self.writable = False\n            raise", "            raise", KEPT_PROGRAMS + "a_bucket_that_is_lost"),
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
