#include <algorithm>
#include <array>

#include "cp/shard_rows.h"
#include "cp/shard_tools.h"
#include "launch/bench_gpu.h"
#include "launch/bench_gpu_timer.h"
#include "launch/bench_timing.h"

namespace cpattn {
namespace {

constexpr std::int64_t kHeads = 8, kDim = 128, kRowBytes = kHeads * kDim * 2;

/// Two tensors of one shard, [rows, 8, 128] in bf16, and room for one of them or for both packed.
class CopyMemory {
 public:
  CopyMemory(Device& device, const KernelTable& kernels, std::int64_t num_rows)
      : rows(num_rows),
        k(device.allocate(tensor_bytes())),
        v(device.allocate(tensor_bytes())),
        packed_bytes(kernels.packed_kv_bytes(problem(kernels), rows)),
        packed(device.allocate(std::max(packed_bytes, tensor_bytes()))) {}

  std::size_t tensor_bytes() const { return static_cast<std::size_t>(rows * kRowBytes); }
  KernelProblem problem(const KernelTable& kernels) const {
    KernelProblem problem;
    problem.shape.num_heads = problem.shape.num_kv_heads = kHeads;
    problem.shape.head_dim = problem.shape.value_dim = kDim;
    problem.dtype = DType::bf16;
    problem.max_chunk_rows = rows;
    problem.num_threads = std::max(1, kernels.num_workers);
    return problem;
  }

  std::int64_t rows;
  Buffer k, v;
  std::size_t packed_bytes;
  Buffer packed;
};

AnyTensor tensor(const Buffer& memory, std::int64_t rows) {
  return contiguous_tensor(static_cast<void*>(memory.data()), DType::bf16, {rows, kHeads, kDim});
}

/// Something that moves bytes.
struct Mover {
  std::string name;
  double bytes = 0.0;  ///< read and written by one call
  std::function<void()> call;
  std::int64_t calls = 1;  ///< of one measurement
  std::vector<double> rates{}, fractions{};
};

}  // namespace

std::vector<GpuCopyRecord> measure_copies(const CopySettings& settings, const GpuTimer& timer,
                                          Device& device) {
  const KernelTable& kernels = timer.place().kernels();
  const Stream stream = timer.place().stream();
  const CopyMemory memory(device, kernels,
                          std::max<std::int64_t>(4, settings.tensor_bytes / kRowBytes / 4 * 4));
  const std::array chunks{PackChunk{0, memory.rows, 0}};
  // The shard of the first of two ranks: the first and the last quarter.
  CpConfig config;
  config.chunk_tokens = memory.rows / 4;
  const std::vector<OwnedChunk> own =
      make_sharding(batch_of_one(memory.rows, memory.rows), config, 2).shards[0].kv;
  const ShardRows shard_rows(own, kernels, device);

  const double size = static_cast<double>(memory.tensor_bytes());
  std::vector<Mover> movers;
  movers.push_back(
      {"copy", 2.0 * size, [&] {
         device.copy(memory.packed.data(), {memory.k.data(), memory.tensor_bytes()}, stream);
       }});
  movers.push_back({"pack_kv", 2.0 * size + static_cast<double>(memory.packed_bytes), [&] {
                      kernels.pack_kv({.problem = memory.problem(kernels),
                                       .k = tensor(memory.k, memory.rows),
                                       .v = tensor(memory.v, memory.rows),
                                       .chunks = chunks,
                                       .packed = memory.packed.data(),
                                       .stream = stream});
                    }});
  movers.push_back({"shard_rows", 2.0 * static_cast<double>(num_rows(own) * kRowBytes), [&] {
                      shard_rows.shard(tensor(memory.k, memory.rows),
                                       tensor(memory.packed, num_rows(own)), stream);
                    }});

  for (Mover& mover : movers) {
    mover.call();
    mover.calls = calls_that_fill(settings.run_seconds, timer.seconds_per_call(1, mover.call));
  }
  for (std::int64_t i = 0; i < settings.repetitions; ++i) {
    for (Mover& mover : movers) {
      mover.rates.push_back(mover.bytes / timer.seconds_per_call(mover.calls, mover.call));
      mover.fractions.push_back(mover.rates.back() / movers.front().rates.back());
    }
  }
  std::vector<GpuCopyRecord> records;
  for (const Mover& mover : movers) {
    records.push_back({.name = mover.name,
                       .bytes_per_second = median(mover.rates),
                       .fraction_of_copy = median(mover.fractions),
                       .target = mover.name == "copy" ? std::nullopt : std::optional(0.85),
                       .repetitions = settings.repetitions});
  }
  return records;
}

}  // namespace cpattn
