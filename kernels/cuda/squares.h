// 16x16 squares of panels as operands of tensor-core products, and what makes a product safe where
// not all rows see all of it.
#pragma once

#include "kernels/cuda/forward_params.h"

namespace cpattn::cuda {

inline constexpr unsigned kWholeWarp = 0xffffffffu;
inline constexpr std::uint32_t kRowBytes = 2 * kPanelColumns;  ///< of a panel

/// Lane addresses for ldmatrix.x4 in a panel: the four matrices of a 16x16 square whose rows begin
/// at a multiple of 16, `columns_first` or rows first. Steps of 16 columns are an xor, since the
/// swizzle leaves bits 5 and 6 free of the row.
struct SquareLane {
  std::uint32_t row_bytes;
  std::uint32_t column_bits;

  CP_DEVICE explicit SquareLane(bool columns_first) {
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t low = lane / 8 % 2, high = lane / 16;
    const std::uint32_t row = lane % 8 + 8 * (columns_first ? high : low);
    row_bytes = row * kRowBytes;
    column_bits = ((columns_first ? low : high) ^ lane % 8) << 4;
  }
  /// Byte of the lane's row of the square at column 16 `step` of the panel.
  CP_DEVICE std::uint32_t operator()(std::uint32_t step) const {
    return row_bytes + (column_bits ^ step << 5);
  }
};

/// The square of left operands that has a 1 where sees(row, k), else 0.
template <class T, class Sees>
CP_DEVICE void mark_visible(const Sees& sees, std::uint32_t (&a)[4]) {
  const StripLane lane;
  CP_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int row = lane.row + i % 2 * 8, k = lane.channel + i / 2 * 8;
    a[i] = ptx::pack(sees(row, k) ? 1.0f : 0.0f, sees(row, k + 1) ? 1.0f : 0.0f, T{});
  }
}

/// sums become NaN where a row sees a special number: `special` has ones there.
template <class T>
CP_DEVICE void add_specials(const std::uint32_t (&marks)[4], std::uint32_t special0,
                            std::uint32_t special1, float (&sums)[4]) {
  float seen[4] = {};
  ptx::multiply(seen, marks, special0, special1, T{});
  CP_UNROLL
  for (int i = 0; i < 4; ++i) sums[i] = seen[i] > 0.0f ? NAN : sums[i];
}

/// Sets numbers of the right operands b (of two products side by side) that are not finite to 0;
/// the sums of rows that see one become NaN. Called by whole warps.
template <class T, class Sees>
CP_DEVICE void take_specials_out(const Sees& sees, std::uint32_t (&b)[4], float (&left)[4],
                                 float (&right)[4]) {
  std::uint32_t special[4];
  CP_UNROLL
  for (int i = 0; i < 4; ++i) {
    special[i] = special_halves<T>(b[i]);
    b[i] &= ~special[i];
    special[i] &= kOnes<T>;
  }
  if (__any_sync(kWholeWarp, (special[0] | special[1] | special[2] | special[3]) != 0) == 0) return;
  std::uint32_t marks[4];
  mark_visible<T>(sees, marks);
  add_specials<T>(marks, special[0], special[1], left);
  add_specials<T>(marks, special[2], special[3], right);
}

}  // namespace cpattn::cuda
