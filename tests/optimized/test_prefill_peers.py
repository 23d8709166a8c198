"""Peers of `kda.prefill`: their form on the CPU, their numbers on a GPU."""

import importlib.util
import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from optimized.peers import flash_kda
from parity.buffers import same_bits
from reference import kda

if importlib.util.find_spec("fla") is None or importlib.util.find_spec("triton") is None:
    pytest.skip("needs fla-core and triton", allow_module_level=True)

from optimized.peers import fla_prefill
from tests.optimized.prompts import POOLS, copied, prompt, relative

PEERS = pytest.mark.parametrize("peer", [fla_prefill.prefill, flash_kda.prefill], ids=["fla", "flash_kda"])
HAS_FLASH = importlib.util.find_spec("flash_kda") is not None


@PEERS
def test_the_signature_is_the_references_without_its_points(peer: Callable[..., Tensor]) -> None:
    expected = inspect.signature(inspect.unwrap(kda.prefill)).parameters
    assert inspect.signature(peer).parameters == {name: p for name, p in expected.items() if name != "at"}


def test_fla_refuses_cpu_tensors_before_any_pool_changes() -> None:
    given = prompt([3, 2])
    before = copied(given)
    with pytest.raises(ValueError, match="q: expected a CUDA tensor, got one on cpu"):
        fla_prefill.prefill(**given)
    assert all(same_bits(given[name], before[name]) for name in POOLS)


@pytest.mark.skipif(HAS_FLASH, reason="flash_kda is installed")
def test_flash_kda_says_what_to_install_before_any_pool_changes() -> None:
    given = prompt([3, 2], key_dim=128, value_dim=128)
    before = copied(given)
    with pytest.raises(ImportError, match="flash_kda: pip install tokenspeed-flashkda"):
        flash_kda.prefill(**given)
    assert all(same_bits(given[name], before[name]) for name in POOLS)
    runs, reason = flash_kda.supports(torch.bfloat16, 128, 128, -5.0)
    assert not runs and reason == "flash_kda not installed: pip install tokenspeed-flashkda fla-core"


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ((torch.float16, 128, 128, -5.0), "takes bfloat16, not float16"),
        ((torch.bfloat16, 128, 64, -5.0), "takes K = V = 128, not 128 and 64"),
        ((torch.bfloat16, 128, 128, None), "bounded in [-5.0, 0), not softplus"),
        ((torch.bfloat16, 128, 128, -6.0), "bounded in [-5.0, 0), not -6.0"),
    ],
)
def test_flash_kda_refuses_what_its_kernels_cannot_do(
    monkeypatch: pytest.MonkeyPatch, problem: tuple[torch.dtype, int, int, float | None], reason: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    runs, why = flash_kda.supports(*problem)
    assert not runs and reason in why


def on_gpu(lengths: list[int], **changed: object) -> dict:
    given = prompt(lengths, heads=4, key_dim=128, value_dim=128, **changed)  # type: ignore[arg-type]
    return {name: x.cuda() if isinstance(x, Tensor) else x for name, x in given.items()}


@pytest.mark.gpu
@PEERS
def test_a_peer_is_near_the_recurrence(peer: Callable[..., Tensor]) -> None:
    if peer is flash_kda.prefill and not HAS_FLASH:
        pytest.skip("needs flash_kda")
    given = on_gpu([130, 0, 1, 64], pool=6, fresh=torch.tensor([False, True, False, True]).cuda())
    exact = copied(given, torch.float64)
    expected, out = kda.prefill(**exact), peer(**given)
    live = given["slots"].long()
    assert relative(out, expected) < 2e-2 and relative(given["state"][live], exact["state"][live]) < 2e-2
    assert torch.equal(given["window"][live].double(), exact["window"][live])
    assert same_bits(given["state"][0], on_gpu([130, 0, 1, 64], pool=6)["state"][0])


@pytest.mark.gpu
def test_padding_of_a_peer_changes_nothing() -> None:
    given = on_gpu([17, 3])
    given["slots"][1] = -1
    before = copied(given)
    out = fla_prefill.prefill(**given)
    assert bool((out[17:] == 0).all())
    assert [slot for slot in range(4) if not same_bits(given["state"][slot], before["state"][slot])] == [3]
