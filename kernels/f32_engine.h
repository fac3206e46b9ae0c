// The arithmetic that f32 kernels of every backend have, bit for bit: its name and the lengths that
// decide the order of sums. docs/numerics.md writes it down.
#pragma once

#include <cstdint>
#include <string_view>

namespace cpattn {

/// KernelTable::numerics of all that computes so.
inline constexpr std::string_view kF32Numerics = "f32-fma/tile128/exp2-5";

/// Keys between two rescales of the running state, and of one sum of dq.
inline constexpr std::int64_t kKeyTile = 128;

/// Query rows, counted from the first of the chunk, of one sum of dk and dv.
inline constexpr std::int64_t kQueryTile = 48;

}  // namespace cpattn
