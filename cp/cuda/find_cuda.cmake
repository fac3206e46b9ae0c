# Whether the CUDA backend can be built on this machine (CP_WITH_CUDA), and the language CUDA where it can.
#
#   CP_HAS_CUDA          it is built
#   CP_CUDA_MISSING      why it is not; "" where it is
#   CP_HAS_CUDA_HEADERS  headers of the CUDA runtime and of NCCL: enough for tests on their doubles
#   CP_NVCC_FLAGS        what every device source is compiled with
#   CP_NCCL_INCLUDE_DIR, CP_NCCL_LIBRARY
set(least_cuda 13.0)
set(least_nccl 2.28)

string(TOUPPER "${CP_WITH_CUDA}" wish)
if(NOT wish MATCHES "^(AUTO|ON|OFF|TRUE|FALSE|YES|NO|1|0)$")
  message(FATAL_ERROR "CP_WITH_CUDA is ${CP_WITH_CUDA}, expected AUTO (where CUDA and NCCL are found), ON or OFF")
endif()

# Bits: fused only where the code says so, on both sides of a launch. 186: a comparison that is pointless for one type
# of a template; 554: a conversion of a view that only its writable kind has.
set(CP_NVCC_FLAGS -fmad=false -Xcompiler=-ffp-contract=off -diag-suppress=186,554
  -Xptxas=-warn-spills,-warn-lmem-usage)

find_package(CUDAToolkit QUIET)
find_path(CP_NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
find_library(CP_NCCL_LIBRARY nccl HINTS ${CUDAToolkit_LIBRARY_DIR})
set(nccl_version "")
if(CP_NCCL_INCLUDE_DIR)
  file(STRINGS ${CP_NCCL_INCLUDE_DIR}/nccl.h lines REGEX "^#define NCCL_(MAJOR|MINOR|PATCH) [0-9]+")
  list(TRANSFORM lines REPLACE ".* ([0-9]+).*" "\\1")
  list(JOIN lines . nccl_version)
endif()

set(missing "")
set(headers_missing "")
if(NOT CUDAToolkit_FOUND)
  list(APPEND headers_missing "the CUDA toolkit, ${least_cuda} or later")
elseif(CUDAToolkit_VERSION VERSION_LESS least_cuda)
  list(APPEND headers_missing "CUDA ${least_cuda} or later (${CUDAToolkit_VERSION} is there)")
endif()
if(NOT CP_NCCL_INCLUDE_DIR)
  list(APPEND headers_missing "nccl.h of NCCL ${least_nccl} or later")
elseif(nccl_version VERSION_LESS least_nccl)
  list(APPEND headers_missing "NCCL ${least_nccl} or later (${CP_NCCL_INCLUDE_DIR}/nccl.h is ${nccl_version})")
endif()
set(CP_HAS_CUDA_HEADERS ON)
if(headers_missing)
  set(CP_HAS_CUDA_HEADERS OFF)
endif()

if(wish MATCHES "^(OFF|FALSE|NO|0)$")
  set(missing "switched off: -DCP_WITH_CUDA=ON")
else()
  set(missing ${headers_missing})
  if(CUDAToolkit_FOUND AND NOT CUDAToolkit_NVCC_EXECUTABLE)
    list(APPEND missing "nvcc")
  endif()
  if(NOT CP_NCCL_LIBRARY)
    list(APPEND missing "libnccl.so")
  endif()
  if(CP_SANITIZE)
    list(APPEND missing "a build without CP_SANITIZE")
  endif()
  if(NOT missing)
    # nvcc knows the host compilers of its time only, and here CMake asks it whether it takes this one.
    if(CMAKE_CUDA_HOST_COMPILER)
      set(ENV{CUDAHOSTCXX} ${CMAKE_CUDA_HOST_COMPILER})
    elseif(NOT DEFINED ENV{CUDAHOSTCXX})
      set(ENV{CUDAHOSTCXX} ${CMAKE_CXX_COMPILER})
    endif()
    if(NOT CMAKE_CUDA_COMPILER)
      unset(CMAKE_CUDA_COMPILER CACHE)  # what was not found the last time may be there now
      if(NOT DEFINED ENV{CUDACXX})
        set(ENV{CUDACXX} ${CUDAToolkit_NVCC_EXECUTABLE})
      endif()
      include(CheckLanguage)
      check_language(CUDA)
    endif()
    if(NOT CMAKE_CUDA_COMPILER)
      list(APPEND missing "a host compiler that ${CUDAToolkit_NVCC_EXECUTABLE} takes, in CUDAHOSTCXX \
(CMakeFiles/CMakeError.log has what it said)")
    endif()
  endif()
  if(missing AND NOT wish STREQUAL AUTO)
    list(JOIN missing "\n  " text)
    message(FATAL_ERROR "CP_WITH_CUDA is ${CP_WITH_CUDA}, and the CUDA backend cannot be built. Missing:\n  ${text}\n"
      "-DCP_WITH_CUDA=OFF builds the rest; AUTO does so where something is missing.")
  endif()
endif()
list(JOIN missing "; " CP_CUDA_MISSING)

set(CP_HAS_CUDA OFF)
if(NOT missing)
  set(CP_HAS_CUDA ON)
  # Machine code for each generation, as later minor versions of one take it, too; of Hopper the one that has wgmma. PTX
  # of the first for what has no code here (sm_110), and of the last for what comes.
  set(CP_CUDA_ARCHITECTURES 80 90a-real 100-real 120 CACHE STRING
    "What device source is compiled for, as CMake names it")
  set(CMAKE_CUDA_ARCHITECTURES ${CP_CUDA_ARCHITECTURES})
  enable_language(CUDA)
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_EXTENSIONS OFF)
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)  # CMake 3.25 does not know that nvcc 13 has it
  endif()
endif()
