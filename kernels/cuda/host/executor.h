// Executor: runs kernels on the calling OS thread, one block after another, one fiber per CUDA
// thread, and counts.
//
// What a device leaves open is chosen here, since a kernel must be right for every choice: the
// order of threads and the moment at which asynchronous copies land. A test runs its cases under
// several (docs/gpu_testing.md says which finds what). Blocks run in ascending order, so a block
// may wait for an earlier one and never for a later one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/cuda/host/stream.h"

namespace cpattn::cuda_host {

/// Who runs next among threads that can.
enum class ThreadOrder {
  ascending,  ///< first come, first served, beginning with thread 0
  random,     ///< drawn anew at every switch
};

/// When an asynchronous copy or product happens between its start and the wait for it.
enum class Landing {
  early,  ///< at the start
  late,   ///< at the wait; until then the destination of a copy holds NaN
};

struct Options {
  ThreadOrder order = ThreadOrder::ascending;
  std::uint64_t seed = 0;
  Landing landing = Landing::early;
  std::size_t max_shared_bytes = 227 * 1024;  ///< sm_90, sm_100; sm_80 has 163, sm_120 99 KiB
  std::size_t stack_bytes = 128 * 1024;
  int slow_thread = -1;      ///< runs where no other thread can; none may poll then
  bool only_checks = false;  ///< shapes of launches are judged, and nothing runs
};

struct Counters {
  std::uint64_t blocks = 0;
  std::uint64_t switches = 0;
  std::uint64_t barriers = 0;         ///< arrivals
  std::uint64_t warp_operations = 0;  ///< whole warps
  std::uint64_t ldmatrix_phases =
      0;  ///< eight rows of 16 bytes: one pass where they cover all banks
  std::uint64_t ldmatrix_conflicts = 0;  ///< passes beyond the first
};

/// InvalidArgument: a shape no device takes, or not one with so much shared memory.
void check_launch(const LaunchShape& shape, std::size_t max_shared_bytes);

class Executor final : public CUstream_st {
 public:
  explicit Executor(const Options& options = {});
  ~Executor() override;

  void set_options(const Options& options) { options_ = options; }
  const Options& options() const { return options_; }
  const Counters& counters() const { return counters_; }
  void reset_counters() { counters_ = {}; }

  /// Runs the grid to its end. InvalidArgument: a shape no device takes. InternalError: what the
  /// kernel did wrong, and where.
  void launch(const LaunchShape& shape, std::function<void()> thread) override;

 private:
  Options options_;
  Counters counters_;
  std::unique_ptr<class Block> block_;
};

}  // namespace cpattn::cuda_host
