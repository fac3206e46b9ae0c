// What every InputSource shares: the extent of a tensor and the check of a read request.
#pragma once

#include <array>
#include <cstdint>

#include "launch/inputs.h"

namespace cpattn::detail {

/// [rows, heads, dim] of a tensor.
std::array<std::int64_t, 3> extent_of(const InputInfo& info, TensorRole role);

/// InvalidArgument unless dst [n, heads, dim] fits the tensor and its rows [row_begin, row_begin +
/// n) exist.
void check_read(const InputInfo& info, TensorRole role, std::int64_t row_begin,
                const AnyTensor& dst);

}  // namespace cpattn::detail
