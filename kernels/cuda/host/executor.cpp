#include "kernels/cuda/host/executor.h"

#include "kernels/cuda/host/block.h"
#include "kernels/cuda/host/sanitizers.h"
#include "src/base/error.h"

namespace cpattn::cuda_host {
namespace {

constexpr std::uint64_t kMaxGridX = 0x7fffffff;
constexpr unsigned kMaxGridYZ = 65535, kMaxBlockXY = 1024, kMaxBlockZ = 64, kMaxThreads = 1024;

}  // namespace

void check_launch(const LaunchShape& shape, std::size_t max_shared_bytes) {
  const Index3 grid = shape.grid, block = shape.block;
  require(grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.x <= kMaxGridX && grid.y <= kMaxGridYZ &&
              grid.z <= kMaxGridYZ,
          "grid (", grid.x, ", ", grid.y, ", ", grid.z, "): expected 1 to (", kMaxGridX, ", ",
          kMaxGridYZ, ", ", kMaxGridYZ, ")");
  const std::uint64_t threads = std::uint64_t{block.x} * block.y * block.z;
  require(block.x > 0 && block.y > 0 && block.z > 0 && block.x <= kMaxBlockXY &&
              block.y <= kMaxBlockXY && block.z <= kMaxBlockZ && threads <= kMaxThreads,
          "block (", block.x, ", ", block.y, ", ", block.z, "): expected 1 to (", kMaxBlockXY, ", ",
          kMaxBlockXY, ", ", kMaxBlockZ, ") and at most ", kMaxThreads, " threads");
  require(shape.shared_bytes <= max_shared_bytes, shape.shared_bytes,
          " bytes of dynamic shared memory: this device has ", max_shared_bytes);
}

Executor::Executor(const Options& options) : options_(options), block_(new Block) {}
Executor::~Executor() = default;

void Executor::launch(const LaunchShape& shape, std::function<void()> thread) {
  check_launch(shape, options_.max_shared_bytes);
  if (options_.only_checks) return;
  require(current_thread == nullptr, "a kernel cannot launch kernels");
  Fiber launcher;
  launcher.adopt_thread();
  const std::uint64_t plane = std::uint64_t{shape.grid.x} * shape.grid.y;
  for (std::uint64_t i = 0; i < plane * shape.grid.z; ++i) {
    const Index3 index{static_cast<unsigned>(i % shape.grid.x),
                       static_cast<unsigned>(i / shape.grid.x % shape.grid.y),
                       static_cast<unsigned>(i / plane)};
    block_->prepare(shape, index, options_, &counters_, &thread);
    block_->run(launcher);
  }
  // Blocks are not ordered among themselves, so only here does what they did come before what the
  // caller does next.
  block_->end_launch(launcher);
}

}  // namespace cpattn::cuda_host
