"""The sparse MLA kernels built for Hopper without a GPU, in a process of their own: no TF32, few spills, within shared memory."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
SHARED = 227 * 1024
FEW_BYTES = {True: 32, False: 512}  # of the stack, before Triton 3.9 and since; threads of the widest tile have all 255 registers
BUILD = """
import json, os, re, subprocess, tempfile, warnings
warnings.simplefilter("ignore")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from optimized import kpool, mla_attend as m, mla_store, mla_tiles

def build(kernel, warps, stages, types, **constants):
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in types:
            signature[name] = types[name]
        else:
            signature[name] = "fp32" if name == "scale_log2" else "i32"
        if signature[name][0] == "*" or name.endswith("_stride"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    built = triton.compile(ASTSource(kernel, signature, constants, attributes), target=GPUTarget("cuda", 90, 32),
                           options=dict(num_warps=warps, num_stages=stages, enable_fp_fusion=True))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(built.asm["cubin"]); f.flush()
        tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
        usage = subprocess.run([tool, "--dump-resource-usage", f.name], capture_output=True, text=True).stdout
    ptx = built.asm["ptx"]
    return {"stack": int(re.search(r"STACK:(\\d+)", usage)[1]), "registers": int(re.search(r"REG:(\\d+)", usage)[1]),
            "tf32": ptx.count("tf32"), "shared": built.metadata.shared, "wgmma": ptx.count("wgmma.mma_async"),
            "mma": ptx.count("mma.sync"), "copies": len(re.findall(r"cp.async.c", ptx))}

POINTERS = dict.fromkeys(("scales", "kv_scale", "lse", "shares", "sums", "head_weight", "ape", "score", "scale"), "*fp32")
POINTERS |= dict.fromkeys(("ids", "counts", "owner", "position", "block_table", "slots", "starts", "cu_seqlens"), "*i32")
POINTERS |= dict.fromkeys(("q", "out", "index_q", "index_k", "pool_gate", "pool_keys", "ring", "row"), "*bf16")
found = {}
for kind, form, latent in (("half", m.FLAT, "*bf16"), ("fp8", m.SCALED, "*fp8e4nv"), ("fp8", m.STATIC, "*fp8e4nv")):
    for heads, tokens in ((64, 1), (64, 8), (64, 4096), (16, 4096)):
        t = mla_tiles.mla_tile("sm90", kind, heads, tokens)
        name = f"attend {kind} {form} {t}"
        if name not in found:
            found[name] = build(
                m.mla_attend_kernel, t.warps, t.stages, dict(POINTERS, latent=latent), L=512, BL=512, BH=t.heads, BN=t.rows,
                SPLIT=t.splits > 1, STAGES=t.stages, PAGE=0, FORM=form, GROUP=128, HAS_COUNTS=True, LN2=m.LN2, PDL=t.pdl,
            )
for t in {t.splits: t for t in (mla_tiles.mla_tile("sm90", "half", 64, n) for n in (1, 8, 64))}.values():
    found[f"combine {t}"] = build(m.mla_combine_kernel, 4, 3, POINTERS, L=512, BL=t.merge,
                                  BS=triton.next_power_of_2(t.splits), LN2=m.LN2, PDL=t.pdl)
t = mla_tiles.kpool_tile("sm90")
found["scores"] = build(kpool.kpool_scores_kernel, t.warps, 1, POINTERS, HEADS=32, BH=32, D=128, BD=128, BJ=t.pools, PAGE=16,
                        SCALE=128**-0.5, PDL=t.pdl)
found["select"] = build(kpool.kpool_select_kernel, t.select_warps, 3, POINTERS, TOP=512, WIDTH=2176, BW=4096, BLOCK=t.columns, PAGE=16,
                        PDL=t.pdl)
found["cache"] = build(kpool.kpool_cache_kernel, 1, 3, POINTERS, D=128, BD=128, PAGE=16, RING=8)
for form, latent in ((m.FLAT, "*bf16"), (m.SCALED, "*u8"), (m.STATIC, "*u8")):
    found[f"store {form}"] = build(
        mla_store.mla_store_kernel, 4, 3, dict(POINTERS, latent=latent), L=512, BL=512, PAGE=64, FORM=form, GROUP=128, POW2=True,
        RESERVED=128, LEAST=1e-4, LARGEST=448.0,
    )
print(json.dumps({"triton": triton.__version__, "found": found}))
"""


def test_hopper_builds_have_no_tf32_and_few_spills() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    built_by, found = json.loads(done.stdout).values()
    few_bytes = FEW_BYTES[tuple(map(int, built_by.split(".")[:2])) < (3, 9)]
    assert len(found) == 21
    for name, built in found.items():
        assert built["stack"] <= few_bytes and built["tf32"] == 0 and built["shared"] <= SHARED, (name, built)
        if name == "scores":
            assert built["mma"] + built["wgmma"] > 0, (name, built)
        if name.startswith("attend"):
            assert built["wgmma" if " 64h" in name else "mma"] > 0, (name, built)
            assert "half" not in name or built["copies"] >= 16, (name, built)
