// One attention problem of bench: what is computed, the tensors of one rank, and the flops that
// count.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cp/plan.h"
#include "cp/ring_attention.h"
#include "cp/ring_gradient.h"
#include "launch/run_config.h"
#include "src/comm/shard_transport.h"
#include "src/comm/transfer.h"
#include "src/device/memory.h"

namespace cpattn {

/// One document; causal problems count half the pairs.
struct BenchProblem {
  DType dtype = DType::f32;
  MaskKind mask = MaskKind::causal;
  std::int64_t head_dim = 64;
  std::int64_t seq_len = 0;
  std::int64_t heads = 8;
  std::int64_t kv_heads = 8;
  BenchPass pass = BenchPass::forward;
  DType out_dtype = DType::f32;  ///< of out, dout and the gradients

  /// 4 S S D Hq, half of it for causal; 10 for the backward, 14 for both.
  double useful_flop() const;
  Problem problem() const;
};

/// Every combination of the lists, empty ones replaced by `choice`'s.
struct BenchSweep {
  std::vector<DType> dtypes;
  std::vector<MaskKind> masks;
  std::vector<std::int64_t> head_dims;
  std::vector<std::int64_t> seq_lens;
  std::vector<BenchPass> passes{BenchPass::forward};
};
std::vector<BenchProblem> bench_problems(const RunConfig& config, const BenchSweep& choice);

/// What the name of a record says of its pass, after that of its suite: nothing for the forward.
std::string_view suffix_of(BenchPass pass);

/// The list, or `choice` when it is empty.
template <class T>
std::vector<T> or_choice(const std::vector<T>& list, const std::vector<T>& choice) {
  return list.empty() ? choice : list;
}

/// q, k, v of unit variance, and room for out and lse, of one rank's shard. Where a backward is
/// measured also dout and room for gradients, of the type of out.
class BenchTensors {
 public:
  /// In the memory of `device`, which outlives it; on the CPU without.
  BenchTensors(const BenchProblem& problem, std::int64_t q_rows, std::int64_t kv_rows, int rank,
               Device* device = nullptr);
  ForwardTensors tensors() const;
  BackwardTensors backward_tensors() const;

 private:
  Buffer memory_[9];
  ForwardTensors tensors_;
  AnyTensor dout_, dq_, dk_, dv_;
};

/// The plans of a problem and their memory where a transport has its shards.
class BenchAttention {
 public:
  /// Collective. Everything that runs is given to `stream`.
  BenchAttention(const BenchProblem& problem, const CpConfig& config, const KernelTable& kernels,
                 ShardTransport& transport, Stream stream = {})
      : pass_(problem.pass),
        stream_(stream),
        plan_(problem.problem(), config, kernels, transport.control().rank(),
              transport.control().size()),
        ring_(plan_, transport) {
    if (problem.pass == BenchPass::forward) return;
    gradient_plan_.emplace(plan_);
    gradient_.emplace(plan_, *gradient_plan_, transport);
  }

  const Plan& plan() const { return plan_; }
  /// Nothing when only the forward is measured.
  const GradientPlan* gradient_plan() const { return gradient_plan_ ? &*gradient_plan_ : nullptr; }

  /// Collective. What the problem's pass is; a backward reads what forward() left.
  void run(const BenchTensors& tensors);
  void forward(const BenchTensors& tensors) { ring_.forward(tensors.tensors(), stream_); }

  /// Since the start, of everything that ran.
  TransferStats stats() const;

 private:
  BenchPass pass_;
  Stream stream_;
  Plan plan_;
  RingAttention ring_;
  std::optional<GradientPlan> gradient_plan_;
  std::optional<RingGradient> gradient_;
};

}  // namespace cpattn
