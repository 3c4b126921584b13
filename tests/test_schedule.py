"""The schedule: reading, writing, who reads whom, the published fields, and every illegal case."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hysparse import published_schedule
from hysparse.schedule import LayerSpec, ScheduleError, build, format_schedule, parse

RELEASED = "swa*2 (full/2 reuse*5)*3 | full/1+candidates reuse*3 (reindex reuse*3)*4"
RATIOS = (1, 2, 3, 4)


@st.composite
def schedules(draw, published_only=False):
  """A random legal schedule, made without the parser."""
  drafts = []
  source = pool = False
  for _ in range(draw(st.integers(1, 14))):
    modes = ["swa"] if published_only else ["swa", "mha", "gqa"]
    if not pool:
      modes += ["full"] if published_only else ["full", "dense"]
    if source:
      modes += ["reuse", "reindex"]
    mode = draw(st.sampled_from(modes))
    ratio = draw(st.sampled_from(RATIOS)) if mode in ("full", "dense") else 0
    candidates = mode in ("full", "reindex") and not pool and draw(st.integers(0, 3)) == 0
    drafts.append(
      LayerSpec(
        mode,
        ratio=ratio,
        kv_heads=draw(st.integers(1, 8)) if mode == "gqa" else None,
        candidate_role="source" if candidates else None,
      )
    )
    source = source or mode in ("full", "dense")
    pool = pool or candidates
  layers = len(drafts)
  engram = sorted(draw(st.sets(st.integers(0, layers - 1), max_size=3)))
  bar = draw(st.none() | st.integers(1, layers - 1)) if layers > 1 else None
  return build(drafts, engram, decoder_start=bar)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(schedules())
def test_what_is_written_is_read_back(schedule):
  text = format_schedule(schedule)
  assert parse(text, schedule.engram_layers) == schedule
  longhand = [str(spec) for spec in schedule]
  if schedule.decoder_start is not None:
    longhand.insert(schedule.decoder_start, "|")
  assert parse(" ".join(longhand), schedule.engram_layers) == schedule
  assert len(text) <= len(" ".join(longhand))


@settings(derandomize=True, deadline=None, max_examples=150)
@given(schedules(published_only=True), st.integers(0, 3))
def test_published_fields_are_read_back(schedule, draft_layers):
  fields = published_schedule.to_published(schedule, draft_layers)
  fields["num_nextn_predict_layers"] = draft_layers
  read = published_schedule.from_published(fields, decoder_start=schedule.decoder_start)
  assert read == schedule
  without_tail = {**fields, "compress_ratios": fields["compress_ratios"][: len(schedule)]}
  assert (
    published_schedule.from_published(without_tail, decoder_start=schedule.decoder_start)
    == schedule
  )


@settings(derandomize=True, deadline=None, max_examples=150)
@given(schedules())
def test_each_layer_reads_the_last_one_that_publishes(schedule):
  source = selection = pool = None
  for i, spec in enumerate(schedule):
    if spec.mode in ("full", "dense"):
      source = selection = i
    if spec.mode == "reindex":
      selection = i
    has_global_branch = spec.mode in ("full", "dense", "reindex", "reuse")
    assert spec.kv_source == (source if has_global_branch else None)
    assert spec.index_source == (selection if has_global_branch else None)
    assert spec.ratio == (schedule[source].ratio if has_global_branch else 0)
    assert (spec.candidate_role == "pool") == (spec.mode == "reindex" and pool is not None)
    if spec.candidate_role == "source":
      pool = i
    decoder = schedule.decoder_start is not None and i >= schedule.decoder_start
    assert spec.side == ("decoder" if decoder else "encoder")
    scored = any(s.has_indexer and s.kv_source == i for s in schedule)
    assert spec.owns_index_keys == scored


@settings(derandomize=True, deadline=None, max_examples=100)
@given(schedules())
def test_runs_cover_the_layers_and_never_hide_a_publisher(schedule):
  runs = schedule.runs()
  covered = [i for first, count in runs for i in range(first, first + count)]
  assert covered == list(range(len(schedule)))
  for first, count in runs:
    specs = schedule.layers[first : first + count]
    assert len({(s.mode, s.ratio, s.engram, s.side) for s in specs}) == 1
    assert count == 1 or not any(s.is_source or s.has_indexer for s in specs)


def test_the_released_schedule():
  schedule = parse(RELEASED, (1, 14), num_layers=40)
  assert str(schedule) == RELEASED
  assert schedule.kv_sources == (2, 8, 14, 20)
  assert schedule.index_sources == (2, 8, 14, 20, 24, 28, 32, 36)
  assert (schedule.decoder_start, schedule.candidate_source) == (20, 20)
  assert schedule.engram_layers == (1, 14)
  assert schedule.ratio_lcm == 2
  assert schedule[39] == LayerSpec("reuse", 1, kv_source=20, index_source=36, side="decoder")
  assert schedule.replay_unsupported_reason() is None


def test_a_dense_source_owns_index_keys_only_when_they_are_scored():
  anchor = parse("dense/2 reuse*2 dense/2 reindex reuse")
  assert [spec.owns_index_keys for spec in anchor] == [False] * 3 + [True] + [False] * 2
  assert [spec.index_source for spec in anchor] == [0, 0, 0, 3, 4, 4]


@pytest.mark.parametrize(
  "text, names",
  [
    ("swa reindex", "layer 1: 'reindex' comes before any full or dense"),
    ("swa*3 reuse", "layer 3: 'reuse' comes before any full or dense"),
    ("mha reuse", "layer 1: 'reuse' comes before any full or dense"),
    ("full/2 swa reuse/3", "layer 2: ratio 3 differs from 2, the ratio of its source, layer 0"),
    ("full/2 reindex/1", "layer 1: ratio 1 differs from 2"),
    ("full/2 reuse+candidates", "layer 1: 'reuse' selects nothing"),
    ("swa+candidates", "layer 0: 'swa' selects nothing"),
    ("dense/2+candidates", "layer 0: 'dense' selects nothing"),
    ("full/1+candidates reuse full/1", "layer 2: 'full/1' is a source after the candidate source"),
    ("full/1+candidates dense/1", "layer 1: 'dense/1' is a source after the candidate source"),
    ("full/1+candidates reindex+candidates", "layer 1: a second candidate source; layer 0"),
    ("swa*2 foo", "layer 2: unknown mode 'foo'; the modes are"),
    ("(swa*2 foo)*2", "layer 2: unknown mode 'foo'"),
    ("swa full", "layer 1: 'full' needs a number: write full/2"),
    ("swa gqa", "layer 1: 'gqa' needs a number: write gqa/2"),
    ("dense/0", "layer 0: 'dense/0': the number must be at least 1"),
    ("swa/2", "layer 0: 'swa/2': swa takes no number"),
    ("| swa", "the decoder starts at layer 0 of 1; there must be"),
    ("swa |", "the decoder starts at layer 1 of 1; there must be"),
    ("swa | swa | swa", "'|' stands a second time, before layer 2"),
    ("swa (swa | swa)", "'|' stands inside brackets, before layer 2"),
    ("swa (swa", "'(' before layer 1 is never closed"),
    ("swa) swa", "')' before layer 1 was never opened"),
    ("swa ()*2", "empty brackets before layer 1"),
    ("swa (swa *2*3)", "'*3' before layer 3 repeats nothing"),
    ("*2 swa", "'*2' before layer 0 repeats nothing"),
    ("swa*", "'*' before layer 1 must repeat at least once"),
    ("swa*0", "'*0' before layer 1 must repeat at least once"),
    ("swa*1000000000000", "more than 10000 layers"),
    ("(" * 200, "brackets inside each other"),
    ("  ", "is empty"),
  ],
)
def test_illegal_schedules_name_the_layer(text, names):
  with pytest.raises(ScheduleError) as error:
    parse(text)
  assert names in str(error.value)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "options, names",
  [
    ({"num_layers": 3}, "describes 2 layers, the model has 3"),
    ({"engram_layers": (2,)}, "engram_layers: layer 2 is outside 0..1"),
    ({"engram_layers": (-1,)}, "engram_layers: layer -1 is outside 0..1"),
    ({"engram_layers": (1, 1)}, "names a layer twice"),
    ({"decoder_start": 2}, "the decoder starts at layer 2"),
  ],
)
def test_illegal_fields_beside_the_string(options, names):
  with pytest.raises(ScheduleError, match=names):
    parse("swa full/2", **options)


def test_a_bar_that_contradicts_the_field():
  with pytest.raises(ScheduleError, match="the bar stands before layer 1, not 2"):
    parse("swa | swa swa", decoder_start=2)


PUBLISHED = {
  "num_hidden_layers": 4,
  "compress_ratios": [0, 2, 2, 1],
  "kv_source_layer_ids": [1, 3],
  "index_source_layer_ids": [1, 3],
}


@pytest.mark.parametrize(
  "changes, names",
  [
    ({"compress_ratios": [0, 2, 2]}, "has 3 entries; 4 layers"),
    ({"compress_ratios": [0, 2, 2, 1, 0]}, "has 5 entries; 4 layers"),
    ({"compress_ratios": [0, 2, 2, -1]}, "layer 3 has -1"),
    ({"compress_ratios": [0, 2, 2, 1, 2], "num_nextn_predict_layers": 1}, "layer 4 has 2"),
    ({"compress_ratios": [2, 2, 2, 1]}, "layer 0: 'reuse' comes before any full or dense"),
    ({"compress_ratios": [0, 2, 3, 1]}, "layer 2: ratio 3 differs from 2"),
    ({"kv_source_layer_ids": [1, 4]}, "kv_source_layer_ids: layer 4 is outside 0..3"),
    ({"index_source_layer_ids": [1, 3, 9]}, "index_source_layer_ids: layer 9 is outside 0..3"),
    ({"kv_source_layer_ids": [0, 1, 3]}, "layer 0 has compress_ratio 0"),
    ({"index_source_layer_ids": [1]}, "layer 3: is a KV source but not in index_source"),
    ({"candidate_source_layer_id": 2}, "layer 2 selects nothing"),
    ({"candidate_source_layer_id": 1}, "layer 3: 'full/1' is a source after the candidate source"),
    ({"engram_layer_ids": [4]}, "engram_layers: layer 4 is outside 0..3"),
  ],
)
def test_published_fields_that_contradict_each_other(changes, names):
  with pytest.raises(ScheduleError) as error:
    published_schedule.from_published({**PUBLISHED, **changes})
  assert names in str(error.value)


@pytest.mark.parametrize("name", ["num_hidden_layers", "compress_ratios", "kv_source_layer_ids"])
def test_a_missing_published_field_is_named(name):
  fields = {key: value for key, value in PUBLISHED.items() if key != name}
  with pytest.raises(ScheduleError, match=name):
    published_schedule.from_published(fields)


def test_the_bar_on_import_stands_before_a_last_source_of_ratio_1():
  assert published_schedule.from_published(PUBLISHED).decoder_start == 3
  assert published_schedule.from_published(PUBLISHED, decoder_start=None).decoder_start is None
  coarse = {**PUBLISHED, "compress_ratios": [0, 2, 2, 2]}
  assert published_schedule.from_published(coarse).decoder_start is None


@pytest.mark.parametrize("text", ["dense/2 reuse", "mha", "swa gqa/2"])
def test_modes_of_ours_have_no_published_field(text):
  with pytest.raises(ScheduleError, match=r"layer \d: .* has no published field"):
    published_schedule.to_published(parse(text))


@pytest.mark.parametrize(
  "text, engram, reason",
  [
    ("full/1 reuse", (), "no encoder|decoder bar"),
    ("swa | full/1 reuse full/1", (), "layer 3 (full/1) is a KV source inside the decoder"),
    ("swa | dense/1", (), "layer 1 (dense/1) attends to every entry"),
    ("swa | full/1 mha", (), "layer 2 (mha) keeps K and V of every token"),
    ("swa | full/1 reuse", (2,), "layer 2 adds Engram memory inside the decoder"),
    ("full/1 | reuse", (), "layer 1 (reuse) begins the decoder and is no KV source"),
  ],
)
def test_why_replay_is_refused(text, engram, reason):
  assert reason in parse(text, engram).replay_unsupported_reason()


def test_replay_is_supported_where_only_the_first_decoder_layer_needs_every_token():
  assert parse("full/2 | full/1 reuse reindex swa", (0, 1)).replay_unsupported_reason() is None
