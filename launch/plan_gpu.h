// The GPU that `cpattn plan` plans for, with or without one on this machine: which kernels it would
// run, and what would move its shards. Sizes are arithmetic of the host, so the CUDA backend is all
// that is needed.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "cp/cuda_backend.h"
#include "launch/run_config.h"

namespace cpattn {

/// What moves shards at one size.
struct PlannedExchange {
  std::string name;  ///< "nccl", "host, staged", "host, cuda-aware"
  std::string why;
  bool can_verify_checksums = false;
};

/// What GpuGroup::make chooses for `world_size` ranks on the `num_gpus` GPUs of one host; 0: none
/// here, so that ranks are taken to have one each. `is_mpi_cuda_aware`: asked where it matters.
PlannedExchange planned_exchange(GpuExchange wanted, int num_gpus, int world_size,
                                 const std::function<bool()>& is_mpi_cuda_aware);

/// "sm_90"; 90 is the compute capability 9.0.
std::string architecture_name(int compute_capability);

struct PlannedGpu {
  std::shared_ptr<CudaBackend> backend;  ///< whose code the kernels are
  KernelTable kernels;
  int compute_capability = 0;  ///< 90 is sm_90
  int multiprocessors = 0;
  int num_gpus = 0;    ///< that this machine has and kernels run on
  std::string origin;  ///< "cuda:0 NVIDIA H200", "as asked", "none here: no CUDA driver ..."
};

/// What --gpu-arch and --multiprocessors ask for; what is left to "auto" is that of the first GPU
/// found, or that of an H200.
/// Errors  Unsupported: no backend, no kernels for the architecture; InvalidArgument: how many
///         multiprocessors the architecture has is not known here.
PlannedGpu planned_gpu(const RunConfig& config);

}  // namespace cpattn
