"""What scripts/aot_check.py reads in programs, and what it makes of workers that fail or end."""

import sys

import jax
import jax.numpy as jnp
import pytest
from hysparse_kernels.aot import compiled, ptx, runner, worker
from hysparse_kernels.aot.canaries import CANARIES, EXPECTED
from hysparse_kernels.aot.targets import TARGETS
from hysparse_kernels.catalogue import OPERATIONS, Operation, separated

ENTRY = """
.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry {name}(
	.param .u64 .ptr .align 16 {name}_param_0
)
.reqntid 128, 1, 1
{{
	.reg .b32 	%r<2>;
$L__BB0_1:
	.loc	1 18 5                          // kernel.py:18:5
	mov.u32 %r1, 0x0; ld.global.b32 {{ %r1 }}, [ %rd1 + 0 ]; // st.global in a remark
	{last}
}}
.section .debug_info {{ .b8 0 }}
"""

REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 67 registers, used 1 barriers
ptxas info    : Compile time = 8.614 ms
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
    16 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 4224 bytes smem, 400 bytes cmem[0]
"""

THUNKS = """001: kKernel [source | sink] k
002: kCustomKernel [source | next=003] first grid: [2, 1, 1] threads: [128, 1, 1]  \
shared_memory: {shared} bytes
003: kCustomKernel [source | next=004] second grid: [2, 1, 1] threads: [128, 1, 1]  \
shared_memory: 30000 bytes
"""


@pytest.mark.parametrize(
  "instruction",
  [
    "st.global.v4.b32 [ %rd5 + 0 ], { %r1, %r1, %r1, %r1 };",
    "@%p1 st.global.b32 [ %rd5 ], { %r1 };",
    "@!%p1 st.b32 [%rd5], %r1;",
    "$L__tmp0: red.global.add.f32 [%rd5], %f1;",
    "atom.global.add.u32 %r1, [%rd5], 1;",
    "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1, %r1}], [%r1];",
    "call.uni (retval0), helper, (param0);",
  ],
)
def test_a_kernel_that_writes_is_one(instruction):
  (kernel,) = ptx.kernels(ENTRY.format(name="k", last=instruction))
  assert kernel.name == "k" and not kernel.stub


@pytest.mark.parametrize(
  ("instruction", "why"),
  [
    ("", "writes nothing"),  # what Triton leaves of a kernel that divides by zero
    ("ret;", "writes nothing"),
    ("trap; exit;", "only traps"),
    ("call.uni __assertfail, (param0, param1); trap;", "only traps"),
    ("st.shared.b32 [%r1], %r1; st.local.b32 [%rd1], %r1;", "writes nothing"),
    ("cp.async.bulk.shared::cluster.global [%r1], [%rd1], 16, [%r1];", "writes nothing"),
    ("cp.async.cg.shared.global [%r1], [%rd1], 16;", "writes nothing"),
  ],
)
def test_a_stub_is_seen(instruction, why):
  (kernel,) = ptx.kernels(ENTRY.format(name="k", last=instruction))
  assert kernel.stub == f"kernel 'k' {why}"


def test_every_entry_is_looked_at():
  text = ENTRY.format(name="a", last="st.global.b32 [%rd1], %r1;") + ENTRY.format(name="b", last="")
  assert [(kernel.name, bool(kernel.stub)) for kernel in ptx.kernels(text)] == [
    ("a", False),
    ("b", True),
  ]


def test_the_assemblers_report_is_read():
  assert ptx.parse_report(REPORT) == {
    "first": ptx.Assembled(registers=67, spilled=0, shared=0),
    "second": ptx.Assembled(registers=255, spilled=24, shared=4224),
  }


def call(name):
  size = '"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"131072"}]'
  return f'%k = f32[8] custom-call(%x), custom_call_target="{name}", backend_config={{{size}}}\n'


def test_a_backends_kernels_are_counted():
  report = compiled.Report(0, 0, 0)
  compiled.own_kernels(report, 2 * call("tpu_custom_call"), "pallas_tpu")
  assert (report.kernels, report.vmem) == (2, 131072)


@pytest.mark.parametrize("backend", ["pallas_tpu", "pallas_gpu", "triton"])
def test_a_missing_kernel_is_seen(backend):
  with pytest.raises(compiled.CheckError, match="kernel missing"):
    compiled.own_kernels(compiled.Report(0, 0, 0), call("another_call"), backend)


def test_a_copy_of_all_experts_is_seen():
  spec = next(s for s in OPERATIONS["moe"].released if s.name == "released_decode")
  packed = spec.experts * 3 * spec.width * spec.inner // 2
  compiled.few_temporaries(compiled.Report(packed, 0, packed // 16), spec.most_temporaries)
  with pytest.raises(compiled.CheckError, match=f"copies: {packed:,} temporary bytes, of at most"):
    compiled.few_temporaries(compiled.Report(packed, 0, packed), spec.most_temporaries)


@pytest.fixture
def assembled(monkeypatch):
  """The assembler is not in the environment of the tests."""
  monkeypatch.setattr(ptx, "assemble", lambda text, arch: ptx.parse_report(REPORT))


PALLAS = """%k = f32[8] custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", \
mhlo.backend_config={ir = "first.py", name = "first", num_warps = 4 : i32}"""


def gpu_figures(folder, backend, last="st.global.b32 [%rd1], %r1;", shared=16384, own=1000):
  (folder / "module.1.ptx").write_text(ENTRY.format(name="first", last=last))
  (folder / "module.2.ptx").write_text("")
  (folder / "module.thunk_sequence.txt").write_text(THUNKS.format(shared=shared))
  (folder / "second.compile_info").write_text(f"second: shared_mem_bytes: {own}\n")
  report = compiled.Report(0, 0, 0)
  files = list(folder.iterdir())
  compiled.gpu_kernels(report, PALLAS, files, backend, TARGETS["sm_90"])
  return report.registers, report.spilled, report.shared


def test_a_backends_own_gpu_kernels_are_measured(tmp_path, assembled):
  assert gpu_figures(tmp_path, "pallas_gpu") == (67, 0, 16384)
  assert gpu_figures(tmp_path, "triton") == (255, 24, 4224 + 1000)
  assert gpu_figures(tmp_path, "xla") == (255, 24, 4224 + 30000)


@pytest.mark.parametrize(
  ("backend", "files", "why"),
  [
    ("pallas_gpu", {"last": "trap;"}, "only traps"),
    ("pallas_gpu", {"shared": 2**18}, "262,144 bytes of shared memory"),
    ("triton", {"own": 2**18}, "266,368 bytes of shared memory"),
  ],
)
def test_gpu_kernels_that_cannot_run_are_seen(tmp_path, assembled, backend, files, why):
  with pytest.raises(compiled.CheckError, match=why):
    gpu_figures(tmp_path, backend, **files)


# A worker that does what its cases are called.
WORKER = """
import json, os, sys, time
for case in sys.argv[3:]:
  if case == "op/broken": sys.exit("ImportError: nothing works")
  print(json.dumps({"case": case}), flush=True)
  if case == "op/abort":
    print("LLVM ERROR: unsupported cast\\n  a stack trace", file=sys.stderr, flush=True)
    os.abort()
  if case == "op/sleep": time.sleep(60)
  found = {"failure": "RESOURCE_EXHAUSTED"} if case == "op/too_large" else {"temporaries": 7}
  print(json.dumps({"case": case, "seconds": 1.5, **found}), flush=True)
"""


def run(tmp_path, *specs, seconds=30.0):
  (tmp_path / "worker.py").write_text(WORKER)
  job = runner.Job("sm_90", "xla", tuple(f"op/{spec}" for spec in specs))
  outcomes = list(runner.run([job], seconds, 1, (sys.executable, str(tmp_path / "worker.py"))))
  assert {(x.target, x.op, x.backend) for x in outcomes} == {("sm_90", "op", "xla")}
  return {outcome.spec: outcome for outcome in outcomes}


def test_one_that_ends_the_process_fails_alone(tmp_path):
  found = run(tmp_path, "a", "abort", "b", "too_large", "c")
  assert {name: bool(outcome.failure) for name, outcome in found.items()} == {
    "a": False,
    "abort": True,
    "b": False,
    "too_large": True,
    "c": False,
  }
  assert found["abort"].failure.endswith("was ended by SIGABRT: LLVM ERROR: unsupported cast")
  assert found["a"].report == {"temporaries": 7} and found["a"].seconds == 1.5


def test_one_that_does_not_end_fails_alone(tmp_path):
  found = run(tmp_path, "a", "sleep", "b", seconds=3.0)
  assert found["sleep"].failure == "not compiled after 3 seconds"
  assert not found["a"].failure and not found["b"].failure


def test_a_worker_that_cannot_begin_fails_for_all(tmp_path):
  found = run(tmp_path, "broken", "a")
  assert all("ImportError: nothing works" in outcome.failure for outcome in found.values())
  assert list(found) == ["broken", "a"]


def test_canaries_must_fail_of_what_they_are_made_for():
  outcomes = [
    runner.Outcome("v5e", "indexer", "xla", "s", failure="anything"),
    runner.Outcome(
      "sm_90", "stub", "pallas_gpu", "canary", failure="no kernel: 'k' writes nothing"
    ),
    runner.Outcome("sm_90", "stub", "pallas_gpu", "canary"),
    runner.Outcome("sm_90", "stub", "pallas_gpu", "canary", failure="another reason"),
  ]
  judged = list(runner.judge(outcomes, EXPECTED))
  assert judged[0] == outcomes[0]
  assert [outcome.failure.rpartition(": ")[2] for outcome in judged[1:]] == [
    "it compiled",
    "another reason",
  ]
  assert EXPECTED.keys() == CANARIES.keys()


def test_backends_are_compiled_for_their_own_chips():
  one = Operation(None, (), dict.fromkeys(["reference", "xla", "pallas_tpu"]))
  two = Operation(None, (), dict.fromkeys(["reference", "xla", "triton"]))
  platforms = {name: target.platform for name, target in TARGETS.items()}
  backends = ["xla", "pallas_tpu", "pallas_gpu", "triton"]
  found = list(runner.jobs({"1": one, "2": two}, platforms, backends, lambda *_: ["a", "b"]))
  for target in ("v5e", "v6e", "tpu7x"):
    assert runner.Job(target, "xla", ("1/a", "1/b", "2/a", "2/b")) in found
    assert runner.Job(target, "pallas_tpu", ("1/a", "1/b")) in found
  assert found[6:] == [
    runner.Job("sm_90", "xla", ("1/a", "1/b", "2/a", "2/b")),
    runner.Job("sm_90", "triton", ("2/a", "2/b")),
  ]


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_catalogue_names_specs_that_are_there(name):
  op = OPERATIONS[name]
  names = [spec.name for spec in (*op.specs, *op.released)]
  assert len(names) == len(set(names)) and {*op.compiled, *op.trained} <= set(names)


def test_arguments_are_split_into_arrays_and_the_rest():
  arguments = {"shape": jax.ShapeDtypeStruct((2**20, 2**20), "int8"), "tree": {"a": jnp.zeros(3)}}
  assert separated(arguments | {"k": 3, "none": None}) == (arguments, {"k": 3, "none": None})


def test_gradients_are_by_the_floats():
  call = lambda arrays: (arrays["x"] ** 2, arrays["n"])  # noqa: E731
  (found,) = worker.gradient(call)({"n": jnp.arange(2), "x": jnp.array([1.0, 3.0])})
  assert found.tolist() == [2.0, 6.0]
