// The face for trainers: attention over a group of ranks that each hold a shard of the sequence.
//
//   auto group = std::make_shared<cpattn::MpiCommunicator>(my_mpi_comm);      // any subgroup
//   cpattn::ContextParallelAttention attention(group, {.mask = cpattn::MaskKind::causal});
//   auto plan = attention.plan({.shape = ..., .batch = cpattn::batch_of_one(seq, seq)});
//   plan->forward({q, k, v, out, lse});                                       // per layer
//   plan->backward({q, k, v, out, lse, dout, {}, dq, dk, dv});
//
// A group is a ShardTransport: a Communicator for shards in host memory; a GpuGroup for shards on a
// GPU (cp/gpu_group.h), with a stream as second argument of forward() and backward().
//
// Policy: no globals; the group belongs to the handle and is never remembered anywhere else, so any
// number of handles on any groups live side by side. Everything a call needs is decided and
// allocated when it is planned (the backward's memory at the first backward()); after that no call
// allocates memory that grows with the problem.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cp/config.h"
#include "cp/plan.h"
#include "cp/ring_attention.h"
#include "cp/ring_gradient.h"
#include "cp/shard_rows.h"
#include "cp/shard_tools.h"
#include "src/comm/communicator.h"
#include "src/comm/shard_transport.h"

namespace cpattn {

/// What would run and why, or why nothing would, for this rank; to_json() is the machine-readable
/// form: one object with these names as keys.
struct Explanation {
  bool is_supported = false;
  std::vector<std::string> refusals;  ///< every reason, each naming field, value, expectation
  int rank = 0;
  int world_size = 0;
  std::string kernels;   ///< "cpu/avx512", ...
  std::string numerics;  ///< the arithmetic for this dtype; equal names give equal bits
  std::string transport;
  std::string sharding;
  std::string schedule;
  std::string guarantee;  ///< "bitwise across CP sizes", or why not; empty when refused
  std::int64_t q_rows = 0;
  std::int64_t kv_rows = 0;
  std::int64_t visible_pairs = 0;         ///< (query, key) pairs this rank computes
  std::size_t forward_memory_bytes = 0;   ///< taken by plan(); the caller's tensors not counted
  std::size_t backward_memory_bytes = 0;  ///< taken by the first backward()
  std::size_t forward_bytes_on_wire = 0;  ///< payload this rank sends in one forward
  std::size_t backward_bytes_on_wire = 0;

  std::string to_json() const;
};

/// One planned problem: forward and backward for any number of layers of these shapes and lengths.
///
/// Lifetime       keeps its group alive; independent of the handle that made it. Neither copied nor
///                moved: the pointer that plan() returns holds it, and a plan that exists works.
/// Thread-safety  one thread at a time for all plans of a group. Plans of different groups are
///                independent (MPI itself must then be initialised for more than one thread).
/// Memory         taken by plan() (forward) and by the first backward(). After that a call
///                allocates only what the exchange of one line of text per rank takes: a number of
///                small blocks that depends on the group's size and on nothing else.
class PlannedAttention {
 public:
  PlannedAttention(std::shared_ptr<ShardTransport> group, const CpConfig& config,
                   const KernelTable& kernels, const Problem& problem);
  ~PlannedAttention();

  const Plan& plan() const;
  const GradientPlan& gradient_plan() const;  ///< made when first asked for
  Communicator& group() const;                ///< its control plane
  ShardTransport& transport() const;

  /// Collective; contracts in ring_attention.h and ring_gradient.h.
  void forward(const ForwardTensors& tensors, Stream stream = {});
  void backward(const BackwardTensors& tensors, Stream stream = {});
  /// Takes the backward's memory now, not in the first backward(): needed before one is captured.
  /// Collective.
  void prepare_backward();

  /// Makes `head_maxima` (ForwardTensors) "nothing observed", -inf, in the order of `stream`, which
  /// may be in capture. Not collective. InvalidArgument for another shape or a wrong place.
  void reset_head_maxima(const TensorView<float, 1>& head_maxima, Stream stream = {});

  /// This rank's rows of q, or of k and v, out of a whole tensor, and back (contracts in
  /// shard_rows.h): in the memory of the group's shards, in the order of `stream`. Not collective.
  /// The first call for a side takes a little memory, so it is refused in a capture.
  void shard_rows(ShardSide side, const AnyConstTensor& global, const AnyTensor& local,
                  Stream stream = {});
  void unshard_rows(ShardSide side, const AnyConstTensor& local, const AnyTensor& global,
                    Stream stream = {});

  /// Takes part in the other ranks' forward() or backward() only to refuse it: InvalidArgument on
  /// every rank (in capture, where nothing moves, on this one). For bindings, whose own arguments
  /// may be wrong before there are tensors to pass; `stream`: the call's, where it is known.
  void refuse_forward(std::string_view why, Stream stream = {});
  void refuse_backward(std::string_view why, Stream stream = {});

 private:
  struct State;
  RingGradient& gradient();
  const ShardRows& rows_of(ShardSide side, Stream stream);
  std::unique_ptr<State> state_;
};

/// A group of ranks and a configuration.
class ContextParallelAttention {
 public:
  /// `kernels`: nullptr is the best this machine has. Not collective; `config.threads` = 0 means 1
  /// here (the library does not look at the machine). Messages are cut by the group: a
  /// `config.max_message_bytes` other than the default and than the group's own is refused when a
  /// problem is planned, on transports that cut.
  ContextParallelAttention(std::shared_ptr<ShardTransport> group, const CpConfig& config,
                           const KernelTable* kernels = nullptr);

  /// Collective: all ranks must pass the same problem; InvalidArgument on all of them otherwise.
  std::unique_ptr<PlannedAttention> plan(const Problem& problem) const;

  /// Takes part in the other ranks' plan() only to refuse it: InvalidArgument on every rank.
  void refuse_plan(std::string_view why) const;

  /// Not collective, never throws for a problem that cannot run: says why instead.
  Explanation explain(const Problem& problem) const;

  const CpConfig& config() const { return config_; }
  const std::shared_ptr<ShardTransport>& group() const { return group_; }

 private:
  std::shared_ptr<ShardTransport> group_;
  CpConfig config_;
  const KernelTable* kernels_;
};

}  // namespace cpattn
