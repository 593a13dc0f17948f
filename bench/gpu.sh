#!/usr/bin/env bash
# Measures the project on a GPU, in less than nine minutes:
#
#   bench/gpu.sh [--dry-run] [FOLDER]      (default: bench/results)
#
# Builds the core beside the sources, tests the CUDA kernels, times them, and times plain and speculative cycles of a
# model of random weights; writes JSON files and gpu.log to FOLDER. Needs nvcc, cmake, ninja, pybind11, torch and the
# package's own requirements, but no network and no installed package. Continues after a step that fails, and then
# exits with 1. --dry-run runs the same steps with a tiny model on the CPU.
set -uo pipefail
dry=
[ "${1:-}" = --dry-run ] && dry=yes && shift
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-bench/results}")
mkdir -p "$out"
log=$out/gpu.log
python=$(command -v python3 || command -v python)
command -v nvcc >/dev/null || export PATH=/usr/local/cuda/bin:$PATH
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
budget=530 # seconds
failed=()

step() { # name, seconds at most, command
  local name=$1 limit=$2 begin=$SECONDS left=$((budget - SECONDS)) status
  shift 2
  printf '\n== %s: %s\n' "$name" "$*" >>"$log"
  timeout -k 5 "$((limit < left ? limit : left > 1 ? left : 1))" "$@" >"$log.step" 2>&1
  status=$?
  cat "$log.step" >>"$log"
  if [ $status = 0 ]; then
    echo "$name: done in $((SECONDS - begin)) s"
  else
    failed+=("$name")
    echo "$name: FAILED with $status after $((SECONDS - begin)) s; its last lines:"
    tail -n 15 "$log.step"
  fi
  rm -f "$log.step"
}

bench() { # name, seconds at most, arguments
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" "$python" -m specengine.bench --json "$out/gpu-$name.json" "$@"
}

machine() {
  nvidia-smi || true
  "$python" -c 'import sys, torch; print(sys.version, torch.__version__, torch.cuda.is_available())'
}

build() {
  local architectures folder=build/gpu
  architectures=$("$python" -c 'import torch
major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
print("90a-real" if major == 9 else f"{major}{minor}-real")')
  cmake -S . -B $folder -G Ninja -DCMAKE_BUILD_TYPE=Release "-DSPECENGINE_CUDA_ARCHITECTURES=$architectures" \
    "-DPython_EXECUTABLE=$python" "-Dpybind11_DIR=$("$python" -m pybind11 --cmakedir)" \
    "-DCMAKE_LIBRARY_OUTPUT_DIRECTORY=$PWD/specengine" && cmake --build $folder --parallel &&
    "$python" -c 'import specengine; print(specengine.build_info())'
}

tests() { # only files with GPU tests; the other files may need packages that are not installed
  grep -lEr --include='test_*.py' 'cuda_backend|backend\.put|backend\.device|mark\.gpu' tests |
    xargs "$python" -m pytest -q -p no:cacheprovider "$@"
}

export python
export -f machine build tests
: >"$log"
step machine 30 bash -c machine

model=random:llama-3.1-8b device=cuda tokens=1024 new=256 rows=1,8,16,32,60
if [ $dry ]; then
  model=random:tiny-llama device=cpu tokens=128 new=48 rows=1,8
  step build 20 "$python" -c 'import specengine; print(specengine.build_info())'
  step tests 120 bash -c 'tests --collect-only'
else
  step build 150 bash -c build
  step tests 150 bash -c 'tests -m gpu'
  bench kernels 90 --kernels
fi

question=$(mktemp --suffix .jsonl)
trap 'rm -f "$question"' EXIT
echo '{"turns": ["one turn, of random tokens"]}' >"$question"
common=(--model "$model" --device "$device" --questions "$question" --prompt-tokens $tokens --max-new-tokens $new --ignore-eos)
seven=synthetic:0.81,0.80,0.79,0.78,0.77,0.76,0.75
six=${seven%,*},k=10 # 61 nodes
drafters=none,$seven,cost=eagle3,$six,cost=fasteagle,$six,cost=eagle3
bench cycles 150 "${common[@]}" --drafters "$drafters" --rows $rows --prefix $tokens
bench sampled 60 "${common[@]}" --drafters "none,$six,cost=fasteagle" --temperature 0.8 --repetitions 1
bench peers 150 "${common[@]}" --drafters none --peers transformers:compiled --repetitions 2

"$python" bench/gpu_targets.py "$out" | tee -a "$log"
echo "took $SECONDS s; ${#failed[@]} steps failed${failed[*]:+: ${failed[*]}}" | tee -a "$log"
[ ${#failed[@]} = 0 ]
