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
#include <string>
#include <string_view>

#include "cp/plan.h"
#include "launch/inputs.h"
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
      NamedValue<FaultKind>{FaultKind::rank_returns_early, "rank_returns_early"},
      NamedValue<FaultKind>{FaultKind::rank_never_answers, "rank_never_answers"}};
};

/// What the fault does, in one sentence.
std::string_view description_of(FaultKind kind);

/// The fault `name` asks for; none when it is empty. InvalidArgument lists the names.
std::optional<FaultKind> fault_from_option(const std::string& name);

/// Whether the fault can be planted in a lane of this size on this input, and if not, what it
/// needs: empty, or "needs a causal mask".
std::string_view what_fault_needs(FaultKind kind, const LaneConfig& lane, std::int64_t cp,
                                  const InputInfo& input);

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
  /// bit_flip, nan_row, lse_base2; out [rows, Hq, Dv], lse [rows, Hq] of this rank.
  void plant_in_results(const Plan& plan, const AnyTensor& out, const TensorView<float, 2>& lse);
  /// rank_returns_early, rank_never_answers: what the last rank uses in place of `comm` (other
  /// ranks and faults get `comm` itself). At its first message of the ring it ends the process,
  /// with exit code 0 and without a word, or sleeps for ever.
  Communicator& plant(Communicator& comm);

 private:
  bool is(FaultKind kind) const { return kind_ == kind; }

  std::optional<FaultKind> kind_;
  std::int64_t sites_ = 0;
  std::unique_ptr<Communicator> leaving_;
};

}  // namespace cpattn
