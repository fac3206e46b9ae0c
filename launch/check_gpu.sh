#!/usr/bin/env bash
# Everything that can be checked on this machine's GPU, in one command; see --help.
set -uo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
build=$root/build-gpu out=$root/gpu-report quick=false
backend='' program='' tests='' prepared='' prepare='' arch='' seconds=''
python=${CPATTN_PYTHON:-python3}
failed=0

# What a build needs of Debian besides the CUDA toolkit; NCCL comes with a wheel of torch, too.
packages='g++ cmake ninja-build openmpi-bin libopenmpi-dev libboost-program-options-dev
  libyaml-cpp-dev nlohmann-json3-dev libfmt-dev libgtest-dev'

usage() {
  cat <<'TXT'
usage: launch/check_gpu.sh [--out DIR] [--seconds N] [--quick]
       launch/check_gpu.sh --prepare DIR [--arch A]
       launch/check_gpu.sh --prepared DIR [--out DIR] [--seconds N] [--quick]
       launch/check_gpu.sh --backend FILE --program FILE --tests DIR [--out DIR] [...]

Builds cpattn with its CUDA backend for the GPU of this machine (in build-gpu/ beside this folder),
then runs, in this order: the conformance report of the instructions that kernels are made of
against its golden file, the tests on GPUs, one by one, parity of several CP sizes and of GPU and
CPU, the benchmark, a small test under compute-sanitizer, and the benchmark against PyTorch where
CPATTN_PYTHON (default: python3) has a torch for CUDA, numpy and pybind11.

  --out DIR      where logs, reports and bench.json go (default: gpu-report/ beside this folder)
  --seconds N    all of it ends within N seconds: what there is no time for is not run. Without it
                 each step has a limit of its own, since a kernel that hangs hangs for ever
  --quick        sizes that take no time, no conformance, no sanitizers
  --arch A       what to compile for, as CMake names it (default: the first GPU's; 90a-real is an
                 H100 or H200)
  --prepare DIR  builds, for a machine that lacks what a build needs and has no network: DIR then
                 has program, backend, tests and their libraries, and travels with this folder
  --prepared DIR checks what --prepare made
  --backend FILE checks this shared object, with --program, a cpattn, and --tests, the folder of its
                 tests

Needs, to build: nvcc 13, NCCL's header and library (those of torch's wheel will do), g++, CMake
3.25; GoogleTest for the tests; Boost, yaml-cpp, nlohmann_json and fmt for parity and benchmark;
Open MPI for parity of several ranks. To run: an NVIDIA driver and NCCL. What is missing is said,
and the rest is run. Not run on a GPU yet: a test runs --quick on doubles of CUDA.

Ends with a table, which is in DIR/summary.txt from the first step on: passed, FAILED or not run,
what, seconds, log.

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

note() { printf '%s\n' "$*" >>"$out/summary.txt"; }

not_run() { note "$(printf '%-8s %-18s %7s  %s' 'not run' "$1" - "$2")"; }

# Seconds that a step may take which wants at most $1.
limit_of() {
  local left=$1
  [[ -z $seconds ]] || left=$((seconds - SECONDS))
  echo $((left < $1 ? left : $1))
}

# limited LIMIT COMMAND...: 124 or 137 where it took longer.
limited() {
  local limit=$1
  shift
  timeout --kill-after=10 "$limit" "$@"
}

# step LIMIT NAME COMMAND...: runs it into a log of its own and notes how it ended. A LIMIT of 0: it
# keeps to limits itself. A test that says 77 was not run.
step() {
  local limit=$1 name=$2 log start took status=0 verdict=passed
  shift 2
  log=$out/$name.log
  say "$name: $*"
  start=$SECONDS
  printf '%s\n' "$*" >"$log"
  if ((limit == 0)); then
    "$@" >>"$log" 2>&1 </dev/null
    status=$?
  else
    limit=$(limit_of "$limit")
    if ((limit < 5)); then
      not_run "$name" "of the $seconds seconds none are left"
      return 1
    fi
    limited "$limit" "$@" >>"$log" 2>&1 </dev/null
    status=$?
  fi
  took=$((SECONDS - start))
  if ((status == 77)); then
    failed=1
    not_run "$name" "$(sed -n 's/^not run: //p' "$log" | head -n 1)"
    return 1
  elif ((status != 0)); then
    verdict=FAILED
    failed=1
    ((status != 124 && status != 137)) || printf 'stopped after %s s\n' "$limit" >>"$log"
    tail -n 20 -- "$log"
  fi
  note "$(printf '%-8s %-18s %5d s  %s' "$verdict" "$name" "$took" "$log")"
  return "$status"
}

# Toolkits are seldom on the PATH, and wheels bring an NCCL that nobody finds.
find_tools() {
  local cuda=${CUDA_HOME:-/usr/local/cuda} folder
  for folder in "$cuda/bin" "$cuda/compute-sanitizer"; do
    [[ ! -d $folder ]] || PATH=$PATH:$folder
  done
  nccl_wheel=$("$python" -c 'from importlib.util import find_spec
print(find_spec("nvidia.nccl").submodule_search_locations[0])' 2>/dev/null) || nccl_wheel=''
  if [[ -n $nccl_wheel ]] && ! ldconfig -p 2>/dev/null | grep 'libnccl[.]so[.]2 ' >/dev/null; then
    export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$nccl_wheel/lib
  fi
  export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
}

# The architecture to compile for: wgmma and TMA are in code for sm_90a alone.
architecture() {
  local capability
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader) || return 1
  capability=${capability%%$'\n'*}
  [[ $capability == 9.0 ]] && echo 90a-real || echo "${capability/./}-real"
}

describe_gpu() {
  command -v nvidia-smi >/dev/null || return 0
  nvidia-smi --query-gpu=name,driver_version,compute_cap,memory.total,clocks.max.sm \
    --format=csv,noheader | tee "$out/gpu.txt"
  [[ -z $(nvidia-smi --query-compute-apps=pid --format=csv,noheader 2>/dev/null) ]] ||
    note 'note     other processes use the GPU: times mean little'
  (($(nvidia-smi -L | wc -l) > 1)) ||
    not_run nccl_ranks "NCCL between ranks needs two GPUs: ranks share one, by way of the host"
}

has_header() { printf '#include <%s>\n' "$1" | "${CXX:-g++}" -E -x c++ - >/dev/null 2>&1; }

# Whether the build knows it: as "name: phony" to ninja, as "... name" to make.
has_target() {
  cmake --build "$build" --target help 2>/dev/null | grep -E "^([.]{3} )?$1(:|\$| )" >/dev/null
}

build_all() {
  local options=(-DCMAKE_BUILD_TYPE=Release -DCP_WITH_CUDA=ON "-DCP_CUDA_ARCHITECTURES=$arch"
    -DCP_CUDA_HOST_SANITIZERS=OFF) targets=(cpattn_cuda) target
  local has_torch=false
  command -v nvcc >/dev/null || die 3 "no nvcc: install the CUDA toolkit and put it on the PATH"
  command -v cmake >/dev/null || die 3 "no cmake; a build needs, of Debian:" "  $packages"
  [[ -f $build/CMakeCache.txt ]] || ! command -v ninja >/dev/null || options+=(-G Ninja)
  # Programs that find their libraries beside them, and do without MPI, which is each machine's own.
  [[ -z $prepare ]] || options+=(-DCP_WITH_MPI=OFF '-DCMAKE_BUILD_RPATH=$ORIGIN/../lib'
    -DCMAKE_EXE_LINKER_FLAGS=-Wl,--disable-new-dtags)
  has_header gtest/gtest.h || options+=(-DCP_BUILD_TESTS=OFF)
  if [[ -n $nccl_wheel && ! -e ${CUDA_HOME:-/usr/local/cuda}/include/nccl.h ]] &&
    ! has_header nccl.h; then
    options+=("-DCP_NCCL_INCLUDE_DIR=$nccl_wheel/include"
      "-DCP_NCCL_LIBRARY=$nccl_wheel/lib/libnccl.so.2")
  fi
  if "$python" -c 'import numpy, torch; assert torch.version.cuda' 2>/dev/null; then
    has_torch=true
    options+=("-DPython3_EXECUTABLE=$(command -v "$python")"
      "-Dpybind11_DIR=$("$python" -m pybind11 --cmakedir 2>/dev/null)")
  fi
  if ! step 120 configure cmake -S "$root" -B "$build" "${options[@]}"; then
    note "         a build needs, of Debian: ${packages//$'\n'/}; or see --prepare"
    return 1
  fi
  for target in cpattn gpu_device_test; do
    has_target "$target" && targets+=("$target")
  done
  step 900 build cmake --build "$build" --parallel "$(nproc)" --target "${targets[@]}" || return
  ! $has_torch || ! has_target cpattn_python ||
    step 300 build_python cmake --build "$build" --parallel "$(nproc)" --target cpattn_python
  backend=$build/lib/libcpattn_cuda.so program=$build/bin/cpattn tests=$build/tests
}

# Of nothing but device source, so that nvcc alone is enough.
build_conformance() {
  local folder=$root/tests/kernels/cuda
  mkdir -p -- "$build/tests" && step 300 build_conformance nvcc -std=c++20 -fmad=false \
    -Xcompiler=-ffp-contract=off -gencode=arch=compute_90a,code=sm_90a "-I$root" -x cu \
    -o "$build/tests/cuda_conformance" "$folder/conformance.cu" "$folder/conformance_sm90.cu" \
    "$root/kernels/cuda/tensor_map.cu" "$folder/conformance_main.cu"
}

# What was built, and the libraries that it needs but for those of any machine with a compiler, of
# the driver and of NCCL, which is large and comes with torch.
gather() {
  local file library skipped='^(lib(c|m|dl|pthread|rt|stdc[+][+]|gcc_s)|ld-linux.*)[.]so'
  mkdir -p -- "$prepare"/{bin,lib,tests} || die 3 "$prepare: cannot be made"
  cp -- "$backend" "$prepare/lib/" || die 1 "nothing was built"
  [[ ! -x $program ]] || cp -- "$program" "$prepare/bin/"
  for file in "$tests"/{gpu_device_test,cuda_conformance}; do
    [[ ! -x $file ]] || cp -- "$file" "$prepare/tests/"
  done
  while read -r library; do
    [[ ${library##*/} =~ $skipped ]] || cp -L -- "$library" "$prepare/lib/"
  done < <(ldd "$prepare"/bin/* "$prepare"/tests/* 2>/dev/null | awk '$3 ~ "^/" {print $3}')
  say "$(du -sh -- "$prepare" | cut -f 1) in $prepare; there: launch/check_gpu.sh --prepared DIR"
}

check_conformance() {
  if [[ ! -x $tests/cuda_conformance ]] || $quick; then
    not_run conformance "needs a build for sm_90a, and no --quick"
    return
  fi
  step 60 conformance bash -c 'set -o pipefail; "$1" | diff - "$2"' _ "$tests/cuda_conformance" \
    "$root/tests/goldens/cuda_conformance.txt"
}

# Each by itself: one that hangs or takes the device with it says nothing of the others.
run_tests() {
  local names test suite='' status worst=0 limit
  if ! names=$("$tests/gpu_device_test" "--gtest_filter=$1" --gtest_list_tests); then
    printf '%s\n' "$names"
    [[ $names == 'not run'* ]] && return 77 || return 1
  fi
  while read -r test; do
    if [[ $test == *. ]]; then
      suite=$test
      continue
    fi
    limit=$(limit_of 120)
    ((limit >= 5)) || { echo "no time for $suite$test" && return 1; }
    limited "$limit" "$tests/gpu_device_test" "--gtest_filter=$suite$test" </dev/null
    status=$?
    ((status == 0)) || worst=1
    echo "$suite$test: status $status"
  done < <(printf '%s\n' "$names" | grep -v '^on ')
  ((worst == 0)) && [[ -n $suite ]]
}

check_tests() {
  local filter='*'
  ! $quick || filter='-*BitsDoNot*:*Steps*:*EveryType*:*BC_081*'
  if [[ ! -x $tests/gpu_device_test ]]; then
    not_run tests "gpu_device_test was not built: needs GoogleTest (libgtest-dev)"
    return
  fi
  export CPATTN_TEST_CUDA_BACKEND=$backend
  step 0 tests run_tests "$filter"
}

parity() {
  local name=$1
  shift
  step 240 "parity_$name" "$program" parity --cuda-backend "$backend" \
    --report "$out/parity_$name.json" "$@"
}

check_parity() {
  local size=(--seq-len 4096 --heads 8 --kv-heads 2 --head-dim 128 --chunk-tokens 512) sizes=1,2
  ! $quick || size=(--seq-len 150 --heads 2 --kv-heads 1 --head-dim 16 --chunk-tokens 64)
  if [[ -z $prepared ]] && command -v mpirun >/dev/null; then
    parity bits --device cuda --cp 1,2,4 --mask causal,full --sharding contiguous,zigzag \
      --dtype bf16,f16,f32 "${size[@]}"
  else
    not_run parity_bits "ranks as processes need a build and a machine with Open MPI"
    sizes=1
  fi
  parity against_cpu --device cpu-vs-cuda --cp "$sizes" --dtype bf16,f32 "${size[@]}"
  local odd=(--cu-seqlens 0,1000,1000,1001,2777 --heads 6 --kv-heads 3 --head-dim 80
    --value-dim 48 --chunk-tokens 100)
  ! $quick || odd=(--cu-seqlens 0,70,70,71,150 --heads 2 --kv-heads 1 --head-dim 24 --value-dim 8
    --chunk-tokens 50)
  [[ $sizes == 1 ]] ||
    parity odd --device cuda --cp 1,3 --dtype bf16,f32 --dlse true "${odd[@]}"
}

check_speed() {
  local size=() below
  ! $quick || size=(--seq-lens 96 --heads 2 --kv-heads 1 --head-dims 32 --masks causal
    --repetitions 1)
  step 240 bench "$program" bench --suite gpu --cuda-backend "$backend" --json "$out/bench.json" \
    "${size[@]}" || return
  tail -n +2 -- "$out/bench.log"
  below=$(grep -c BELOW -- "$out/bench.log")
  ((below == 0)) || note "         bench: $below lines with a number below what is wanted"
}

check_memory() {
  if $quick || ! command -v compute-sanitizer >/dev/null || [[ ! -x $tests/gpu_device_test ]]; then
    not_run sanitizers "needs compute-sanitizer, gpu_device_test, and no --quick"
    return
  fi
  local tool
  for tool in memcheck racecheck synccheck initcheck; do
    step 120 "$tool" compute-sanitizer --tool "$tool" --error-exitcode 1 \
      "$tests/gpu_device_test" '--gtest_filter=*EveryType*'
  done
}

check_torch() {
  [[ ! -d $build/python ]] || export PYTHONPATH=$build/python${PYTHONPATH:+:$PYTHONPATH}
  if $quick || ! "$python" -c 'import torch, cpattn; assert torch.cuda.is_available()' \
    2>/dev/null; then
    not_run torch "needs a $python with torch for CUDA and cpattn, and no --quick"
    return
  fi
  step 240 torch "$python" tests/perf/bench_torch.py --device cuda --heads 16 --dtypes bf16 \
    --tokens 1024,8192,16384 --json "$out/bench_torch.json" && tail -n +2 -- "$out/torch.log"
}

check_all() {
  cd -- "$root" || die 3 "$root: cannot be entered"
  if [[ -x $program ]]; then
    # It ends with 3 where there is no MPI, which is no failure here.
    step 60 doctor bash -c '"$1" doctor || (($? == 3))' _ "$program" || true
  fi
  check_conformance
  if [[ -z $backend ]]; then
    not_run all_else "there is no backend: configure.log and build.log say why"
    return
  fi
  check_tests
  if [[ -x $program ]]; then
    check_parity
    check_speed
  else
    not_run program "cpattn was not built: configure.log says what it needs"
  fi
  check_memory
  check_torch
}

read_arguments() {
  local name
  while (($# > 0)); do
    case $1 in
      --out=* | --backend=* | --program=* | --tests=* | --prepare=* | --prepared=* | --arch=* | \
        --seconds=*)
        name=${1%%=*}
        printf -v "${name#--}" '%s' "${1#*=}"
        shift
        ;;
      --out | --backend | --program | --tests | --prepare | --prepared | --arch | --seconds)
        (($# > 1)) || die 2 "$1: expected a value after it"
        printf -v "${1#--}" '%s' "$2"
        shift 2
        ;;
      --quick)
        quick=true
        shift
        ;;
      -h | --help)
        usage
        exit 0
        ;;
      *)
        usage >&2
        die 2 "unknown option: $1"
        ;;
    esac
  done
  [[ -z $seconds || $seconds =~ ^[1-9][0-9]*$ ]] ||
    die 2 "--seconds: expected a number, got $seconds"
  if [[ -n $prepared ]]; then
    [[ -z $backend$program$tests ]] || die 2 "--prepared goes without --backend, --program, --tests"
    prepared=$(cd -- "$prepared" && pwd -P) || die 3 "$prepared: no such folder"
    backend=$prepared/lib/libcpattn_cuda.so program=$prepared/bin/cpattn tests=$prepared/tests
  fi
  [[ -z $backend$program$tests || -n $backend && -n $program && -n $tests ]] ||
    die 2 "--backend, --program and --tests go together"
  for name in backend program tests out prepare; do  # steps run in the root
    [[ -z ${!name} || ${!name} == /* ]] || printf -v "$name" '%s/%s' "$PWD" "${!name}"
  done
}

finish() {
  printf '\n'
  cat -- "$out/summary.txt"
}

main() {
  read_arguments "$@"
  mkdir -p -- "$out" || die 3 "$out: cannot be made"
  out=$(cd -- "$out" && pwd -P)
  : >"$out/summary.txt"
  trap 'note "stopped after $SECONDS s"; finish; exit 1' INT TERM HUP
  find_tools
  if [[ -n $prepare ]]; then
    arch=${arch:-90a-real} build=$root/build-prepare
  elif [[ -z $backend ]]; then
    command -v nvidia-smi >/dev/null || die 3 "no nvidia-smi: this machine has no NVIDIA driver"
    arch=${arch:-$(architecture)} && [[ -n $arch ]] || die 3 "nvidia-smi names no GPU"
  fi
  if [[ -z $backend ]]; then
    tests=$build/tests
    [[ $arch != 90a* ]] || $quick || build_conformance || true
    build_all || true
  fi
  if [[ -n $prepare ]]; then
    gather
  else
    describe_gpu
    check_all
  fi
  finish
  [[ -n $prepare ]] || grep -q '^passed\|^FAILED' -- "$out/summary.txt" ||
    die 3 "nothing was run: see above what is missing"
  return "$failed"
}

main "$@"
exit
