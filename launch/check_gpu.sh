#!/usr/bin/env bash
# Everything that can be checked on this machine's GPU, in one command; see --help.
set -uo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
build=$root/build-gpu out=$root/gpu-report backend='' quick=false program=''
failed=0
summary=()

usage() {
  cat <<'TXT'
usage: launch/check_gpu.sh [--out DIR] [--quick]
       launch/check_gpu.sh --backend FILE --program FILE --tests DIR [--out DIR] [--quick]

Builds cpattn with its CUDA backend for the GPU of this machine (in build-gpu/ beside this folder),
then runs, in this order: the conformance report of the instructions that kernels are made of
against its golden file, the tests labelled `cuda`, parity of several CP sizes and of GPU and CPU,
the same small parity under compute-sanitizer, the benchmark, and the benchmark against PyTorch
where CPATTN_PYTHON (default: python3) has a torch for CUDA and cpattn.

  --out DIR      where logs, reports and bench.json go (default: gpu-report/ beside this folder)
  --quick        sizes that take no time, no conformance, no sanitizers
  --backend FILE checks this shared object instead of building one, with --program, a cpattn, and
                 --tests, the folder of its tests

Needs nvcc, NCCL's headers and library, and an NVIDIA driver; compute-sanitizer where it is there.
Not run on a GPU yet: a test runs --quick on doubles of CUDA.

Ends with a table: passed, FAILED or not run, what, seconds, log.

exit status: 0 all that ran passed; 1 something failed; 2 bad usage; 3 no GPU, or a tool is missing.
TXT
}

die() {
  local status=$1
  shift
  printf 'check_gpu: %s\n' "$@" >&2
  exit "$status"
}

say() { printf '==> %s\n' "$*"; }

# step NAME COMMAND...: runs it into a log of its own and notes how it ended.
step() {
  local name=$1 log start seconds status verdict=passed
  shift
  log=$out/$name.log
  say "$name: $*"
  start=$SECONDS
  printf '%s\n' "$*" >"$log"
  "$@" >>"$log" 2>&1 </dev/null
  status=$?
  seconds=$((SECONDS - start))
  if ((status != 0)); then
    verdict=FAILED
    failed=1
    tail -n 20 -- "$log"
  fi
  summary+=("$(printf '%-8s %-18s %5d s  %s' "$verdict" "$name" "$seconds" "$log")")
  return "$status"
}

not_run() { summary+=("$(printf '%-8s %-18s %7s  %s' 'not run' "$1" - "$2")"); }

# The architecture to compile for: wgmma and TMA are in code for sm_90a alone.
architecture() {
  local capability
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1) || return 1
  [[ $capability == 9.0 ]] && echo 90a-real || echo "${capability/./}-real"
}

build_all() {
  local arch
  command -v nvcc >/dev/null || die 3 "no nvcc: install the CUDA toolkit and put it on the PATH"
  command -v nvidia-smi >/dev/null || die 3 "no nvidia-smi: this machine has no NVIDIA driver"
  arch=$(architecture) || die 3 "nvidia-smi names no GPU"
  nvidia-smi --query-gpu=name,driver_version,compute_cap --format=csv,noheader | tee "$out/gpu.txt"
  step configure cmake -S "$root" -B "$build" -DCMAKE_BUILD_TYPE=Release -DCP_WITH_CUDA=ON \
    "-DCP_CUDA_ARCHITECTURES=$arch" || return
  step build cmake --build "$build" --parallel "$(nproc)" \
    --target cpattn cpattn_cuda gpu_device_test || return
  program=$build/bin/cpattn backend=$build/lib/libcpattn_cuda.so tests=$build/tests
  [[ $arch == 90a-real ]] && ! $quick || return 0
  step build_conformance cmake --build "$build" --target cuda_conformance
}

check_conformance() {
  if [[ ! -x $build/tests/cuda_conformance ]] || $quick; then
    not_run conformance "needs a build for sm_90a, and no --quick"
    return
  fi
  step conformance bash -c 'diff <("$1") "$2"' _ "$build/tests/cuda_conformance" \
    "$root/tests/goldens/cuda_conformance.txt"
}

parity() {
  local name=$1
  shift
  step "parity_$name" "$program" parity --cuda-backend "$backend" \
    --report "$out/parity_$name.json" "$@"
}

check_parity() {
  local size=(--seq-len 4096 --heads 8 --kv-heads 2 --head-dim 128 --chunk-tokens 512)
  ! $quick || size=(--seq-len 150 --heads 2 --kv-heads 1 --head-dim 16 --chunk-tokens 64)
  parity bits --device cuda --cp 1,2,4 --mask causal,full --sharding contiguous,zigzag \
    --dtype bf16,f16,f32 "${size[@]}"
  parity against_cpu --device cpu-vs-cuda --cp 1,2 --dtype bf16,f32 "${size[@]}"
  local odd=(--cu-seqlens 0,1000,1000,1001,2777 --heads 6 --kv-heads 3 --head-dim 80
    --value-dim 48 --chunk-tokens 100)
  ! $quick || odd=(--cu-seqlens 0,70,70,71,150 --heads 2 --kv-heads 1 --head-dim 24 --value-dim 8
    --chunk-tokens 50)
  parity odd --device cuda --cp 1,3 --dtype bf16,f32 --dlse true "${odd[@]}"
}

check_memory() {
  if $quick || ! command -v compute-sanitizer >/dev/null; then
    not_run sanitizers "needs compute-sanitizer on the PATH, and no --quick"
    return
  fi
  local tool
  for tool in memcheck racecheck synccheck initcheck; do
    step "$tool" compute-sanitizer --tool "$tool" --error-exitcode 1 \
      mpirun --allow-run-as-root -n 1 "$program" parity --device cuda \
      --cuda-backend "$backend" --cp 1 --dtype bf16,f32 --seq-len 300 --heads 2 --kv-heads 1 \
      --head-dim 64 --chunk-tokens 128
  done
}

check_speed() {
  local size=()
  ! $quick || size=(--seq-lens 96 --heads 2 --kv-heads 1 --head-dims 32 --masks causal
    --repetitions 1)
  step bench "$program" bench --suite gpu --cuda-backend "$backend" --json "$out/bench.json" \
    "${size[@]}" && tail -n +2 -- "$out/bench.log"
}

check_torch() {
  local python=${CPATTN_PYTHON:-python3}
  if $quick || ! "$python" -c 'import torch, cpattn; assert torch.cuda.is_available()' \
    2>/dev/null; then
    not_run torch "needs a $python with torch for CUDA and cpattn, and no --quick"
    return
  fi
  step torch "$python" tests/perf/bench_torch.py --device cuda --heads 16 --dtypes bf16 \
    --tokens 1024,8192,16384 --json "$out/bench_torch.json" && tail -n +2 -- "$out/torch.log"
}

main() {
  local tests=''
  while (($# > 0)); do
    case $1 in
      --out=* | --backend=* | --program=* | --tests=*)
        local name=${1%%=*}
        printf -v "${name#--}" '%s' "${1#*=}"
        shift
        ;;
      --out | --backend | --program | --tests)
        (($# > 1)) || die 2 "$1: expected a path after it"
        printf -v "${1#--}" '%s' "$2"
        shift 2
        ;;
      --quick)
        quick=true
        shift
        ;;
      -h | --help)
        usage
        return 0
        ;;
      *)
        usage >&2
        die 2 "unknown option: $1"
        ;;
    esac
  done
  mkdir -p -- "$out" || die 3 "$out: cannot be made"
  out=$(cd -- "$out" && pwd -P)
  if [[ -z $backend ]]; then
    [[ -z $program$tests ]] || die 2 "--program and --tests go with --backend"
    build_all || true
  else
    [[ -n $program && -n $tests ]] || die 2 "--backend goes with --program and --tests"
    build=$(dirname -- "$tests")
  fi
  if ((failed == 0)); then
    cd -- "$root" || die 3 "$root: cannot be entered"
    step doctor "$program" doctor || true
    check_conformance
    local filter='*'
    ! $quick || filter='-*BitsDoNot*:*Steps*'
    step tests env CPATTN_TEST_CUDA_BACKEND="$backend" "$tests/gpu_device_test" \
      "--gtest_filter=$filter"
    check_parity
    check_memory
    check_speed
    check_torch
  fi
  printf '%s\n' '' "${summary[@]}" | tee "$out/summary.txt"
  return "$failed"
}

main "$@"
