#!/usr/bin/env bash
# Makes the records of results/h200/ anew, on an H200 that does nothing else:  results/measure.sh FOLDER [PART...]
# Every record is a file of FOLDER; the parts are the functions below. The peers (fla-core, flash-kda, flash-mla) are those installed.
set -uo pipefail
out=${1:?usage: results/measure.sh FOLDER [PART...]}
shift
mkdir -p "$out"
workbench() { python3 workbench.py "$@"; }

decode_bench() { workbench bench kda.decode --out "$out/kda_decode_bench.json"; }
decode_tiles() { workbench bench kda.decode --heads 64 --tiles --out "$out/kda_decode_tiles.json"; }
prefill_bench() { workbench bench kda.prefill --out "$out/kda_prefill_bench.json"; }
verify_bench() { workbench bench kda.verify --out "$out/kda_verify_bench.json"; }
mixer_bench() { workbench bench kda.mixer --out "$out/kda_mixer_bench.json"; }

decode_sweep() {
  workbench sweep kda.decode --heads 64,16 --batch 1,16,64,256 --dtype bf16,fp16 --state-dtype fp32,bf16 --steps 64 \
    --impl triton,fla,torch --out "$out/kda_decode_sweep.json"
}
decode_heads() {
  workbench sweep kda.decode --heads 1,2,3,4,6,8,12,16,24,32,48,64,96 --batch 3 --steps 8 --impl triton --out "$out/kda_decode_heads.json"
}
decode_512() { workbench sweep kda.decode --heads 64 --batch 16 --steps 512 --impl triton --out "$out/kda_decode_512.json"; }
source_preset() { workbench sweep --preset source --impl triton,fla,torch --out "$out/kda_source.json"; }

failed=0
for part in ${*:-decode_bench decode_tiles prefill_bench verify_bench mixer_bench decode_sweep decode_heads decode_512 source_preset}; do
  "$part" || failed=$?
done
exit "$failed"
