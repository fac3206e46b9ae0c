// The tile kernels compiled for AVX-512 (F, BW, VL, DQ).
#include <immintrin.h>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "kernels/cpu/gradient_kernels.h"
#include "kernels/cpu/tile_kernels.h"
#include "kernels/lse.h"

#define CP_LANES 16
#define CP_REGISTER_ROWS 8
#define CP_VECTOR_REGISTER "v"

namespace cpattn::cpu {
namespace avx512 {
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
}  // namespace avx512

const TileKernels& avx512_tile_kernels() {
  static constexpr TileKernels kKernels{
      avx512::pack, avx512::pair_keys,        avx512::run_tile, avx512::widen, avx512::burn,
      false,        &avx512::kGradientKernels};
  return kKernels;
}

}  // namespace cpattn::cpu
