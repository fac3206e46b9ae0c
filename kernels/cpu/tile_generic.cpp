// The tile kernels compiled for any machine: 4-lane vectors the compiler lowers to what it has
// (NEON on ARM).
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "kernels/cpu/gradient_kernels.h"
#include "kernels/cpu/tile_kernels.h"
#include "kernels/lse.h"

#define CP_LANES 4
#if defined(__ARM_NEON)
#define CP_REGISTER_ROWS 8  // 32 registers
#else
#define CP_REGISTER_ROWS 4
#endif
#if defined(__x86_64__)
#define CP_VECTOR_REGISTER "x"
#else
#define CP_VECTOR_REGISTER "w"
#endif

namespace cpattn::cpu {
namespace generic {
#include "kernels/cpu/simd-inl.h"
// simd-inl.h first: the others are written in its vectors.
#include "kernels/cpu/block-inl.h"
#include "kernels/cpu/pack-inl.h"
#include "kernels/cpu/widen-inl.h"
// tile-inl.h next: it uses all of them, and the backward uses it.
#include "kernels/cpu/tile-inl.h"
// The backward, products first.
#include "kernels/cpu/gradient_products-inl.h"
#include "kernels/cpu/gradient_slopes-inl.h"
#include "kernels/cpu/gradient_tile-inl.h"
// gradient_rows-inl.h last: it lists the backward's functions.
#include "kernels/cpu/gradient_rows-inl.h"
}  // namespace generic

const TileKernels& generic_tile_kernels() {
  static constexpr TileKernels kKernels{
      generic::pack, generic::pair_keys,        generic::run_tile, generic::widen, generic::burn,
      false,         &generic::kGradientKernels};
  return kKernels;
}

}  // namespace cpattn::cpu
