#include "launch/plan_gpu.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>
#include <vector>

#include "src/base/error.h"

namespace cpattn {
namespace {

constexpr int kAssumedArchitecture = 90;

/// Multiprocessors of the GPUs of data centers: A100; H100 SXM, H200; B200; RTX PRO 6000.
constexpr std::array kUsualMultiprocessors{std::pair{80, 108}, std::pair{90, 132},
                                           std::pair{100, 148}, std::pair{120, 188}};

/// 0: not known.
int usual_multiprocessors(int compute_capability) {
  for (const auto& [capability, count] : kUsualMultiprocessors)
    if (capability == compute_capability) return count;
  return 0;
}

/// "sm_90" is 90.
int capability_of(const std::string& name) {
  int value = 0;
  std::from_chars(name.data() + std::string("sm_").size(), name.data() + name.size(), value);
  return value;
}

}  // namespace

PlannedExchange planned_exchange(GpuExchange wanted, int num_gpus, int world_size,
                                 const std::function<bool()>& is_mpi_cuda_aware) {
  std::string why = "as asked";
  bool is_nccl = wanted == GpuExchange::nccl;
  if (wanted == GpuExchange::automatic) {
    is_nccl = num_gpus == 0 || world_size <= num_gpus;
    why = num_gpus == 0
              ? "auto: where every rank has a GPU of its own; else messages through the host"
              : fmt::format("auto: {} rank{} on {} GPU{} of this host", world_size,
                            world_size == 1 ? "" : "s", num_gpus, num_gpus == 1 ? "" : "s");
  }
  if (is_nccl) return {"nccl", std::move(why), false};
  if (is_mpi_cuda_aware()) return {"host, cuda-aware", std::move(why), false};
  return {"host, staged", std::move(why), true};
}

std::string architecture_name(int compute_capability) {
  return fmt::format("sm_{}", compute_capability);
}

PlannedGpu planned_gpu(const RunConfig& config) {
  PlannedGpu gpu;
  gpu.backend = CudaBackend::open(config.cuda_backend);
  std::vector<CudaDeviceFacts> devices = gpu.backend->devices();
  std::erase_if(devices, [](const CudaDeviceFacts& device) { return !device.refusal.empty(); });
  gpu.num_gpus = static_cast<int>(devices.size());
  const bool is_asked = config.gpu_arch != "auto";
  if (is_asked) {
    gpu.compute_capability = capability_of(config.gpu_arch);
    gpu.origin = "as asked";
  } else if (!devices.empty()) {
    const CudaDeviceFacts& first = devices.front();
    gpu.compute_capability = 10 * first.compute_major + first.compute_minor;
    gpu.multiprocessors = first.multiprocessors;
    gpu.origin = fmt::format("cuda:{} {}", first.ordinal, first.name);
  } else {
    const std::string refusal = gpu.backend->refusal();
    gpu.compute_capability = kAssumedArchitecture;
    gpu.origin = "as an H200; here: " + (refusal.empty() ? "no GPU that it supports" : refusal);
  }
  if (config.multiprocessors > 0) {
    gpu.multiprocessors = static_cast<int>(config.multiprocessors);
  } else if (gpu.multiprocessors == 0) {
    gpu.multiprocessors = usual_multiprocessors(gpu.compute_capability);
  }
  // First what nobody can help: an architecture without kernels.
  gpu.kernels =
      gpu.backend->kernels_for_plans(gpu.compute_capability, std::max(gpu.multiprocessors, 1));
  require(gpu.multiprocessors > 0, "gpu_arch ", architecture_name(gpu.compute_capability),
          ": how many multiprocessors such a GPU has is not known here; --multiprocessors says it");
  return gpu;
}

}  // namespace cpattn
