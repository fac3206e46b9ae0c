#!/usr/bin/env bash
# From a fresh Debian machine to a verdict in one command; see `launch/quickstart.sh help`.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
build="$root/build"

# What building, running and testing need (python3, pkg-config: among the tests).
packages=(g++ cmake ninja-build openmpi-bin libopenmpi-dev libboost-program-options-dev
  libyaml-cpp-dev nlohmann-json3-dev libfmt-dev libgtest-dev python3 pkg-config)
# What the Python module and its tests need besides.
python_packages=(python3-dev pybind11-dev python3-numpy python3-torch python3-mpi4py)

usage() {
  cat <<'TXT'
usage: launch/quickstart.sh parity [OPTION...]   build, then compare CP1, CP2 and CP4 bit for bit
       launch/quickstart.sh test [OPTION...]     build everything, then run all tests
       launch/quickstart.sh build                install what is missing, configure and build
       launch/quickstart.sh help                 this text

OPTIONs of parity go to `cpattn parity`, those of test to ctest:
       launch/quickstart.sh parity --cp 1,2,3,7 --mask full
       launch/quickstart.sh test -L fast

Missing Debian packages are installed with apt-get (as root or through sudo). The build is Release,
in build/ beside this folder, with warnings as errors on g++ 12 (and nvcc 13.0, where there is one);
the program is build/bin/cpattn. The CUDA backend is built where nvcc 13 and NCCL are found.
Run it from any folder, as often as you like: what is there already is not done again. Paths in
OPTIONs are taken from the root of the repository.

exit status: that of the program that ran; 2 bad usage, 3 something needed is missing.
TXT
}

say() { printf '==> %s\n' "$*"; }

# die STATUS MESSAGE...
die() {
  local status=$1
  shift
  printf 'quickstart: %s\n' "$@" >&2
  exit "$status"
}

is_installed() {
  [[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) == installed ]]
}

# Prefix that makes a command run as root, into `as_root`; false when there is none.
find_root() {
  as_root=()
  [[ $(id -u) == 0 ]] && return
  command -v sudo >/dev/null || return
  as_root=(sudo)
  # Without a terminal nobody can type a password.
  [[ -t 0 ]] || sudo -n true 2>/dev/null
}

install_packages() {
  if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    say "not a Debian system: taking it that the equivalents of these are there: ${packages[*]}"
    return
  fi
  local missing=() package
  for package in "${packages[@]}"; do
    is_installed "$package" || missing+=("$package")
  done
  if ((${#missing[@]} == 0)); then
    say "packages: all ${#packages[@]} are installed"
    return
  fi
  if ! find_root; then
    die 3 "missing packages, and neither root nor sudo to install them with. As root, run:" \
      "  apt-get update && apt-get install -y --no-install-recommends ${missing[*]}"
  fi
  say "packages: installing ${missing[*]}"
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q
    -o DPkg::Lock::Timeout=120)
  # One unreachable source must not stop us when the others have what we need.
  "${apt[@]}" update </dev/null || say "apt-get update reported an error; trying to install anyway"
  "${apt[@]}" install -y --no-install-recommends "${missing[@]}" </dev/null ||
    die 3 "apt-get could not install: ${missing[*]}"
}

# The value of a variable in the cache of an earlier configure, empty when there is none.
cached() {
  [[ -f $build/CMakeCache.txt ]] || return 0
  sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt"
}

configure() {
  local options=(-S "$root" -B "$build" -DCMAKE_BUILD_TYPE=Release -DCP_WERROR="$werror" "$@")
  if [[ -z $(cached CMAKE_GENERATOR) ]]; then
    options+=(-G Ninja)
  elif [[ $(cached CMAKE_HOME_DIRECTORY) != "$root" ]]; then
    say "build/ was configured for $(cached CMAKE_HOME_DIRECTORY): configuring it afresh"
    options+=(--fresh -G Ninja)
  fi
  say "configure: cmake ${options[*]}"
  mkdir -p "$build"
  local log="$build/configure.log"
  if ! cmake "${options[@]}" >"$log" 2>&1 </dev/null; then
    cat "$log" >&2
    die 3 "configure failed; its messages are above"
  fi
  sed -n '/^-- cpattn /,$s/^-- //p' "$log"
}

build_targets() {
  say "build: cmake --build build --target $*"
  cmake --build "$build" --parallel "$(nproc)" --target "$@" </dev/null
}

# The version of nvcc, as "13.0"; empty when there is none.
nvcc_version() {
  local nvcc
  for nvcc in nvcc /usr/local/cuda/bin/nvcc; do
    command -v "$nvcc" >/dev/null || continue
    "$nvcc" --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p'
    return
  done
}

# Refuses a compiler that is too old. Sets `werror`: ON for those that CI builds with, whose
# warnings are all known; another one may have new warnings, which must not stop a user. The same
# for every command, so that going from one to the next compiles nothing again.
check_compiler() {
  local compiler=${CXX:-c++} version
  command -v "${compiler%% *}" >/dev/null || die 3 "no C++ compiler: $compiler is not there"
  version=$($compiler -dumpversion)
  werror=OFF
  [[ $($compiler --version) != *clang* ]] || return 0
  if ((${version%%.*} < 12)); then
    die 3 "$compiler is version $version; C++20 as used here needs g++ 12 or newer (set CXX)"
  fi
  if ((${version%%.*} == 12)) && [[ $(uname -m) == x86_64 ]]; then werror=ON; fi
  version=$(nvcc_version)
  if [[ -n $version && $version != 13.0 ]]; then werror=OFF; fi
}

main() {
  local command=${1-help}
  (($# == 0)) || shift
  case $command in
    parity)
      install_packages
      check_compiler
      configure
      local targets=(cpattn)
      if [[ "$*" == *cuda* ]] && grep -q '^--   found  *CUDA backend' "$build/configure.log"; then
        targets+=(cpattn_cuda)
      fi
      build_targets "${targets[@]}"
      cd -- "$root"
      local options=("$@")
      if [[ " $*" != *" --config"* ]]; then
        options=(--config configs/parity/quickstart.yaml "$@")
      fi
      say "run: build/bin/cpattn parity ${options[*]}"
      exec build/bin/cpattn parity "${options[@]}"
      ;;
    test)
      packages+=("${python_packages[@]}")
      install_packages
      check_compiler
      configure -DCP_BUILD_TESTS=ON
      build_targets all
      cd -- "$root"
      say "run: ctest --test-dir build --output-on-failure $*"
      exec ctest --test-dir build --output-on-failure --no-tests=error --no-label-summary "$@"
      ;;
    build)
      (($# == 0)) || die 2 "build takes no options, got: $*"
      packages+=("${python_packages[@]}")
      install_packages
      check_compiler
      configure
      build_targets all
      say "built: build/bin/cpattn"
      ;;
    help | -h | --help)
      usage
      ;;
    *)
      usage >&2
      die 2 "unknown command: $command"
      ;;
  esac
}

main "$@"
