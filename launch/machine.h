// What this machine has, as plain facts found by looking; what follows from them is said by
// launch/doctor.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cp/cuda_backend.h"

namespace cpattn {

struct MachineFacts {
  // this build
  bool is_built_with_mpi = false;
  bool is_built_with_openmp = false;
  std::vector<std::string> kernels;  ///< that this machine can run, best last

  // processes
  std::string mpirun_version;  ///< "mpirun (Open MPI) 4.1.4"; empty: none on PATH
  int usable_cores = 0;        ///< of this process: affinity mask, that is cpuset included
  int online_cores = 0;
  double core_quota = 0.0;  ///< cores' worth of time the cgroup allows; 0: no limit
  bool is_root = false;
  std::string single_copy_error;  ///< of reading another process's memory; empty: allowed

  // memory, bytes
  std::uint64_t memory_total = 0;
  std::uint64_t memory_available = 0;
  std::uint64_t memory_limit = 0;        ///< of the cgroup; 0: no limit
  std::uint64_t shared_memory_free = 0;  ///< in /dev/shm

  // accelerators
  std::string cuda_toolkit;  ///< line of `nvcc --version`; empty: none
  bool has_cuda_driver = false;
  bool has_nccl = false;
  std::optional<bool> is_mpi_cuda_aware;  ///< empty: ompi_info did not say
  std::string cuda_backend;               ///< its description; empty: it does not open
  std::string cuda_backend_error;         ///< why it does not open
  std::string gpu_refusal;                ///< why it finds no GPU
  std::vector<CudaDeviceFacts> gpus;      ///< as it sees them
};

/// Looks around: runs mpirun, ompi_info and nvcc (10 s at most each), opens the CUDA
/// backend and reads /proc,
/// /sys and the libraries' presence. What cannot be found out stays at its default.
MachineFacts examine_machine();

/// Whether Open MPI says that it takes device memory, by ompi_info (10 s at most); nothing when it
/// does not say.
std::optional<bool> mpi_cuda_awareness();

/// What the backend at `path` ("": the installed one) says of itself and of the GPUs.
void examine_gpus(const std::string& path, MachineFacts& facts);

}  // namespace cpattn
