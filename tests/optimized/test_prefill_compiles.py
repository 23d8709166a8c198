"""The prefill kernels built for Hopper without a GPU, in a process of their own: no TF32, no spills, the scan's loads in flight."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

FEW_BYTES = 32  # Triton 3.9 keeps four values of the safe form on the stack, 3.6 none
ROOT = Path(__file__).resolve().parents[2]
BUILD = """
import json, os, re, subprocess, sys, tempfile, warnings
warnings.simplefilter("ignore")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from optimized import kda_prefill as m, prefill_tiles
import torch

CONSTANT = dict(K=128, V=128, BK=128, ALL_V=128, C=16, LEVELS=4, HAS_FRESH=True, SCALE=128**-0.5, EPS=1e-6, RATE_MAX=88.0,
                LEAST_G=-174.0, SPLIT=True, PACKED=True, channel_stride=1)
FP32, INT32 = ("a_log", "dt_bias", "state", "decay_out", "decay_in"), ("cu_seqlens", "slots")
SCALARS = ("num_slots", "sequences", "heads")

def build(kernel, warps, stages, **constants):
    constants = {**CONSTANT, **constants}
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("lower_bound", "norm_eps"):
            signature[name] = "fp32"
        elif name in SCALARS or name.endswith("_stride"):
            signature[name] = "i32"
        else:
            signature[name] = "*fp32" if name in FP32 else "*i32" if name in INT32 else "*i1" if name == "fresh" else "*bf16"
        if signature[name] != "constexpr" and name not in ("num_slots", "sequences", "lower_bound", "norm_eps"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    used = {name: value for name, value in constants.items() if name in kernel.arg_names}
    built = triton.compile(ASTSource(kernel, signature, used, attributes), target=GPUTarget("cuda", 90, 32),
                           options=dict(num_warps=warps, num_stages=stages, enable_fp_fusion=True))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(built.asm["cubin"]); f.flush()
        tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
        usage = subprocess.run([tool, "--dump-resource-usage", f.name], capture_output=True, text=True).stdout
    ptx = built.asm["ptx"]
    return {"stack": int(re.search(r"STACK:(\\d+)", usage)[1]), "tf32": ptx.count("tf32"),
            "products": len(re.findall(r"mma\\.sync|wgmma\\.mma_async", ptx)), "copies": ptx.count("cp.async.c")}

found = {}
for bounded in (True, False):
    form = dict(BOUNDED=bounded, ANCHORED=bounded)
    warps = 2 if bounded else 4
    found[f"prepare {'anchored' if bounded else 'safe'}"] = build(m.kda_prefill_prepare_kernel, warps, 3, BV=128, PARTS=warps, **form)
for scans in (16, 32, 64):
    t = prefill_tiles.prefill_tile("sm90", torch.bfloat16, scans)
    found[f"scan {t}"] = build(m.kda_prefill_scan_kernel, t.warps, t.stages, BV=t.rows, PARTS=t.parts, STAGES=t.stages)
found["norm"] = build(m.kda_prefill_norm_kernel, 4, 3, BV=128)
print(json.dumps(found))
"""


def test_hopper_builds_have_no_tf32_and_no_spills() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 6
    for name, built in found.items():
        assert built["stack"] <= FEW_BYTES and built["tf32"] == 0, (name, built)
        assert name == "norm" or built["products"] > 0, (name, built)
        assert not name.startswith("scan") or built["copies"] >= 24, (name, built)
