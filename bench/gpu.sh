#!/usr/bin/env bash
# Checks and measures the project on a GPU, step by step.
#
#   bench/gpu.sh [--dry-run] [--list] [--steps NAME,...] [--seconds 570] [FOLDER]
#
# FOLDER is $OUT or bench/results/gpu by default. It gets gpu.log, gpu.jsonl (a line per step) and gpu-results.json, of a
# dry run gpu-results-dry.json.
# Builds the core beside the sources with nvcc, cmake, ninja and pybind11; needs no network and no installed package.
# A step that fails stops no other. --dry-run runs stand-ins on a machine without a GPU. Steps: bench/gpu/steps.py.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v nvcc >/dev/null || export PATH=$PATH:/usr/local/cuda/bin
ulimit -c 0 # a step that hangs is aborted
exec "$(command -v python3 || command -v python)" bench/gpu "$@"
