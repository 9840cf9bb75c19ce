#!/usr/bin/env bash
# Plain decoding, DFlash and DDTree on one data set; records, summary and chart go to runs/TAG/ (RUNS sets another folder).
#
#   scripts/bench-ddtree.sh TARGET DRAFTER DATASET SAMPLES MAX_NEW BUDGETS TEMPERATURE TAG [further options of deltatree bench]
#
# The same line again goes on with an interrupted run. NPROC=4 decodes on four GPUs, each its share of the prompts.
set -euo pipefail

if [ "$#" -lt 8 ]; then
    echo "usage: $0 TARGET DRAFTER DATASET SAMPLES MAX_NEW BUDGETS TEMPERATURE TAG [OPTIONS]" >&2
    echo "e.g.   $0 Qwen/Qwen3.6-35B-A3B z-lab/Qwen3.6-35B-A3B-DFlash mt-bench 20 512 64,256 0.0 q35b" >&2
    exit 2
fi

target=$1 drafter=$2 dataset=$3 samples=$4 max_new=$5 budgets=$6 temperature=$7 tag=$8
shift 8

run=(deltatree)
command -v deltatree > /dev/null || run=(python3 -m deltatree)
if [ "${NPROC:-1}" -gt 1 ]; then
    run=(torchrun --standalone --nproc-per-node "$NPROC" -m deltatree)
fi

exec "${run[@]}" bench \
    --target "$target" --drafter "$drafter" --dataset "$dataset" --samples "$samples" \
    --max-new-tokens "$max_new" --budgets "$budgets" --temperature "$temperature" \
    --methods ar,dflash,ddtree --stage-samples 4 --out "${RUNS:-runs}/$tag" "$@"
