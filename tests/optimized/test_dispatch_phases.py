"""Each phase of KDA has its own rows of the dispatch table: what runs on every SM version, and what when that is switched off."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from optimized import dispatch, registry, tiles
from optimized.arch import CPU
from optimized.implementation import Workload
from optimized.prefill_tiles import prefill_tile
from optimized.tiles import Tile

SMS = (80, 89, 90, 100, 103, 107, 120)
PHASES = ("kda.prefill", "kda.verify", "kda.commit", "kda.verify_offsets")
WORK = Workload("kda.prefill", "sm90", torch.bfloat16, torch.float32, 16, 4, 128, 128, -5.0)

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def installed(*packages: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in packages)


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that has every peer: dispatch asks for packages, and imports none."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: name)


@pytest.mark.parametrize("sm", SMS)
@pytest.mark.parametrize("op", PHASES)
def test_every_phase_runs_our_kernel_on_every_sm_version(op: str, sm: int) -> None:
    choice = dispatch.choose(replace(WORK, op=op, arch=f"sm{sm}"))
    assert (choice.impl, choice.rejected) == ("triton", ()) and "launch" in choice.reason
    expected = {
        "kda.prefill": prefill_tile(f"sm{sm}", torch.bfloat16, 64),
        "kda.verify_offsets": None,
    }.get(op, tiles.tile(f"sm{sm}", torch.float32, 64, tiles.VERIFY))
    assert choice.tile == expected


@pytest.mark.parametrize("sm", SMS)
@pytest.mark.parametrize("op", ["kda.verify", "kda.commit"])
def test_launches_overlap_where_the_sm_version_can(op: str, sm: int) -> None:
    tile = dispatch.choose(replace(WORK, op=op, arch=f"sm{sm}")).tile
    assert isinstance(tile, Tile) and tile.pdl == (sm >= 90)


@pytest.mark.parametrize("sm", SMS)
@pytest.mark.parametrize("op", PHASES[1:])
def test_switched_off_verify_commit_and_offsets_fall_to_torch(op: str, sm: int) -> None:
    choice = dispatch.choose(replace(WORK, op=op, arch=f"sm{sm}"), without=["triton"])
    assert (choice.impl, choice.tile, choice.rejected) == ("torch", None, (("triton", "switched off"),))


@pytest.mark.parametrize("sm", SMS)
def test_a_switched_off_prefill_falls_to_the_peers_that_run_there(sm: int, peers: None) -> None:
    work = replace(WORK, arch=f"sm{sm}")
    off = ["triton"]
    for expected in (*(["flash_kda"] if sm >= 90 else []), "fla", "torch"):
        choice = dispatch.choose(work, off)
        assert choice.impl == expected and choice.rejected[: len(choice.rejected)] == tuple((name, "switched off") for name in off)
        off.append(expected)
    with pytest.raises(ValueError, match=rf"^dispatch: nothing runs kda.prefill on sm{sm}: triton: switched off; "):
        dispatch.choose(work, off)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"dtype": torch.float16}, "takes bfloat16, not float16"),
        ({"value_dim": 64}, "takes K = V = 128, not 128 and 64"),
        ({"lower_bound": None}, "not softplus"),
    ],
)
def test_flash_kda_is_passed_over_with_its_reason(changed: dict[str, object], reason: str, peers: None) -> None:
    choice = dispatch.choose(replace(WORK, **changed), without=["triton"])  # type: ignore[arg-type]
    assert choice.impl == "fla" and choice.rejected[1][0] == "flash_kda" and reason in choice.rejected[1][1]


def test_a_peer_that_is_not_installed_is_passed_over_with_what_to_install() -> None:
    if installed("flash_kda"):
        pytest.skip("flash_kda is installed")
    choice = dispatch.choose(WORK, without=["triton"])
    assert choice.impl == ("fla" if installed("fla") else "torch")
    assert dict(choice.rejected)["flash_kda"].endswith("pip install tokenspeed-flashkda fla-core")


def test_phases_have_predicates_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switching one phase off, or what one can't run, leaves the others."""
    refused = replace(registry.REGISTRY["kda.verify", "triton"], supports=lambda work: (False, "not today"))
    monkeypatch.setitem(registry.REGISTRY, ("kda.verify", "triton"), refused)
    chosen = {op: dispatch.choose(replace(WORK, op=op)) for op in ("kda.decode", *PHASES)}
    assert {op: choice.impl for op, choice in chosen.items()} == {op: "torch" if op == "kda.verify" else "triton" for op in chosen}
    assert chosen["kda.verify"].rejected == (("triton", "not today"),)


def test_without_a_device_every_phase_has_an_answer() -> None:
    assert {dispatch.choose(replace(WORK, op=op, arch=CPU)).impl for op in PHASES} == {"torch"}
