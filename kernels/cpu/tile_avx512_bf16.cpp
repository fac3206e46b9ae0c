// The tile kernels compiled for AVX-512 with the bf16 dot instruction.
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
namespace avx512_bf16 {
#include "kernels/cpu/simd-inl.h"
// simd-inl.h first: the others are written in its vectors.
#include "kernels/cpu/block-inl.h"
#include "kernels/cpu/pack-inl.h"
#include "kernels/cpu/widen-inl.h"
// tile-inl.h last: it uses all of them.
#include "kernels/cpu/tile-inl.h"
}  // namespace avx512_bf16

const TileKernels& avx512_bf16_tile_kernels() {
  static constexpr TileKernels kKernels{avx512_bf16::pack, avx512_bf16::run_tile,
                                        avx512_bf16::widen, avx512_bf16::burn, true};
  return kKernels;
}

}  // namespace cpattn::cpu
