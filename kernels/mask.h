// The one visibility rule: which keys of a block a query row sees. Every backend evaluates exactly
// this.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "src/base/enum_names.h"

namespace cpattn {

/// full: every key of the document. causal: bottom-right aligned, query i of q_tokens sees keys
/// j <= i + (kv_tokens - q_tokens) of its document.
enum class MaskKind { full, causal };

template <>
struct EnumNames<MaskKind> {
  static constexpr std::array kValues{NamedValue<MaskKind>{MaskKind::full, "full"},
                                      NamedValue<MaskKind>{MaskKind::causal, "causal"}};
};

/// The mask of one block (a run of query rows x one kv chunk): row i sees the keys [0,
/// visible_keys(i)) of the chunk. A prefix, because causal visibility is monotone in the key
/// position.
struct BlockMask {
  MaskKind kind = MaskKind::full;
  std::int64_t first_row_limit =
      0;  ///< causal: keys that row 0 sees, not yet clamped; row i sees first_row_limit + i

  constexpr std::int64_t visible_keys(std::int64_t row, std::int64_t num_keys) const {
    if (kind == MaskKind::full) return num_keys;
    return std::clamp<std::int64_t>(first_row_limit + row, 0, num_keys);
  }
};

}  // namespace cpattn
