from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loadtest import bench_gpu, gpu_memory
from loadtest.bench_gpu import Arms, engine_options, fitting, main, measure, parse_args, vllm_environment
from loadtest.gpu_cases import Settings, plan
from loadtest.report.load import read
from loadtest.report.model import Experiment
from loadtest.workers import WorkerError

FAKE = "tests.loadtest.fake_gpu_worker"
SMALL = ["--decode", "20:1,3", "--prefill", "20:2", "--rates", "50", "--temperatures", "0", "--duration-s", "1",
         "--prompt-tokens", "4,40", "--output-tokens", "3,6", "--rounds", "2", "--steps", "3"]  # fmt: skip


@pytest.fixture(autouse=True)
def no_signal_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu, "exit_on_sigterm", lambda: None)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu, "ARMS", dict.fromkeys(("quire", "vllm", "mlx-lm"), FAKE))


def run(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    out = folder / "gpu.json"
    status = main([*SMALL, "--out", str(out), *arguments])
    return status, json.loads(out.read_text())


def rounds(result: dict[str, Any], arm: str) -> list[int]:
    """How many the arm has of each case."""
    return [len(case["arms"].get(arm, {}).get("rounds", [])) for case in result["cases"]]


@pytest.mark.usefixtures("fakes")
def test_every_arm_runs_every_case_and_the_report_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, result = run(tmp_path, "--vllm-path", str(tmp_path / "site"), "--engine", "block_size=16")
    assert status == 0
    assert [case["name"] for case in result["cases"]] == [
        "decode 1 x 20", "decode 3 x 20", "prefill 2 x 20", "mixed 50/s, temperature 0",
    ]  # fmt: skip
    assert rounds(result, "quire") == rounds(result, "vllm") == [2, 2, 2, 1]
    assert rounds(result, "mlx-lm") == [2, 2, 2, 0], "mixed traffic is for --mixed-arms"
    assert result["skipped"] == []
    assert result["versions"]["fake"] == "1.0"
    assert result["arms"]["quire"]["options"]["block_size"] == 16
    path = result["arms"]["vllm"]["chosen"]["path"].split(":")
    assert path[0] == str(tmp_path / "site")
    assert str(tmp_path / "site") not in result["arms"]["quire"]["chosen"]["path"]
    assert str(tmp_path) not in json.dumps(result["arguments"])
    out = capsys.readouterr().out
    assert out.index("decode 3 x 20: ") < out.index("Decode, ms a step") < out.index("Mixed traffic")

    (found,) = read([tmp_path / "gpu.json"]).runs
    assert isinstance(found.content, Experiment)
    assert [warning for warning in found.warnings if "other programs" not in warning] == []
    metrics = {(metric.name, metric.case): metric for metric in found.content.metrics}
    steps = metrics["Decode step", "3 x 20"].values
    assert set(steps) == {"quire", "vllm", "mlx-lm"}
    assert list(steps["vllm"].samples) == [r["step_ms"] for r in result["cases"][1]["arms"]["vllm"]["rounds"]]
    ttft = metrics["Mixed traffic, TTFT p99", "50/s, temperature 0"].values
    assert ttft["quire"].median == result["cases"][3]["arms"]["quire"]["rounds"][0]["ttft_s"]["p99"]


@pytest.mark.usefixtures("fakes")
def test_an_arm_that_does_not_start_or_dies_is_reported_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A case of the mlx-lm arm needs some 20 steps, so it dies in its second.
    status, result = run(tmp_path, "--vllm", "broken=true", "--mlx-lm", "exit_at=30")
    assert status == 1
    assert "no such library" in result["arms"]["vllm"]["failure"]
    assert "ended" in result["arms"]["mlx-lm"]["failure"]
    assert rounds(result, "quire") == [2, 2, 2, 1]
    assert rounds(result, "vllm") == [0, 0, 0, 0]
    assert rounds(result, "mlx-lm")[0] == 2
    assert rounds(result, "mlx-lm")[2:] == [0, 0]
    out = capsys.readouterr().out
    assert "vllm: loadtest" not in out
    assert "no such library" in out
    assert "FAILED decode 3 x 20, mlx-lm" in out
    (found,) = read([tmp_path / "gpu.json"]).runs
    assert any("vllm is missing" in warning for warning in found.warnings)
    assert any(warning.startswith("decode 3 x 20, mlx-lm: ") for warning in found.warnings)


@pytest.mark.usefixtures("fakes")
def test_an_error_in_a_case_costs_that_case_only(tmp_path: Path) -> None:
    status, result = run(tmp_path, "--engine", "fail_at=3", "--arms", "quire")
    assert status == 1
    assert "out of memory" in result["cases"][0]["arms"]["quire"]["failure"]
    assert rounds(result, "quire") == [0, 2, 2, 1]


@pytest.mark.usefixtures("fakes")
def test_a_python_that_is_not_there_is_an_arm_that_can_not_start(tmp_path: Path) -> None:
    status, result = run(tmp_path, "--vllm-python", str(tmp_path / "python"), "--arms", "quire,vllm")
    assert status == 1
    assert "can't be started" in result["arms"]["vllm"]["failure"]
    assert list(result["arms"]) == ["quire", "vllm"]
    assert rounds(result, "quire") == [2, 2, 2, 1]


@pytest.mark.usefixtures("fakes")
def test_an_arm_on_a_cpu_is_no_arm_of_a_comparison_on_a_gpu(tmp_path: Path) -> None:
    status, result = run(tmp_path, "--engine", "on_cpu=true", "--arms", "quire,vllm")
    assert status == 1
    assert "no GPU" in result["arms"]["quire"]["failure"]
    assert rounds(result, "vllm") == [2, 2, 2, 1]
    assert run(tmp_path, "--engine", "on_cpu=true", "--arms", "quire", "--shape", "tiny")[0] == 0


def test_cases_after_the_budget_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    monkeypatch.setattr(bench_gpu, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class SlowArms:
        alive = ("quire", "vllm")

        def call(self, name: str, method: str, params: dict[str, Any]) -> Any:
            now[0] += 10.0
            return {"step_ms": 1.0, "gaps_ms": [1.0]}

    args = parse_args(["--arms", "quire,vllm"])
    cases = plan(["decode"], {512: [1, 8, 32]}, {}, [], [])
    skipped: list[dict[str, str]] = []
    found = list(measure(cases, SlowArms(), args, Settings(rounds=2), skipped, end=70.0))  # type: ignore[arg-type]
    # The first takes 80 s: a turn before the rounds, two rounds and the end, of two arms each.
    assert [(result.case.name, result.cut_short) for result in found] == [("decode 1 x 512", False)]
    assert skipped == [
        {"case": name, "reason": "the time was used up"} for name in ("decode 8 x 512", "decode 32 x 512")
    ]
    assert "decode 1 x 512: quire 1, vllm 1 (80.0 s)" in capsys.readouterr().out
    now[0] = 0.0
    (first, *_) = measure(cases, SlowArms(), args, Settings(rounds=2), [], end=35.0)  # type: ignore[arg-type]
    assert first.cut_short
    assert {arm: len(rounds) for arm, rounds in first.rounds.items()} == {"quire": 1, "vllm": 1}


def test_an_arm_that_does_not_answer_until_the_end_is_stopped_for_good(tmp_path: Path) -> None:
    arms = Arms({"vllm": FAKE}, tmp_path, deadline=0.0)
    try:
        arms.start({"vllm": {"model": {"vocab_size": 100}, "engine": {"sleep_at": 2}}}, {}, 120)
        assert arms.alive == ["vllm"]
        with pytest.raises(WorkerError, match="did not answer"):
            arms.call("vllm", "prefill", {"batch": 4, "context": 5, "seed": 0})
        with pytest.raises(WorkerError, match="has been stopped"):
            arms.call("vllm", "end", {})
    finally:
        arms.close()
    assert arms.alive == []
    assert "did not answer 'prefill'" in arms.described["vllm"]["failure"]
    assert arms.described["vllm"]["ready_s"] > 0


def test_cases_whose_kv_does_not_fit_are_skipped_and_the_pools_are_of_one_size() -> None:
    args = parse_args(["--shape", "llama-1b", "--kv-gib", "20"])
    settings = Settings()
    cases = plan(args.cases, args.decode, args.prefill, args.rates, args.temperatures)
    fit, skipped = fitting(cases, args, settings)
    assert {entry["case"] for entry in skipped} == {"decode 256 x 4,096", "decode 128 x 16,384", "decode 256 x 16,384"}
    assert "--kv-gib is 20" in skipped[0]["reason"]
    options = engine_options(fit, args, settings)
    bytes_per_token = 16 * 8 * 64 * 2 * 2
    assert options["vllm"]["kv_cache_memory_bytes"] == options["quire"]["num_blocks"] * 16 * bytes_per_token
    assert options["quire"]["num_blocks"] * 16 >= max(case.pool_tokens(settings, 256) for case in fit)
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        assert options["quire"][name] == options["vllm"][name]
    assert options["mlx-lm"]["completion_batch_size"] == 256


def test_options_of_the_command_line_reach_the_engines() -> None:
    args = parse_args(["--engine", "scheduler=itl_target", "--vllm", "enforce_eager=true", "--mlx-lm",
                       "prefill_batch_size=4", "--decode", "16:300", "--shape", "tiny"])  # fmt: skip
    settings = Settings()
    options = engine_options(plan(["decode"], args.decode, {}, [], []), args, settings)
    assert options["quire"]["scheduler"] == "itl_target"
    assert options["vllm"]["enforce_eager"] is True
    limit = options["quire"]["memory_limit_gib"]
    assert options["mlx-lm"] == {"completion_batch_size": 300, "prefill_batch_size": 4, "memory_limit_gib": limit}
    assert options["quire"]["max_num_seqs"] == 300, "as many as the largest batch"


def test_the_default_bound_of_kv_holds_what_a_larger_one_would() -> None:
    settings = Settings()
    found = []
    for arguments in ([], ["--kv-gib", "32"]):
        args = parse_args(arguments)
        cases = plan(args.cases, args.decode, args.prefill, args.rates, args.temperatures)
        found.append(fitting(cases, args, settings)[0])
    assert args.kv_gib == 32
    assert parse_args([]).kv_gib == 20
    assert found[0] == found[1]


def test_arms_on_mlx_are_bounded_by_weights_kv_and_room_beside() -> None:
    settings = Settings()
    args = parse_args(["--shape", "llama-1b"])
    cases = plan(["decode"], {512: [8]}, {}, [], [])
    options = engine_options(cases, args, settings)
    kv_gib = options["vllm"]["kv_cache_memory_bytes"] / 2**30
    bound = kv_gib + 2 * 1_235_814_400 / 2**30 + 16
    assert options["quire"]["memory_limit_gib"] == options["mlx-lm"]["memory_limit_gib"] == pytest.approx(bound)
    assert "memory_limit_gib" not in options["vllm"]
    args = parse_args(["--engine", "memory_limit_gib=50", "--mlx-lm", "memory_limit_gib=null"])
    options = engine_options(cases, args, settings)
    assert options["quire"]["memory_limit_gib"] == 50
    assert options["mlx-lm"]["memory_limit_gib"] is None


@pytest.mark.usefixtures("fakes")
def test_arms_that_may_take_more_than_the_gpu_has_are_warned_of_before_they_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    total: list[float | None] = [30.0]
    monkeypatch.setattr(gpu_memory, "gpu_gib", lambda: total[0])
    bounds = ["--engine", "memory_limit_gib=17", "--mlx-lm", "memory_limit_gib=18", "--arms"]
    assert run(tmp_path, *bounds, "quire,mlx-lm")[0] == 0, "it is no more than a warning"
    out = capsys.readouterr().out
    words = "WARNING: together the arms may take 35.0 GiB (quire 17.0, mlx-lm 18.0), and the GPU has 30.0 GiB"
    assert out.index(words) < out.index("quire: ready")
    assert "Drop an arm (--arms), or lower --kv-gib" in out
    for enough, arms in ((36.0, "quire,mlx-lm"), (30.0, "quire"), (None, "quire,mlx-lm")):
        total[0] = enough
        run(tmp_path, *bounds, arms)
        assert "WARNING" not in capsys.readouterr().out


def test_batches_of_a_context_that_is_given_twice_are_put_together() -> None:
    args = parse_args(["--decode", "64:4,1", "--decode", "32:2", "--decode", "64:1,8", "--prefill", "9:1", "--prefill",
                       "9:3"])  # fmt: skip
    cases = plan(["decode", "prefill"], args.decode, args.prefill, [], [])
    assert [case.name for case in cases] == [
        "decode 4 x 64", "decode 1 x 64", "decode 8 x 64", "decode 2 x 32", "prefill 1 x 9", "prefill 3 x 9",
    ]  # fmt: skip


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit(143)], ids=["Ctrl-C", "SIGTERM"])
def test_a_run_that_is_interrupted_says_what_it_did_not_run(
    stop: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = bench_gpu.run_case

    def until_the_second(case: Any, *arguments: Any) -> Any:
        if case.batch == 3:
            raise stop
        return right(case, *arguments)

    monkeypatch.setattr(bench_gpu, "run_case", until_the_second)
    with pytest.raises(type(stop)):
        run(tmp_path, "--arms", "quire", "--decode", "1000000:300")
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert [case["name"] for case in result["cases"]] == ["decode 1 x 20"]
    assert [(entry["case"], "--kv-gib" in entry["reason"]) for entry in result["skipped"]] == [
        ("decode 300 x 1,000,000", True), ("decode 3 x 20", False), ("prefill 2 x 20", False),
        ("mixed 50/s, temperature 0", False),
    ]  # fmt: skip
    assert {entry["reason"] for entry in result["skipped"][1:]} == {"the run was interrupted"}
    out = capsys.readouterr().out
    assert "SKIPPED prefill 2 x 20: the run was interrupted" in out


@pytest.mark.usefixtures("fakes")
def test_a_case_that_is_done_is_kept_whenever_the_run_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, calls = bench_gpu.CaseResult.to_json, iter((True, False))

    def interrupted_once(case: Any) -> Any:
        if next(calls):
            raise KeyboardInterrupt
        return right(case)

    monkeypatch.setattr(bench_gpu.CaseResult, "to_json", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "--arms", "quire", "--cases", "decode")
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert [case["name"] for case in result["cases"]] == ["decode 1 x 20"]
    assert [entry["case"] for entry in result["skipped"]] == ["decode 3 x 20"]


def test_ctrl_c_ends_the_program_with_130_and_no_traceback() -> None:
    code = (
        "import runpy, loadtest.options as options\n"
        "def interrupted():\n    raise KeyboardInterrupt\n"
        "options.exit_on_sigterm = interrupted\n"
        "runpy.run_module('loadtest.bench_gpu', run_name='__main__')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stderr) == (130, "")


@pytest.mark.usefixtures("fakes", "full_disk")
def test_tables_are_printed_also_where_the_result_can_not_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OSError, match="no space"):
        run(tmp_path, "--arms", "quire")
    out = capsys.readouterr().out
    assert "Decode, ms a step" in out
    assert "Written" not in out


def test_vllms_process_has_its_own_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    args = parse_args(["--vllm-path", str(tmp_path), "--vllm-env", "LD_LIBRARY_PATH=", "--vllm-env", "A=b=c"])
    assert vllm_environment(args) == {"PYTHONPATH": f"{tmp_path}:/ours", "LD_LIBRARY_PATH": "", "A": "b=c"}
    assert vllm_environment(parse_args([])) == {}


@pytest.mark.parametrize(
    "arguments",
    [["--arms", "quire,llama"], ["--cases", "encode"], ["--rates", "0"], ["--rates", "inf"], ["--temperatures", "-1"],
     ["--decode", "512"], ["--prompt-tokens", "9,3"], ["--vllm-env", "A"], ["--max-num-batched-tokens", "8"]],
)  # fmt: skip
def test_bad_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_our_engine_and_mlx_lm_run_a_tiny_model_on_any_machine(tmp_path: Path) -> None:
    status, result = run(tmp_path, "--shape", "tiny", "--arms", "quire,mlx-lm", "--mixed-arms", "quire,mlx-lm",
                         "--rates", "5", "--temperatures", "0,0.8", "--max-num-seqs", "8")  # fmt: skip
    assert (status, result["skipped"]) == (0, [])
    assert rounds(result, "quire") == rounds(result, "mlx-lm") == [2, 2, 2, 1, 1]
    counters = result["cases"][1]["arms"]["quire"]["rounds"][0]["counters"]
    assert counters, "which paths ran must be in the result"
    assert "preemptions" not in counters
    assert result["arms"]["quire"]["options"]["max_num_batched_tokens"] == 8192
    assert result["arms"]["quire"]["options"]["memory_limit_gib"] > 16
    assert result["arms"]["mlx-lm"]["options"]["memory_limit_gib"] > 16


VLLM = """
import os
from types import SimpleNamespace as Some
__version__ = "0.26.0"
class SamplingParams:
    def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize, output_kind):
        assert ignore_eos and not detokenize and output_kind == "delta"
        self.max_tokens = max_tokens
class Engine:
    def __init__(self):
        self.left, self.flight = {}, []
        self.vllm_config = Some(scheduler_config=Some(async_scheduling=True), cache_config=Some(num_gpu_blocks=7),
                                model_config=Some(dtype="torch.bfloat16"), compilation_config=Some())
    def add_request(self, request_id, prompt, params):
        assert prompt["type"] == "token" and isinstance(prompt["prompt_token_ids"], list)
        self.left[request_id] = params.max_tokens
    def has_unfinished_requests(self):
        return bool(self.left)
    def abort_request(self, request_ids):
        for request_id in request_ids:
            del self.left[request_id]
    def step(self):
        # One step late, as with asynchronous scheduling; what was aborted meanwhile is dropped.
        late, self.flight = self.flight, list(self.left)
        found = [Some(request_id=i, outputs=[Some(token_ids=[5])]) for i in late if i in self.left]
        for output in found:
            self.left[output.request_id] -= 1
        self.left = {i: n for i, n in self.left.items() if n}
        return found
class LLM:
    def __init__(self, model, *, load_format, skip_tokenizer_init, **options):
        assert os.path.exists(os.path.join(model, "config.json")) and load_format == "dummy" and skip_tokenizer_init
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        assert options["kv_cache_memory_bytes"] > 0 and options["enable_prefix_caching"] is False
        self.llm_engine = Engine()
"""


def test_vllm_is_driven_through_its_step_by_step_interface(tmp_path: Path) -> None:
    """Through a package that has of vLLM 0.26 what the worker uses, in the signatures that it has there."""
    arguments = ["--shape", "tiny", "--arms", "vllm", "--mixed-arms", "vllm"]
    status, result = run(tmp_path, *arguments)
    assert status == 1
    assert "No module named" in result["arms"]["vllm"]["failure"]

    site = tmp_path / "site"
    (site / "vllm").mkdir(parents=True)
    (site / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n__version__ = '2'\n")
    (site / "vllm/__init__.py").write_text(VLLM)
    (site / "vllm/inputs.py").write_text(
        "def tokens_input(ids):\n    return {'type': 'token', 'prompt_token_ids': ids}\n"
    )
    (site / "vllm/sampling_params.py").write_text("class RequestOutputKind:\n    DELTA = 'delta'\n")
    status, result = run(tmp_path, *arguments, "--vllm-path", str(site))
    assert status == 0, result
    assert rounds(result, "vllm") == [2, 2, 2, 1]
    assert result["versions"]["vllm"] == "0.26.0"
    assert result["arms"]["vllm"]["chosen"]["async_scheduling"] is True


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("bench_gpu", set()),
        ("worker_gpu_vllm", set()),
        ("worker_gpu_mlx_lm", {"mlx", "mlx_lm"}),
        # What the engine's own modules need.
        ("worker_gpu_quire", {"mlx", "mlx_lm", "msgspec", "numpy", "pydantic", "gguf", "tokenizers", "huggingface_hub",
                              "filelock", "platformdirs"}),
    ],
)  # fmt: skip
def test_a_gpu_machine_needs_few_packages(module: str, allowed: set[str]) -> None:
    code = (
        f"import sys, json, loadtest.{module}; print(json.dumps([m.__file__ for n, m in sys.modules.items() "
        "if n.split('.')[0] in ('loadtest', 'mlx_engine', 'plugins', 'deployments') and getattr(m, '__file__', 0)]))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    needed: set[str] = set()
    for file in json.loads(run.stdout):
        for node in ast.parse(Path(file).read_text()).body:
            if isinstance(node, ast.Import):
                needed |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                needed.add(node.module.split(".")[0])
    ours = {"loadtest", "mlx_engine", "plugins"}
    assert needed - ours - set(sys.stdlib_module_names) <= allowed
