// LaneResult: the tensors one lane computed, in global row order, with what its ranks say of it; in
// memory, and as the file in which rank 0 delivers it to the launcher.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cp/plan.h"
#include "launch/report.h"
#include "src/base/dtype.h"
#include "src/base/enum_names.h"
#include "src/base/tensor_view.h"
#include "src/device/memory.h"

namespace cpattn {

/// What a lane computes, in the order in which it is delivered and reported.
enum class ResultRole { out, lse, dq, dk, dv };

template <>
struct EnumNames<ResultRole> {
  static constexpr std::array kValues{
      NamedValue<ResultRole>{ResultRole::out, "out"},
      NamedValue<ResultRole>{ResultRole::lse, "lse"}, NamedValue<ResultRole>{ResultRole::dq, "dq"},
      NamedValue<ResultRole>{ResultRole::dk, "dk"}, NamedValue<ResultRole>{ResultRole::dv, "dv"}};
};

constexpr bool is_gradient(ResultRole role) {
  return role != ResultRole::out && role != ResultRole::lse;
}
/// Whether its rows are those of k and v; otherwise those of q.
constexpr bool has_key_rows(ResultRole role) {
  return role == ResultRole::dk || role == ResultRole::dv;
}

struct ResultTensor {
  ResultRole role = ResultRole::out;
  DType dtype = DType::f32;
  std::array<std::int64_t, 3> shape{};  ///< [rows, heads, dim]; lse has dim 1
  Buffer memory;

  AnyTensor view() const;
  std::size_t row_bytes() const;
  std::size_t bytes() const { return static_cast<std::size_t>(shape[0]) * row_bytes(); }
};

/// The results of a problem over so many rows, all of them NaN: out and lse, and with gradients,
/// which have the type of the inputs, dq, dk and dv.
std::vector<ResultTensor> make_result_tensors(const Problem& problem, bool has_gradients,
                                              std::int64_t q_rows, std::int64_t kv_rows);

struct LaneResult {
  std::vector<ResultTensor> tensors;  ///< rows nobody delivered are NaN
  Buffer q_deliveries;   ///< one byte per row: how often it was delivered (255: or more)
  Buffer kv_deliveries;  ///< the same for rows of k and v; all 0 without gradients
  std::int64_t q_rows = 0;
  std::int64_t kv_rows = 0;
  std::vector<RankReceipt> ranks;
  std::vector<std::string> problems;  ///< what went wrong while putting it together
  std::string transport;
  std::string guarantee;
  std::string isa;
  std::string numerics;
  std::int64_t threads = 0;

  /// nullptr when the lane did not compute it.
  const ResultTensor* find(ResultRole role) const;
  unsigned char* deliveries(bool of_keys) const {
    return (of_keys ? kv_deliveries : q_deliveries).as<unsigned char>();
  }
};

/// A result with its memory allocated and nothing delivered.
LaneResult make_lane_result(const Problem& problem, bool has_gradients);

void save_result(const std::string& path, const LaneResult& result);
/// Nothing when there is no such file; InternalError when it is not what save_result() wrote.
std::optional<LaneResult> load_result(const std::string& path);

/// Receipts as text and back, for a message or a file.
std::string to_text(const RankReceipt& receipt);
RankReceipt receipt_from_text(std::string_view text);

}  // namespace cpattn
