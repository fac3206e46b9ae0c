// What the two kernels of backward_sm80.h share.
//
// A thread block *owns* up to 128 rows (of q and dout, or of k and v), which stay in shared memory,
// and a warp 16 of them, for which it accumulates. The *others* (k and v, or q and dout) pass by in
// *slices* of a few rows through two stages: while one is multiplied, cp.async fills the next. Own
// rows times a slice's rows are the two products S and dP (or their transposes), as accumulators;
// what is made of them, rounded, lies in registers as the next products want it. So warps share
// nothing but what they read. Source: FlashAttention-2 (Dao 2023), algorithm 2.
#pragma once

#include "kernels/cuda/gradient_strips.h"
#include "kernels/cuda/squares.h"

namespace cpattn::cuda::sm80_gradient {

/// Faults that tests plant; production has none.
enum class Fault {
  none,
  no_barrier_after_wait,
  no_barrier_before_refill,
  no_wait,
  sums_not_reset,
  delta_ignored,
  hidden_specials_multiplied,
};

/// Head sizes of up to 64 kPanels channels. Chosen so that registers do not spill and shared memory
/// stays within 99 KiB, the least that any of the architectures has. Bits do not depend on it.
template <class T_, int kPanels_, Fault kFault_ = Fault::none>
struct Config {
  using T = T_;
  static constexpr int kPanels = kPanels_;
  static constexpr Fault kFault = kFault_;
  static constexpr int kWarps = kPanels <= 2 ? 8 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kOwnRows = kStripRows * kWarps;
  static constexpr int kSliceRows = kPanels <= 2 ? 32 : 16;
  static constexpr int kSteps = kSliceRows / 16;  ///< products of 16 rows in a slice
  static constexpr std::uint32_t kSlicePanelBytes = kSliceRows * kRowBytes;
};

template <class T, int kPanels>
using SoundConfig = Config<T, kPanels>;

/// Scores of a strip of 16 own rows: as accumulators, row 8 n + 2 t of the slice and the next one.
template <class C>
using Scores = float[2 * C::kSteps][4];
/// The same rounded, as left operands of products over the slice's rows.
template <class C>
using Weights = std::uint32_t[C::kSteps][4];
/// Sums of a strip.
template <class C>
using Sums = float[8 * C::kPanels][4];

/// Bytes of shared memory: own panels, two stages of slices, and two of their lse and delta.
template <class C>
CP_SHARED_BY_HOST constexpr std::uint32_t own_bytes(const BackwardParams& params) {
  return static_cast<std::uint32_t>(params.num_panels()) * C::kOwnRows * kRowBytes;
}
template <class C>
CP_SHARED_BY_HOST constexpr std::uint32_t stage_bytes(const BackwardParams& params) {
  return static_cast<std::uint32_t>(params.num_panels()) * C::kSlicePanelBytes;
}
template <class C>
inline constexpr std::uint32_t kScalarBytes = 2 * C::kSliceRows * 4;
template <class C>
CP_SHARED_BY_HOST constexpr std::uint32_t shared_bytes(const BackwardParams& params) {
  return own_bytes<C>(params) + 2 * stage_bytes<C>(params) + 2 * kScalarBytes<C>;
}

/// Where in shared memory things are.
template <class C>
struct Layout {
  std::byte* memory;
  ptx::SharedAddress own;
  std::uint32_t stages, scalars;  ///< offsets
  std::uint32_t stage_size;

  CP_DEVICE Layout(const BackwardParams& params, std::byte* memory_)
      : memory(memory_),
        own(ptx::shared_address(memory_)),
        stages(own_bytes<C>(params)),
        scalars(stages + 2 * stage_bytes<C>(params)),
        stage_size(stage_bytes<C>(params)) {}

  CP_DEVICE ptx::SharedAddress slice(int stage) const {
    return own + stages + static_cast<std::uint32_t>(stage) * stage_size;
  }
  CP_DEVICE std::uint32_t scalars_of(int stage) const {
    return scalars + static_cast<std::uint32_t>(stage) * kScalarBytes<C>;
  }
};

CP_DEVICE int warp_index() { return static_cast<int>(threadIdx.x) / 32; }

/// Starts the copy of the first tiles of a head, as many as are owned at a time: `tile_bytes`
/// apart, of which `panels` panels are wanted.
template <class C>
CP_DEVICE void load_own(const std::byte* from, std::int64_t tile_bytes, int num_rows, int panels,
                        ptx::SharedAddress to) {
  const int pieces = panels * (kPanelBytes / 16);
  for (int tile = 0; tile < C::kOwnRows / kTileRows && tile * kTileRows < num_rows; ++tile) {
    for (int i = static_cast<int>(threadIdx.x); i < pieces; i += C::kThreads) {
      ptx::copy_async16(to + static_cast<std::uint32_t>((tile * pieces + i) * 16),
                        from + tile * tile_bytes + i * 16, true);
    }
  }
}

/// Starts the copy of a slice's panels; `from` is its first row in the first panel of its tile.
template <class C>
CP_DEVICE void load_slice(const std::byte* from, int panels, ptx::SharedAddress to) {
  constexpr int kPieces = C::kSlicePanelBytes / 16;
  for (int i = static_cast<int>(threadIdx.x); i < panels * kPieces; i += C::kThreads) {
    ptx::copy_async16(to + static_cast<std::uint32_t>(i) * 16,
                      from + i / kPieces * kPanelBytes + i % kPieces * 16, true);
  }
}

/// Slices 0 to count - 1: start(i, stage) starts the copies of one, multiply(i, stage) reads them.
/// Stages alternate over all runs of a kernel, so a run may begin while warps still multiply the
/// last slice of the one before. Called by all threads of the block.
template <class C, class Start, class Multiply>
CP_DEVICE void run_slices(int count, int& stage, const Start& start, const Multiply& multiply) {
  if (count > 0) start(0, stage);
  ptx::commit_copies();
  for (int i = 0; i < count; ++i) {
    const auto start_next = [&] {
      if (i + 1 < count) start(i + 1, 1 - stage);
      ptx::commit_copies();
    };
    if (C::kFault != Fault::no_wait) ptx::wait_copies<0>();
    if (C::kFault == Fault::no_barrier_before_refill) start_next();
    if (C::kFault != Fault::no_barrier_after_wait) __syncthreads();
    if (C::kFault != Fault::no_barrier_before_refill) start_next();
    multiply(i, stage);
    stage = 1 - stage;
  }
}

/// x = own strip times the slice's rows, transposed, over the channels of `num_panels` panels.
template <class C>
CP_DEVICE void multiply_rows(ptx::SharedAddress own, ptx::SharedAddress slice, int num_panels,
                             Scores<C>& x) {
  const SquareLane own_lane(false), slice_lane(true);
  CP_UNROLL
  for (int n = 0; n < 2 * C::kSteps; ++n) {
    CP_UNROLL
    for (int i = 0; i < 4; ++i) x[n][i] = 0.0f;
  }
  CP_UNROLL_BY(1)
  for (int panel = 0; panel < num_panels; ++panel) {
    CP_UNROLL
    for (std::uint32_t step = 0; step < kPanelColumns / 16; ++step) {
      std::uint32_t a[4];
      ptx::load_matrices(a, own + own_lane(step));
      CP_UNROLL
      for (int pair = 0; pair < C::kSteps; ++pair) {
        std::uint32_t b[4];
        ptx::load_matrices(
            b, slice + static_cast<std::uint32_t>(pair) * 16 * kRowBytes + slice_lane(step));
        ptx::multiply(x[2 * pair], a, b[0], b[1], typename C::T{});
        ptx::multiply(x[2 * pair + 1], a, b[2], b[3], typename C::T{});
      }
    }
    own += kPanelBytes;
    slice += C::kSlicePanelBytes;
  }
}

template <class C>
CP_DEVICE void round_weights(const Scores<C>& x, Weights<C>& w) {
  CP_UNROLL
  for (int step = 0; step < C::kSteps; ++step) {
    CP_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float(&pair)[4] = x[2 * step + i / 2];
      w[step][i] = ptx::pack(pair[i % 2 * 2], pair[i % 2 * 2 + 1], typename C::T{});
    }
  }
}

/// sums += w times the slice's rows. `sees(row, k)`: whether row 0 to 15 of the strip sees row k of
/// the slice. kIsPartial: some do not, and 0 times NaN is not 0, so numbers that are not finite are
/// taken out of the product and make NaN of the sums of those rows that do see them.
template <class C, bool kIsPartial, class Sees>
CP_DEVICE void add_product(const Weights<C>& w, ptx::SharedAddress slice, int num_panels,
                           const Sees& sees, Sums<C>& sums) {
  using T = typename C::T;
  const SquareLane lane(false);
  CP_UNROLL
  for (int panel = 0; panel < C::kPanels; ++panel) {
    if (panel >= num_panels) break;
    CP_UNROLL
    for (int step = 0; step < C::kSteps; ++step) {
      CP_UNROLL
      for (std::uint32_t column = 0; column < kPanelColumns / 16; ++column) {
        std::uint32_t b[4];
        ptx::load_transposed(b, slice + static_cast<std::uint32_t>(panel) * C::kSlicePanelBytes +
                                    static_cast<std::uint32_t>(step) * 16 * kRowBytes +
                                    lane(column));
        float(&left)[4] = sums[8 * panel + 2 * static_cast<int>(column)];
        float(&right)[4] = sums[8 * panel + 2 * static_cast<int>(column) + 1];
        if (kIsPartial) {
          take_specials_out<T>([&](int row, int k) { return sees(row, 16 * step + k); }, b, left,
                               right);
        }
        ptx::multiply(left, w[step], b[0], b[1], T{});
        ptx::multiply(right, w[step], b[2], b[3], T{});
      }
    }
  }
}

template <class C, class Sees>
CP_DEVICE void add_product(const Weights<C>& w, ptx::SharedAddress slice, int num_panels,
                           bool is_partial, const Sees& sees, Sums<C>& sums) {
  if (is_partial && C::kFault != Fault::hidden_specials_multiplied) {
    add_product<C, true>(w, slice, num_panels, sees, sums);
  } else {
    add_product<C, false>(w, slice, num_panels, sees, sums);
  }
}

}  // namespace cpattn::cuda::sm80_gradient
