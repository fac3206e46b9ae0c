// The tile kernels compiled for AVX2 + FMA + F16C.
#include <immintrin.h>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "kernels/cpu/tile_kernels.h"
#include "kernels/lse.h"

#define CP_LANES 8
#define CP_REGISTER_ROWS 4
#define CP_VECTOR_REGISTER "x"

namespace cpattn::cpu {
namespace avx2 {
#include "kernels/cpu/simd-inl.h"
// simd-inl.h first: the others are written in its vectors.
#include "kernels/cpu/block-inl.h"
#include "kernels/cpu/pack-inl.h"
#include "kernels/cpu/widen-inl.h"
// tile-inl.h last: it uses all of them.
#include "kernels/cpu/tile-inl.h"
}  // namespace avx2

const TileKernels& avx2_tile_kernels() {
  static constexpr TileKernels kKernels{avx2::pack, avx2::run_tile, avx2::widen, avx2::burn, false};
  return kKernels;
}

}  // namespace cpattn::cpu
