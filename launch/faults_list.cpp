// The faults there are: names, descriptions, what each needs.
#include <algorithm>

#include "launch/faults.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

constexpr std::string_view kNeedsGradients = "needs a direction with gradients";

std::string_view need_of_ring(const InputInfo& input, std::int64_t cp) {
  if (cp < 2) return "needs a cp size of 2 or more";
  std::int64_t keys = 0;
  for (const Document& document : input.batch.documents) keys += document.kv_tokens;
  return keys > 0 ? "" : "needs keys";
}

bool has_pairs(const InputInfo& input) {
  const auto& documents = input.batch.documents;
  return std::any_of(documents.begin(), documents.end(), [](const Document& document) {
    return document.q_tokens > 0 && document.kv_tokens > 0;
  });
}

}  // namespace

std::string_view description_of(FaultKind kind) {
  switch (kind) {
    case FaultKind::scale_doubled:
      return "the softmax scale is off by a factor of 2";
    case FaultKind::causal_off_by_one:
      return "the causal mask is off by one: a query does not see the last key it may see";
    case FaultKind::hop_dropped:
      return "the keys that arrive with one hop are not used";
    case FaultKind::hop_merged_twice:
      return "the keys that arrive with one hop are counted twice";
    case FaultKind::lse_base2:
      return "lse is a base-2 logarithm";
    case FaultKind::zigzag_wrong_half:
      return "the first half of a zigzag shard is read in place of the second";
    case FaultKind::kv_head_map_wrong:
      return "query heads read the neighbouring kv head";
    case FaultKind::bit_flip:
      return "the lowest bit of one output element is flipped";
    case FaultKind::nan_row:
      return "one row of out is NaN";
    case FaultKind::cu_seqlens_off_by_one:
      return "a document border is off by one token";
    case FaultKind::dk_chunk_zeroed:
      return "dk of one chunk of keys is zero";
    case FaultKind::dkv_piece_dropped:
      return "a partial sum of dk and dv from another rank is not added";
    case FaultKind::dkv_piece_added_twice:
      return "a partial sum of dk and dv from another rank is added twice";
    case FaultKind::delta_from_partial_out:
      return "the backward takes delta from out as it was before the first hop";
    case FaultKind::gradients_rounded_per_hop:
      return "partial sums of dk and dv are rounded to bf16 on their way";
    case FaultKind::dq_head_group_wrong:
      return "query heads get dq of the neighbouring head group";
    case FaultKind::rank_returns_early:
      return "the last rank ends before the exchange, with exit code 0";
    case FaultKind::rank_never_answers:
      return "the last rank stops answering before the exchange";
  }
  return "?";
}

std::optional<FaultKind> fault_from_option(const std::string& name) {
  if (name.empty()) return std::nullopt;
  const std::optional<FaultKind> kind = from_name<FaultKind>(name);
  require(kind.has_value(), "inject: '", name, "' is no fault, expected ", choices<FaultKind>());
  return kind;
}

std::string_view what_fault_needs(FaultKind kind, const FaultSite& site) {
  const auto& [lane, direction, cp, input] = site;
  switch (kind) {
    case FaultKind::lse_base2:
    case FaultKind::bit_flip:
    case FaultKind::nan_row:
      if (direction == Direction::backward) return "needs a direction that compares out and lse";
      [[fallthrough]];
    case FaultKind::scale_doubled:
      return input.batch.q_rows > 0 ? "" : "needs query rows";
    case FaultKind::causal_off_by_one:
      return lane.mask == MaskKind::causal ? "" : "needs a causal mask";
    case FaultKind::hop_dropped:
    case FaultKind::hop_merged_twice:
      return need_of_ring(input, cp);
    case FaultKind::zigzag_wrong_half:
      if (lane.sharding != ShardingKind::zigzag) return "needs zigzag sharding";
      return need_of_ring(input, cp);
    case FaultKind::kv_head_map_wrong:
      return input.shape.num_kv_heads > 1 ? "" : "needs two kv heads or more";
    case FaultKind::cu_seqlens_off_by_one:
      return has_pairs(input) ? "" : "needs a document with queries and keys";
    case FaultKind::dk_chunk_zeroed:
      if (direction == Direction::forward) return kNeedsGradients;
      return has_pairs(input) ? "" : "needs a document with queries and keys";
    case FaultKind::dq_head_group_wrong:
      if (direction == Direction::forward) return kNeedsGradients;
      return input.shape.num_kv_heads > 1 ? "" : "needs two kv heads or more";
    case FaultKind::dkv_piece_dropped:
    case FaultKind::dkv_piece_added_twice:
    case FaultKind::delta_from_partial_out:
    case FaultKind::gradients_rounded_per_hop:
      if (direction == Direction::forward) return kNeedsGradients;
      return need_of_ring(input, cp);
    case FaultKind::rank_returns_early:
    case FaultKind::rank_never_answers:
      return cp >= 2 ? "" : "needs a cp size of 2 or more";
  }
  return "?";
}

}  // namespace cpattn
