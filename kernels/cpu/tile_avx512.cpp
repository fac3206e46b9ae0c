// The tile kernels compiled for AVX-512 (F, BW, VL, DQ).
#include <immintrin.h>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

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
// tile-inl.h last: it uses all of them.
#include "kernels/cpu/tile-inl.h"
}  // namespace avx512

const TileKernels& avx512_tile_kernels() {
  static constexpr TileKernels kKernels{avx512::pack, avx512::run_tile, avx512::widen, avx512::burn,
                                        false};
  return kKernels;
}

}  // namespace cpattn::cpu
