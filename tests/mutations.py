"""One-line mutants of our own code; each must break the test named beside it.

    python tests/mutations.py [words of a mutant's name]

A suite that stays green under one of these does not test what it says. Each mutant runs in a copy
of the tree, so nothing here is ever changed; first the named tests must pass unchanged.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS = "kernels/hysparse_kernels"
WORKERS = 2
# Every layer alone on stored inputs, against what the published code gave: compiles in seconds.
PARITY = "tests/conversion/test_parity.py::test_layers[tiny-text-exact]"


@dataclasses.dataclass(frozen=True)
class Mutant:
  """Replaces the only occurrence of `old` in `file` by `new`; `test` must then fail."""

  name: str
  file: str
  old: str
  new: str
  test: str


MUTANTS = (
  Mutant(
    "an entry is visible one token early",
    "hysparse/nn/batch.py",
    "visible = (self.positions_BxS + 1) // ratio",
    "visible = (self.positions_BxS + 2) // ratio",
    "tests/nn/test_model.py::test_later_tokens_change_nothing",
  ),
  Mutant(
    "documents see each other's windows",
    f"{KERNELS}/sparse_attention/xla.py",
    "(expected_BxQxL >= 0) & (tags_BxL[:, None] == expected_BxQxL)",
    "(tags_BxL[:, None] >= 0)",
    "tests/kernels/test_sparse_attention.py::test_xla_equals_the_reference",
  ),
  Mutant(
    "documents see each other's entries",
    "hysparse/nn/batch.py",
    "return lo, lo +",
    "return lo * 0, lo +",
    "tests/nn/test_model.py::test_packed_documents_do_not_see_each_other",
  ),
  Mutant(
    "the window is one token too long",
    f"{KERNELS}/sparse_attention/xla.py",
    "(back_QxL < W)",
    "(back_QxL <= W)",
    "tests/kernels/test_sparse_attention.py::test_xla_equals_the_reference",
  ),
  Mutant(
    "the sink is scaled",
    f"{KERNELS}/sparse_attention/reference.py",
    "sink_H = sink_H.astype(jnp.float32)",
    "sink_H = scale * sink_H.astype(jnp.float32)",
    "tests/kernels/test_sparse_attention.py::test_the_reference_equals_float64_numpy",
  ),
  Mutant(
    "a quantiser multiplies by the reciprocal of its scale",
    f"{KERNELS}/formats/bits.py",
    "return x / jnp.where(jnp.isnan(x), jnp.nan, by)",
    "return x * (1 / by)",
    "tests/kernels/test_formats.py::test_values_are_divided_by_the_scale",
  ),
  Mutant(
    "a NaN is quantised to a number",
    f"{KERNELS}/formats/quantisers.py",
    "largest = (bits_of(x) & 0x7FFFFFFF).max(-1)",
    "largest = bits_of(jnp.nanmax(jnp.abs(x), -1))",
    "tests/kernels/test_formats.py::test_a_nan_poisons_its_block_and_no_other",
  ),
  Mutant(
    "checkpoints pack the even column high",
    f"{KERNELS}/formats/packing.py",
    "codes = jnp.stack(_nibbles(self.bytes), axis=-1)",
    "codes = jnp.stack(_nibbles(self.bytes)[::-1], axis=-1)",
    "tests/kernels/test_formats_weights.py::test_every_byte_in_both_orders",
  ),
  Mutant(
    "a large sink overflows",
    f"{KERNELS}/sparse_attention/softmax.py",
    "return Offsets(keys, jnp.maximum(keys, sink_H))",
    "return Offsets(keys, keys)",
    "tests/kernels/test_sparse_attention.py::test_a_sink_above_every_score_takes_all",
  ),
  Mutant(
    "the indexer's relu is dropped",
    f"{KERNELS}/indexer/scores.py",
    "jax.nn.relu(rounded(head))",
    "rounded(head)",
    "tests/kernels/test_indexer.py::test_selection_and_pool_equal_a_stable_sort",
  ),
  Mutant(
    "ties go to the higher entry",
    f"{KERNELS}/selection.py",
    "jax.lax.top_k(rank(scores, visible), min(top_k, scores.shape[-1]))",
    "(lambda b, i: (b, scores.shape[-1] - 1 - i))(*jax.lax.top_k(rank(scores, visible)[..., ::-1],"
    " min(top_k, scores.shape[-1])))",
    "tests/kernels/test_indexer.py::test_selection_and_pool_equal_a_stable_sort",
  ),
  Mutant(
    "negative zero loses ties",
    f"{KERNELS}/selection.py",
    "jnp.where(scores == 0, 0.0, scores)",
    "scores",
    "tests/kernels/test_indexer.py::test_nan_never_selects_and_negative_zero_ties_with_zero",
  ),
  Mutant(
    "a NaN score selects",
    f"{KERNELS}/selection.py",
    "visible & ~jnp.isnan(scores)",
    "visible",
    "tests/kernels/test_indexer.py::test_nan_never_selects_and_negative_zero_ties_with_zero",
  ),
  Mutant(
    "the newest block is not pinned in the pool",
    f"{KERNELS}/indexer/pool.py",
    "return jnp.where(holds, jnp.inf, best)",
    "return best",
    "tests/kernels/test_indexer.py::test_selection_and_pool_equal_a_stable_sort",
  ),
  Mutant(
    "later selections ignore the pool",
    "hysparse/nn/attention.py",
    'published.pool if role == "pool" else None',
    "None",
    "tests/nn/test_model.py::test_the_pool_limits_later_selections",
  ),
  Mutant(
    "the indexer's loss leaks into the backbone",
    "hysparse/nn/indexer.py",
    "x_BxSxD, qr_BxSxQ = jax.lax.stop_gradient((x_BxSxD, qr_BxSxQ))",
    "x_BxSxD, qr_BxSxQ = (x_BxSxD, qr_BxSxQ)",
    "tests/nn/test_model.py::test_the_indexer_loss_reaches_every_indexer_and_nothing_else",
  ),
  Mutant(
    "padding reaches experts",
    "hysparse/nn/moe.py",
    "jnp.where(batch.valid_BxS, count_BxS, 0)",
    "count_BxS",
    "tests/nn/test_model.py::test_padding_reaches_no_routed_expert",
  ),
  Mutant(
    "the stream mix is transposed",
    f"{KERNELS}/hyper_connections/xla.py",
    "sum(comb_NxMxM[:, i, :, None] * x[:, i, None] for i in range(x.shape[1]))",
    "sum(comb_NxMxM[:, :, i, None] * x[:, i, None] for i in range(x.shape[1]))",
    "tests/kernels/test_hyper_connections.py::test_fold_and_update_equal_float64_with_their_gradients",
  ),
  Mutant(
    "a sublayer folds with its own mix",
    "hysparse/nn/streams.py",
    'own = self.config.residual == "two_pass"',
    "own = True",
    "tests/nn/test_parts.py::test_streams_fold_with_the_previous_sublayers_mix",
  ),
  Mutant(
    "the hash looks across documents",
    f"{KERNELS}/engram/hash.py",
    "(past_BxS >= 0) & (positions_BxS >= back)",
    "(past_BxS >= 0)",
    "tests/kernels/test_engram.py::test_a_document_and_a_dead_token_hide_what_is_behind_them",
  ),
  Mutant(
    "the router's bias scales the output",
    f"{KERNELS}/moe/router.py",
    "jnp.take_along_axis(scores_NxE, ids_NxA, axis=1)",
    "jnp.take_along_axis(scores_NxE + bias_E, ids_NxA, axis=1)",
    "tests/kernels/test_moe_router.py::test_the_bias_only_chooses",
  ),
  Mutant(
    "the router's bias follows the load",
    "hysparse/training/state.py",
    "jnp.sign(load.mean(-1, keepdims=True) - load)",
    "jnp.sign(load - load.mean(-1, keepdims=True))",
    "tests/training/test_loop.py::test_balance_moves_each_bias_against_its_load",
  ),
  Mutant(
    "a step that is not finite thaws with the next",
    "hysparse/training/state.py",
    " & (state.bad_step == 0)",
    "",
    "tests/training/test_loop.py"
    "::test_a_step_that_is_not_finite_stops_with_its_batch_and_changes_nothing",
  ),
  Mutant(
    "metrics keep an evaluation that will be repeated",
    "hysparse/training/metrics.py",
    'step - ("eval" in record)',
    "step",
    "tests/training/test_loop.py::test_metrics_go_on_as_one_sequence",
  ),
  Mutant(
    "a damaged checkpoint is believed",
    "hysparse/checkpoints.py",
    "if found[name] != digest:",
    "if name not in found:",
    "tests/test_checkpoints.py::test_damage_never_passes",
  ),
  Mutant(
    "everything is decayed",
    "hysparse/training/optimizer.py",
    "weight_decay=optim.weight_decay if group.decayed else 0.0",
    "weight_decay=optim.weight_decay",
    "tests/training/test_optimizer.py::test_without_gradient_only_decayed_groups_move",
  ),
  Mutant(
    "parity: the indexer's relu is dropped",
    f"{KERNELS}/indexer/scores.py",
    "jax.nn.relu(rounded(head))",
    "rounded(head)",
    PARITY,
  ),
  Mutant(
    "parity: the stream mix is transposed",
    f"{KERNELS}/hyper_connections/xla.py",
    "sum(comb_NxMxM[:, i, :, None] * x[:, i, None] for i in range(x.shape[1]))",
    "sum(comb_NxMxM[:, :, i, None] * x[:, i, None] for i in range(x.shape[1]))",
    PARITY,
  ),
  Mutant(
    "parity: a sublayer folds with its own mix",
    "hysparse/nn/streams.py",
    'own = self.config.residual == "two_pass"',
    "own = True",
    PARITY,
  ),
  Mutant(
    "parity: entries are rotated one position too far",
    "hysparse/nn/attention.py",
    "rope.rotate(latent_BxTxC, positions_BxT, ",
    "rope.rotate(latent_BxTxC, positions_BxT + 1, ",
    PARITY,
  ),
  Mutant(
    "parity: a source's keys are those of the source before it",
    "hysparse/nn/attention.py",
    "      published, kept = self.publish(source or Source(x_BxSxD, batch), cache)\n",
    "      before = published.index_keys\n"
    "      published, kept = self.publish(source or Source(x_BxSxD, batch), cache)\n"
    "      if before is not None:\n"
    "        own = published.index_keys\n"
    "        rows = jax.tree.map(lambda a, b: jnp.resize(a, b.shape), before.rows, own.rows)\n"
    "        own = dataclasses.replace(own, rows=rows)\n"
    "        published = dataclasses.replace(published, index_keys=own)\n",
    PARITY,
  ),
  Mutant(
    "parity: the sink is left out",
    f"{KERNELS}/sparse_attention/xla.py",
    "total = total * top.fade + jnp.exp(sink_H - top.all)",
    "total = total * top.fade",
    PARITY,
  ),
  Mutant(
    "parity: the output is not rotated back",
    "hysparse/nn/latent.py",
    "out_BxSxHxC = rope.rotate(attended.out_BxSxHxC, positions_BxS, freqs, inverse=True)",
    "out_BxSxHxC = attended.out_BxSxHxC",
    PARITY,
  ),
  Mutant(
    "parity: the pool limits the source that publishes it",
    f"{KERNELS}/indexer/xla.py",
    'result["pool"] = pool.blocks_BxSxN',
    'result["pool"] = pool.blocks_BxSxN; visible &= pool.mask(T)',
    PARITY,
  ),
  Mutant(
    # No gate of the golden cases reaches its limit of 10 (case.json: swiglu_clamped).
    "the gate is clamped from below too",
    f"{KERNELS}/moe/activation.py",
    "jnp.minimum(gate, limit)",
    "jnp.clip(gate, -limit, limit)",
    "tests/kernels/test_moe.py::test_experts_equal_float64",
  ),
  Mutant(
    "parity: entries are rounded before they are rotated",
    "hysparse/nn/attention.py",
    "    entries = rope.rotate(latent_BxTxC,",
    "    entries = self.run.store(latent_BxTxC, self.config.main_kv, packed=False).decode()\n"
    "    entries = rope.rotate(entries,",
    PARITY.replace("exact", "kvquant"),
  ),
  Mutant(
    "a stale ring row takes part",
    "hysparse/cache/ring.py",
    "expected_BxN & (ring.tags_BxW[at] == positions_BxN)",
    "expected_BxN",
    "tests/cache/test_ring.py::test_a_row_of_another_position_never_takes_part_and_is_reported",
  ),
  Mutant(
    "rejected tokens stay in the ring",
    "hysparse/cache/settle.py",
    "at_BxN < accepted_B[:, None])",
    "at_BxN < pending.count_B[:, None])",
    "tests/cache/test_settle.py::test_rejected_tokens_leave_no_trace",
  ),
  Mutant(
    "rejected tokens stay in the group",
    "hysparse/cache/settle.py",
    "call, length_B, first_B, accepted_B, ratio)",
    "call, length_B, first_B, pending.count_B, ratio)",
    "tests/cache/test_settle.py::test_rejected_tokens_leave_no_trace",
  ),
  Mutant(
    "a group is lost at the end of a chunk",
    "hysparse/cache/groups.py",
    "positions_BxP < length_B[:, None], before_BxP",
    "positions_BxP < 0, before_BxP",
    "tests/cache/test_groups.py",
  ),
  Mutant(
    "a begun block is shared",
    "hysparse/cache/blocks.py",
    "full, begun = divmod(tokens, self.tokens)",
    "full, begun = -(-tokens // self.tokens), 0",
    "tests/cache/test_blocks.py::test_what_is_written_to_one_never_reaches_the_other",
  ),
  Mutant(
    "replay runs the end of the row and not of its tokens",
    "hysparse/nn/batch.py",
    "at_BxN = jnp.maximum(self.count_B - count, 0)[:, None] + jnp.arange(count)",
    "at_BxN = (self.tokens_BxS.shape[1] - count) + jnp.zeros_like(self.count_B)[:, None]"
    " + jnp.arange(count)",
    "tests/nn/test_replay.py::test_the_logits_are_those_of_a_computation_by_hand",
  ),
  Mutant(
    "the cache packs even columns",
    f"{KERNELS}/formats/stored.py",
    "    return SplitHalf.pack(codes).bytes",
    "    low, high = jnp.split(codes, 2, axis=-1)\n    return (high & 15) | (low << 4)",
    "tests/kernels/test_stored.py::test_decoding_gives_the_fake_quantised_values",
  ),
  Mutant(
    "integers: a tie goes to the odd code",
    f"{KERNELS}/fp4/integers.py",
    "if code % 2 == 0 else",
    "if code % 2 else",
    "tests/kernels/test_fp4.py::test_values_next_to_the_middle_between_two_codes",
  ),
  Mutant(
    "integers: a tie of scales goes to the odd code",
    f"{KERNELS}/fp4/integers.py",
    ".astype(jnp.int32) & nearest",
    ".astype(jnp.int32) & (1 - nearest)",
    "tests/kernels/test_fp4.py::"
    "test_blocks_whose_largest_value_is_next_to_the_middle_between_two_scales",
  ),
  Mutant(
    "the GPU kernel writes rows without a place",
    f"{KERNELS}/fp4/pallas_gpu.py",
    "at_N = jnp.where(there_N, place_N, out.shape[0])",
    "there_N, at_N = n_N < count, place_N",
    "tests/kernels/test_backends.py::test_a_kernel_equals_the_reference[fp4-pallas_gpu-fp8-gpu]",
  ),
  Mutant(
    "the TPU kernel writes rows without a place",
    f"{KERNELS}/fp4/pallas_tpu.py",
    "@pl.when(tile >= 0)",
    "@pl.when(tile >= NOWHERE)",
    "tests/kernels/test_backends.py::test_a_kernel_equals_the_reference[fp4-pallas_tpu-wide-tpu]",
  ),
  Mutant(
    "the GPU kernel counts the sink in every part",
    f"{KERNELS}/sparse_attention/pallas_gpu.py",
    "mask=real_H & (part == 0)",
    "mask=real_H",
    "tests/kernels/test_backends.py::test_a_kernel_equals_the_reference["
    "sparse_attention-pallas_gpu-one_token-gpu]",
  ),
  Mutant(
    "the running top-k puts the next chunk before what it has",
    f"{KERNELS}/indexer/running.py",
    "both = jnp.concatenate([self.scores_BxQxK, scores_BxQxN], axis=-1)\n"
    "    ids = jnp.concatenate([self.ids_BxQxK, jnp.broadcast_to(ids_N, scores_BxQxN.shape)],",
    "both = jnp.concatenate([scores_BxQxN, self.scores_BxQxK], axis=-1)\n"
    "    ids = jnp.concatenate([jnp.broadcast_to(ids_N, scores_BxQxN.shape), self.ids_BxQxK],",
    "tests/kernels/test_indexer.py::test_a_running_top_k_over_chunks_selects_the_same",
  ),
  Mutant(
    "a pool's blocks are read from the sequence's first one on",
    f"{KERNELS}/paged.py",
    "at = jnp.maximum(first, 0) // size",
    "at = jnp.maximum(groups, 0)",
    "tests/kernels/test_paged.py::test_groups_are_the_rows_of_their_entries",
  ),
  Mutant(
    "choices that are no expert are left to the grouped product",
    f"{KERNELS}/moe/ragged.py",
    "return jnp.where(used_NxA[..., None], y_NxAxD, 0).sum(1)",
    "return y_NxAxD.sum(1) + jnp.where(used_NxA, 0, weights_NxA).sum(1)[:, None]",
    "tests/kernels/test_moe.py::test_an_id_that_is_no_expert_never_indexes",
  ),
  Mutant(
    "a sequence that comes back has the ring tags of its first window",
    "hysparse/cache/records.py",
    "newest = record.tokens - 1 - (record.tokens - 1 - np.arange(W)) % W",
    "newest = np.arange(W)",
    "tests/cache/test_records.py::test_a_sequence_continues_in_another_cache",
  ),
  Mutant(
    "a record's bytes are not compared with their sum",
    "hysparse/cache/records.py",
    "if record._digest() != digest:",
    "if record.tokens < 0:",
    "tests/cache/test_records.py::test_every_changed_byte_is_noticed",
  ),
  Mutant(
    "a slot that has tokens is overwritten",
    "hysparse/cache/records.py",
    "if length := int(cache.length_B[slot]):",
    "if (length := int(cache.length_B[slot])) > 100:",
    "tests/cache/test_records.py::test_only_empty_slots_with_blocks_of_their_own_are_filled",
  ),
  Mutant(
    "a winner is written behind a row that moved",
    f"{KERNELS}/tuner.py",
    "    row = rows[index]",
    '    row = tuning.table(op)[backend]["rows"][index]',
    "tests/kernels/test_tuning.py::test_winners_of_two_rows_are_written_as_they_come",
  ),
  Mutant(
    "one letter may be two sizes",
    f"{KERNELS}/arguments.py",
    "fits &= known.setdefault(axis, size) == size",
    "known.setdefault(axis, size)",
    "tests/kernels/test_arguments.py::test_no_array_may_be_shorter_longer_or_broadcast",
  ),
  Mutant(
    "a selection that gathers its pool publishes none",
    f"{KERNELS}/indexer/xla.py",
    "within is not None and not pool_blocks and",
    "within is not None and",
    "tests/kernels/test_indexer.py::test_a_selection_inside_a_small_pool_may_publish_one",
  ),
  Mutant(
    "every separate expert is the first one",
    f"{KERNELS}/moe/xla.py",
    "lax.switch(e, branches",
    "lax.switch(0 * e, branches",
    "tests/kernels/test_moe.py::test_separate_experts_equal_stacked_ones",
  ),
  Mutant(
    "an interrupted engine keeps a cache that is used up",
    "hysparse/inference/engine.py",
    "used_up = any(x.is_deleted() for x in jax.tree.leaves(self._cache))",
    "used_up = False",
    "tests/inference/test_engine.py::test_an_interrupted_call_leaves_the_engine_usable",
  ),
  Mutant(
    "the residual distribution is skipped",
    "hysparse/inference/acceptance.py",
    "jnp.where(refused_Bx1, _residual(p_BxV, q_BxV), p_BxV)",
    "p_BxV",
    "tests/inference/test_acceptance.py::"
    "test_emitted_tokens_are_ancestral_samples_and_as_many_drafts_stand_as_can",
  ),
  Mutant(
    "a decoding query sees stale ring rows",
    f"{KERNELS}/sparse_attention/one_query.py",
    "(expected_BxW >= 0) & (tags_BxW == expected_BxW)",
    "tags_BxW >= 0",
    "tests/kernels/test_sparse_attention.py::test_one_query_sees_what_its_tags_say",
  ),
  Mutant(
    "every compressed layer of V4 has index keys",
    "hysparse/footprint/latent_families.py",
    'found.append(_grown("index_keys", of[_INDEXED], format, format.index_row(index), _INDEXED))',
    'found.append(_grown("index_keys", (0, 1), format, format.index_row(index), _INDEXED))',
    "tests/analysis/test_families.py::test_latents",
  ),
  Mutant(
    "layers that share keys count twice",
    "hysparse/footprint/families.py",
    'owners = layers - fields.count("num_kv_shared_layers", default=0, least=0)',
    'owners = layers - 0 * fields.count("num_kv_shared_layers", default=0, least=0)',
    "tests/analysis/test_families.py::test_layers_that_share_keys_own_none",
  ),
  Mutant(
    "padding of the last page is forgotten",
    "hysparse/analysis/table.py",
    "unfilled = component.rows_at(-(-context // page) * page) - rows",
    "unfilled = 0",
    "tests/analysis/test_table.py::test_padding_is_that_of_the_last_page",
  ),
  Mutant(
    "index scores cost as much as BF16",
    "hysparse/analysis/flop_table.py",
    "return _FORMAT_COST[config.index_k]",
    "return 1.0",
    "tests/analysis/test_machine.py::test_flops_as_the_report_counts_them",
  ),
  Mutant(
    "a session may be spread over devices",
    "hysparse/analysis/sessions.py",
    "if self.room < max(self.session.values()):",
    "if self.room * self.devices < max(self.session.values()):",
    "tests/analysis/test_machine.py::test_a_session_that_fits_on_no_device",
  ),
  Mutant(
    "wanted entries are those of another query",
    "hysparse/analysis/selected.py",
    "rows = np.arange(len(of_SxK), dtype=np.int64)[:, None] << 32",
    "rows = np.zeros((len(of_SxK), 1), np.int64)",
    "tests/analysis/test_selected.py::test_share",
  ),
)


def run(mutant: Mutant, *, mutated: bool = True) -> tuple[bool, str]:
  """(did its test pass, the end of pytest's output), in a copy of the tree."""
  with tempfile.TemporaryDirectory() as folder:
    copy = Path(folder) / "tree"
    skip = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", "*.egg-info", ".*_cache")
    shutil.copytree(ROOT, copy, ignore=skip)
    if mutated:
      path = copy / mutant.file
      text = path.read_text(encoding="utf-8")
      if text.count(mutant.old) != 1:
        return True, f"{mutant.file}: holds {text.count(mutant.old)} times: {mutant.old}"
      path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    paths = os.pathsep.join([str(copy), str(copy / "kernels")])
    result = subprocess.run(
      [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", mutant.test],
      cwd=copy,
      env=os.environ | {"PYTHONPATH": paths},
      capture_output=True,
      text=True,
    )
    return result.returncode == 0, (result.stdout + result.stderr)[-1500:]


def main(words: list[str]) -> int:
  chosen = [m for m in MUTANTS if all(word in m.name for word in words)]
  tests = list({m.test: m for m in chosen}.values())
  problems = 0
  with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
    jobs = [(m, False) for m in tests] + [(m, True) for m in chosen]
    for (mutant, mutated), (passed, output) in zip(
      jobs, pool.map(lambda job: run(job[0], mutated=job[1]), jobs), strict=True
    ):
      bad = passed if mutated else not passed
      problems += bad
      what = mutant.name if mutated else f"unchanged: {mutant.test}"
      verdict = ("SURVIVES" if passed else "caught") if mutated else ("ok" if passed else "FAILS")
      print(f"{verdict:9} {what}", flush=True)
      if bad:
        print(output, flush=True)
  print(f"{len(chosen)} mutants, {problems} problems")
  return 1 if problems or not chosen else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
