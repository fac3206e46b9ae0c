# The found / not-found table at the end of configure: what is there, and what will therefore work.

# cp_row(name found gives remedy): one line; `remedy` says how to get what is missing.
function(cp_row name found gives remedy)
  if(found)
    message(STATUS "  found      ${name}: ${gives}")
  else()
    message(STATUS "  not found  ${name}: without it no ${gives} (${remedy})")
  endif()
endfunction()

message(STATUS "cpattn ${PROJECT_VERSION}, ${CMAKE_BUILD_TYPE}, ${CMAKE_CXX_COMPILER_ID} "
               "${CMAKE_CXX_COMPILER_VERSION}")
if(CP_WITH_MPI)
  set(remedy "apt-get install openmpi-bin libopenmpi-dev")
else()
  set(remedy "switched off: -DCP_WITH_MPI=ON")
endif()
cp_row("MPI ${MPI_CXX_VERSION}" "${MPI_CXX_FOUND}" "ranks as processes" "${remedy}")
cp_row("OpenMP" "${OpenMP_CXX_FOUND}" "threads inside a rank" "a compiler with -fopenmp")
if(NOT CP_BUILD_PYTHON)
  set(CP_PYTHON_REMEDY "switched off: -DCP_BUILD_PYTHON=ON")
endif()
cp_row("Python ${CP_PYTHON_VERSION} ${CP_PYTHON}" "${CP_PYTHON_FOUND}" "Python module" "${CP_PYTHON_REMEDY}")
if(CP_PYTHON_FOUND AND CP_BUILD_TESTS)
  foreach(module torch mpi4py)
    cp_row("${module} of ${CP_PYTHON}" "${CP_PYTHON_HAS_${module}}" "tests of the module with ${module}"
      "apt-get install python3-${module}")
  endforeach()
endif()
# The kernels are not in the product yet: a toolkit is for checking them (docs/gpu.md).
cp_row("CUDA toolkit ${CUDAToolkit_VERSION} ${CUDAToolkit_NVCC_EXECUTABLE}" "${CUDAToolkit_NVCC_EXECUTABLE}"
  "compile checks of the CUDA kernels" "nvcc 12.8 or later; their tests on the CPU need none")
cp_row("headers of the CUDA runtime and of NCCL" "${CP_HAS_CUDA_HEADERS}"
  "tests of streams, graphs and NCCL on the CPU" "CUDA 13.0 or later, nccl.h of 2.28 or later")
if(CP_BUILD_TESTS AND CP_CUDA_HOST_SANITIZERS)
  set(found OFF)
  if(CP_HAS_ASAN AND CP_HAS_TSAN)
    set(found ON)
  endif()
  cp_row("sanitizers" "${found}" "tests of the CUDA kernels under them" "the compiler's libasan, libubsan, libtsan")
endif()
