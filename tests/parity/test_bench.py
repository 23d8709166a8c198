"""Speed: what is counted, what is timed, and what is said where nothing can be timed."""

import pytest

import workbench
from parity import bench
from parity.problem import Problem
from parity.render import readme


def test_bytes_are_each_input_once_and_each_output_once() -> None:
    problem = Problem("kda.decode", heads=64, batch=256)
    state = 2 * 256 * 64 * 128 * 128 * 4
    window = 2 * 256 * 3 * 24576 * 2
    activations = 256 * (24576 + 8192 + 64 + 2 * 8192) * 2
    weights = 24576 * 4 * 2 + (64 + 8192) * 4 + 128 * 2
    assert bench.bytes_moved(problem) == state + window + activations + weights
    assert bench.bytes_moved(problem) - bench.bytes_moved(Problem("kda.decode", heads=64, batch=256, state_dtype="bf16")) == state // 2


def test_without_a_gpu_the_command_says_what_it_would_measure_and_exits_3(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        workbench.main(["bench", "kda.decode", "--heads", "16", "--batch", "1,64", "--device", "cpu"])
    out = capsys.readouterr().out.splitlines()
    assert stopped.value.code == 3 and "nothing was timed" in out[0]
    assert sum(line.startswith("kda.decode:") and "heads=16" in line for line in out) == 4


def timed(impl: str, us: float, ceiling: float = 100.0, op: str = "kda.decode", flops: int = 0) -> dict[str, object]:
    return {"op": op, "impl": impl, "heads": 64, "batch": 64, "dtype": "bf16", "state_dtype": "fp32", "us": us, "bytes": 400_000_000,
            "flops": flops, "ceiling_us": ceiling, "ratio": us / ceiling, "impl_hash": None}  # fmt: skip


def test_the_speed_table_sets_ours_beside_peers_and_floor() -> None:
    rows = [
        timed("triton", 107.0),
        timed("fla kernels", 160.5),
        timed("copy", 143.0),
        timed("matmul 8192", 1400.0, op="device", flops=2 * 8192**3),
    ]
    record = {"environment": {"device": "NVIDIA H200", "arch": "sm90", "torch": "2.11"}, "rows": [], "bench": rows}
    head, _, line, _, note = readme.speed(record).splitlines()
    cells = dict(zip(head.strip("| ").split(" | "), line.strip("| ").split(" | "), strict=True))
    assert cells["ours, us"] == "107" and cells["FLA kernels, us"] == "160"
    assert cells["ours / floor"] == "1.07" and cells["FLA kernels / ours"] == "1.50"
    assert "NVIDIA H200" in note and "matmul 8192 785 TFLOP/s" in note


@pytest.mark.gpu
def test_ours_peers_and_ceilings_are_timed_in_one_run() -> None:
    rows = bench.measure(Problem("kda.decode", heads=4, batch=2, device="cuda"))
    by_name = {row["impl"]: row for row in rows}
    assert {"read_modify_write", "copy", "triton", "fla", "torch"} <= set(by_name)
    ours = by_name["triton"]
    assert ours["launches"] == 1 and 0 < ours["us_min"] <= ours["us"] <= ours["us_max"]
    assert ours["runs"] == bench.PASSES * bench.REPLAYS
