"""Dispatch: which implementation runs where, with its reason, answered without a GPU and without the packages it names."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from optimized import arch, dispatch, implementation, registry, tiles
from optimized.arch import ARCHS, CPU
from optimized.implementation import Workload

ROOT = Path(__file__).resolve().parents[2]
DECODE = Workload("kda.decode", "sm90", torch.bfloat16, torch.float32, 16, 4, 128, 128)

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@needs_triton
@pytest.mark.parametrize("name", list(ARCHS))
def test_every_architecture_decodes_with_the_fused_kernel(name: str) -> None:
    choice = dispatch.choose(replace(DECODE, arch=name))
    assert (choice.impl, choice.rejected) == ("triton", ())
    assert "one launch" in choice.reason
    assert choice.tile == tiles.tile(name, torch.float32, 64)


@needs_triton
def test_the_matrix_has_every_architecture_and_the_cpu() -> None:
    matrix = dispatch.matrix(DECODE)
    assert list(matrix) == [*ARCHS, CPU]
    assert all(choice.reason for choice in matrix.values())


def test_switching_the_fused_kernel_off_selects_fla_or_torch_and_says_what_was_passed_over() -> None:
    choice = dispatch.choose(DECODE, without=["triton"])
    assert choice.impl == ("torch" if importlib.util.find_spec("fla") is None else "fla")
    assert choice.rejected[0] == ("triton", "switched off") and choice.tile is None
    last = dispatch.choose(DECODE, without=["triton", "fla"])
    assert (last.impl, last.rejected) == ("torch", (("triton", "switched off"), ("fla", "switched off")))


def test_with_everything_off_it_raises_with_every_reason() -> None:
    with pytest.raises(
        ValueError, match=r"^dispatch: nothing runs kda.decode on sm90: triton: switched off; fla: switched off; torch: switched off$"
    ):
        dispatch.choose(DECODE, without=["triton", "fla", "torch"])


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"^arch: expected one of sm80, .*sm121, got 'sm99'$"):
        dispatch.choose(replace(DECODE, arch="sm99"))
    with pytest.raises(ValueError, match=r"^arch: expected one of .*, got 'hopper'$"):
        arch.arch("hopper")


def test_an_unknown_operator_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"^operator: expected one of kda.decode.*, got 'kda.encode'$"):
        dispatch.choose(replace(DECODE, op="kda.encode"))
    with pytest.raises(ValueError, match=r"^operator: expected one of kda.decode.*, got 'kda.encode'$"):
        registry.find("kda.encode", "triton")


def test_an_unknown_implementation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"^impl: expected one of triton, fla, torch.* or package.module:function, got 'cuda'$"):
        registry.find("kda.decode", "cuda")


@pytest.mark.parametrize("target", ["no_such_package:decode", "math:no_such_function"])
def test_an_implementation_of_ones_own_that_is_not_there_is_refused_by_name(target: str) -> None:
    module, _, function = target.partition(":")
    with pytest.raises(ValueError, match=rf"^impl: .*{module}.*({function}|install it)"):
        registry.find("kda.decode", target)


@pytest.mark.parametrize("programs", [1, 64, 10**6])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*ARCHS, CPU])
def test_a_tile_covers_every_architecture_and_state_dtype(name: str, state_dtype: torch.dtype, programs: int) -> None:
    tile = tiles.tile(name, state_dtype, programs)
    assert tile.rows & (tile.rows - 1) == 0 and tile.warps in (1, 2, 4, 8, 16)


def test_a_state_dtype_without_a_tile_says_what_to_add() -> None:
    with pytest.raises(ValueError, match=r"^tile: none for sm90 with a torch.float16 state; add a row to TILES$"):
        tiles.tile("sm90", torch.float16, 1)


def test_tables_name_only_what_exists_and_say_why() -> None:
    rules = {(rule.op, rule.impl) for rule in dispatch.RULES}
    assert rules == set(registry.REGISTRY)
    assert {name for row in (*dispatch.RULES, *tiles.TILES) for name in row.archs} == {*ARCHS, CPU}
    assert all(row.reason for row in (*dispatch.RULES, *tiles.TILES))
    assert [name for name, entry in ARCHS.items() if entry.name != name or name != f"sm{entry.sm}" or not entry.devices] == []


def test_a_kernel_is_not_chosen_for_dtypes_that_it_does_not_take() -> None:
    choice = dispatch.choose(replace(DECODE, dtype=torch.float64))
    assert choice.impl == "torch"
    assert dict(choice.rejected)["triton"] == "takes bf16, fp16 or fp32 activations over an fp32 or bf16 state"


ASK = """
import json, sys
{before}
import torch
from optimized import dispatch
from optimized.implementation import Workload
work = Workload("kda.decode", "sm90", torch.bfloat16, torch.float32, 16, 4, 128, 128)
answers = {{name: [choice.impl, choice.rejected] for name, choice in dispatch.matrix(work).items()}}
print(json.dumps([answers, [name for name in ("triton", "fla") if sys.modules.get(name)]]))
"""


def answer(before: str) -> list:
    child = subprocess.run([sys.executable, "-c", ASK.format(before=before)], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(child.stdout)


def test_it_answers_where_triton_and_fla_cannot_be_imported() -> None:
    answers, _ = answer("sys.modules['triton'] = sys.modules['fla'] = None")
    assert list(answers) == [*ARCHS, CPU]
    for name in ARCHS:
        impl, rejected = answers[name]
        assert impl == "torch"
        assert [[who, why.partition(":")[0]] for who, why in rejected] == [
            ["triton", "triton is not installed"],
            ["fla", "fla-core is not installed"],
        ]


@needs_triton
def test_it_answers_without_importing_what_it_names() -> None:
    answers, imported = answer("")
    assert {answers[name][0] for name in ARCHS} == {"triton"}
    assert imported == []


def test_the_identity_of_an_implementation_is_its_own_projects_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules it imports count, at any depth; what is installed does not, even in a virtual environment inside the project."""
    installed = tmp_path / ".venv" / "lib" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "library_of_others.py").write_text("def later():\n    import of_another_python\n")
    (installed / "of_another_python.py").write_text("print 'read by nobody'\n")
    (tmp_path / "helper_of_mine.py").write_text("import library_of_others\nrate = 1\n")
    (tmp_path / "kernel_of_mine.py").write_text("import helper_of_mine\ndef decode(q, k, **x): return q\n")
    monkeypatch.syspath_prepend(installed)
    monkeypatch.syspath_prepend(tmp_path)
    mine = registry.find("kda.decode", "kernel_of_mine:decode")
    before = mine.source_hash()
    (installed / "library_of_others.py").write_text("import os\n")
    assert mine.source_hash() == before
    (installed / "package_of_others").mkdir()
    (installed / "package_of_others" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "helper_of_mine.py").write_text("rate = 1\ndef later():\n    import package_of_others.inside\n")
    assert mine.source_hash() != before
    (tmp_path / "helper_of_mine.py").write_text("import library_of_others\nrate = 1\n")
    (tmp_path / "helper_of_mine.py").write_text("import library_of_others\nrate = 2\n")
    assert mine.source_hash() != before


MIXER = replace(DECODE, op="kda.mixer", hidden=4096, rows=4)


@needs_triton
@pytest.mark.parametrize("name", list(ARCHS))
def test_every_architecture_mixes_with_fused_weights_and_says_its_plan(name: str) -> None:
    few, many = (dispatch.choose(replace(MIXER, arch=name, batch=rows, rows=rows)) for rows in (4, 128))
    assert (few.impl, many.impl) == ("triton", "triton") and "weights fused" in few.reason
    assert str(few.tile).startswith("all=") and str(many.tile) == "qkv=library low=library gates=library out=library overlap"


@needs_triton
def test_the_plan_of_a_mixer_follows_its_weights() -> None:
    small, large = (dispatch.choose(replace(MIXER, heads=heads)).tile for heads in (16, 64))
    assert small != large and replace(MIXER, heads=64).projected == 4096 * (3 * 64 * 128 + 64 + 2 * 128)


def test_a_mixer_declares_the_kernels_of_its_phase() -> None:
    entry = registry.find("kda.mixer", "triton")
    assert entry.declared(MIXER) == ("linear_kernel", "kda_decode_kernel")
    assert entry.declared(replace(MIXER, batch=128, rows=128)) == ("kda_decode_kernel",)
    assert "kda_prefill_scan_kernel" in entry.declared(replace(MIXER, contexts=4, rows=70))
    assert registry.find("kda.mixer", "fla").supports(replace(MIXER, contexts=1)) == (False, "its baseline decodes only: no contexts")


def test_a_layers_weights_are_prepared_once() -> None:
    prepared: list[str] = []
    mixer = implementation.Prepared(lambda hidden, weights, **x: weights, lambda weights: prepared.append(weights) or weights.upper())
    assert [mixer(None, "a"), mixer(None, "a"), mixer(None, "b")] == ["A", "A", "B"] and prepared == ["a", "b"]
