// Negative controls: faults planted on purpose, so that everyone can see the comparison fail.
//
// A fault is data: it changes the problem, the schedule, the loaded tensors or the results of a
// lane, in launch only. The kernels and the ring know nothing of it, and the single-rank result
// that lanes are compared with is never touched.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "cp/gradient_plan.h"
#include "cp/plan.h"
#include "launch/inputs.h"
#include "launch/lane_result.h"
#include "launch/run_config.h"
#include "src/base/enum_names.h"
#include "src/base/tensor_view.h"
#include "src/comm/communicator.h"

namespace cpattn {

enum class FaultKind {
  scale_doubled,
  causal_off_by_one,
  hop_dropped,
  hop_merged_twice,
  lse_base2,
  zigzag_wrong_half,
  kv_head_map_wrong,
  bit_flip,
  nan_row,
  cu_seqlens_off_by_one,
  dk_chunk_zeroed,
  dkv_piece_dropped,
  dkv_piece_added_twice,
  delta_from_partial_out,
  gradients_rounded_per_hop,
  dq_head_group_wrong,
  rank_returns_early,
  rank_never_answers,
};

template <>
struct EnumNames<FaultKind> {
  static constexpr std::array kValues{
      NamedValue<FaultKind>{FaultKind::scale_doubled, "scale_doubled"},
      NamedValue<FaultKind>{FaultKind::causal_off_by_one, "causal_off_by_one"},
      NamedValue<FaultKind>{FaultKind::hop_dropped, "hop_dropped"},
      NamedValue<FaultKind>{FaultKind::hop_merged_twice, "hop_merged_twice"},
      NamedValue<FaultKind>{FaultKind::lse_base2, "lse_base2"},
      NamedValue<FaultKind>{FaultKind::zigzag_wrong_half, "zigzag_wrong_half"},
      NamedValue<FaultKind>{FaultKind::kv_head_map_wrong, "kv_head_map_wrong"},
      NamedValue<FaultKind>{FaultKind::bit_flip, "bit_flip"},
      NamedValue<FaultKind>{FaultKind::nan_row, "nan_row"},
      NamedValue<FaultKind>{FaultKind::cu_seqlens_off_by_one, "cu_seqlens_off_by_one"},
      NamedValue<FaultKind>{FaultKind::dk_chunk_zeroed, "dk_chunk_zeroed"},
      NamedValue<FaultKind>{FaultKind::dkv_piece_dropped, "dkv_piece_dropped"},
      NamedValue<FaultKind>{FaultKind::dkv_piece_added_twice, "dkv_piece_added_twice"},
      NamedValue<FaultKind>{FaultKind::delta_from_partial_out, "delta_from_partial_out"},
      NamedValue<FaultKind>{FaultKind::gradients_rounded_per_hop, "gradients_rounded_per_hop"},
      NamedValue<FaultKind>{FaultKind::dq_head_group_wrong, "dq_head_group_wrong"},
      NamedValue<FaultKind>{FaultKind::rank_returns_early, "rank_returns_early"},
      NamedValue<FaultKind>{FaultKind::rank_never_answers, "rank_never_answers"}};
};

/// What the fault does, in one sentence.
std::string_view description_of(FaultKind kind);

/// The fault `name` asks for; none when it is empty. InvalidArgument lists the names.
std::optional<FaultKind> fault_from_option(const std::string& name);

/// A lane at one size, on one input.
struct FaultSite {
  LaneConfig lane;
  Direction direction = Direction::both;
  std::int64_t cp = 1;
  const InputInfo& input;
};

/// Whether the fault can be planted there, and if not, what it needs: empty, or "needs a causal
/// mask".
std::string_view what_fault_needs(FaultKind kind, const FaultSite& site);

/// Plants one fault into one rank's lane. Without a fault, and for the stages a fault does not
/// concern, every call leaves its arguments alone.
class Fault {
 public:
  Fault() = default;
  explicit Fault(std::optional<FaultKind> kind) : kind_(kind) {}

  /// Places changed so far on this rank.
  std::int64_t sites() const { return sites_; }

  /// scale_doubled, cu_seqlens_off_by_one; before the plan is made, the same on every rank.
  void plant(Problem& problem);
  /// causal_off_by_one, hop_dropped, hop_merged_twice, zigzag_wrong_half.
  void plant(Plan& plan);
  /// kv_head_map_wrong: rotates the kv heads of a loaded tensor [rows, Hkv, dim].
  void plant_in_kv(const AnyTensor& tensor);
  /// dkv_piece_dropped, dkv_piece_added_twice.
  void plant(GradientPlan& plan);
  /// delta_from_partial_out: whether the backward gets an out that only the rank's own keys went
  /// into; and what makes a forward of such keys.
  bool believes_partial_out() const { return is(FaultKind::delta_from_partial_out); }
  void blind_all_hops(Plan& plan);
  /// bit_flip, nan_row, lse_base2, dk_chunk_zeroed, dq_head_group_wrong; the results of this rank.
  void plant_in_results(const Plan& plan, std::span<const ResultTensor> results);
  /// rank_returns_early, rank_never_answers: what the last rank uses in place of `comm`. At its
  /// first message of the ring it ends the process, with exit code 0 and without a word, or sleeps
  /// for ever. gradients_rounded_per_hop: what every rank uses; it rounds pieces of dk and dv to
  /// bf16 as they leave. Other ranks and faults get `comm` itself.
  Communicator& plant(Communicator& comm);

 private:
  bool is(FaultKind kind) const { return kind_ == kind; }

  std::optional<FaultKind> kind_;
  std::int64_t sites_ = 0;
  std::unique_ptr<Communicator> replaced_;
};

}  // namespace cpattn
