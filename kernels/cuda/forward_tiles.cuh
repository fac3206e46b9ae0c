// How q, k and v of the portable forward lie in shared memory, and how they get there.
#pragma once

#include "kernels/cuda/forward_params.h"

namespace cpattn::cuda::sm80 {

/// Faults that tests plant; production has none.
enum class Fault {
  none,
  no_barrier_after_wait,
  wait_for_too_few,
  no_barrier_before_refill,
  limit_one_too_many,
  hidden_values_as_numbers,
};

inline constexpr int kWarps = 4;
inline constexpr int kThreads = 32 * kWarps;
inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr std::uint32_t kRowBytes = 2 * kPanelColumns;  ///< of a panel

/// Head sizes of up to 64 kPanels channels. Chosen so that registers do not spill and shared memory
/// stays within 99 KiB, the least that any of the architectures has. Bits do not depend on it.
template <class T_, int kPanels_, Fault kFault_ = Fault::none>
struct Config {
  using T = T_;
  static constexpr int kPanels = kPanels_;
  static constexpr Fault kFault = kFault_;
  static constexpr int kStrips = kPanels <= 2 ? 2 : 1;  ///< of a warp
  static constexpr int kTileRows = kStripRows * kStrips * kWarps;
  static constexpr int kSlots = kPanels == 1 ? 4 : kPanels == 2 ? 3 : 2;  ///< of the ring
};

/// Bytes of shared memory: q, then the ring.
template <class C>
CP_SHARED_BY_HOST constexpr std::uint32_t query_bytes(const KvForm& form) {
  return static_cast<std::uint32_t>(form.k_panels) * C::kTileRows * kRowBytes;
}
CP_SHARED_BY_HOST constexpr std::uint32_t slot_bytes(const KvForm& form) {
  return static_cast<std::uint32_t>(form.k_panels > form.v_panels ? form.k_panels : form.v_panels) *
         kPanelBytes;
}

/// Lane addresses for ldmatrix.x4 in a panel: the four matrices of a 16x16 square whose rows begin
/// at a multiple of 16, `columns_first` or rows first. Steps of 16 columns are an xor, since the
/// swizzle leaves bits 5 and 6 free of the row.
struct SquareLane {
  std::uint32_t row_bytes;
  std::uint32_t column_bits;

  CP_DEVICE explicit SquareLane(bool columns_first) {
    const std::uint32_t lane = ptx::thread() % 32;
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

/// The tile's rows of q, panel by panel, in shared memory; rows that do not exist are zero.
template <class C>
CP_DEVICE void load_queries(const ForwardParams& params, const ForwardItem& item, std::byte* to) {
  constexpr int kRowPieces = kPanelColumns / kPieceChannels;
  const int pieces = params.form.k_panels * C::kTileRows * kRowPieces;
  const std::int64_t first_row = item.program->row_begin + item.first_row;
  for (int i = static_cast<int>(threadIdx.x); i < pieces; i += kThreads) {
    const int row = i / kRowPieces % C::kTileRows, panel = i / kRowPieces / C::kTileRows;
    const int channel = i % kRowPieces * kPieceChannels;
    Piece piece{};
    if (row < item.num_rows && panel * kPanelColumns + channel < params.q.dim) {
      piece = scaled_query<typename C::T>(
          load_piece(params.q, first_row + row, item.head, panel * kPanelColumns + channel),
          params.scale);
    }
    const std::uint32_t plain =
        static_cast<std::uint32_t>(row) * kRowBytes + static_cast<std::uint32_t>(channel) * 2;
    *reinterpret_cast<Piece*>(to + panel * C::kTileRows * static_cast<int>(kRowBytes) +
                              swizzled(plain, Swizzle::bytes128)) = piece;
  }
}

/// The ring: halves of one block's tiles, keys and values in turn, on their way through shared
/// memory. One that multiplies reads at `here`.
template <class C>
struct Ring {
  const std::byte* source = nullptr;  ///< of the next half to be asked for
  int num_left = 0;                   ///< halves not asked for; even: keys are next
  ptx::SharedAddress to = 0;          ///< slot of the next half
  ptx::SharedAddress here = 0;        ///< slot of the half at hand

  /// `first_slot`: where the ring begins.
  CP_DEVICE Ring(const std::byte* block, int num_tiles, ptx::SharedAddress first_slot)
      : source(block), num_left(2 * num_tiles), to(first_slot), here(first_slot) {}

  CP_DEVICE static ptx::SharedAddress after(const ForwardParams& params, ptx::SharedAddress slot,
                                            ptx::SharedAddress first_slot) {
    const std::uint32_t size = slot_bytes(params.form);
    return slot + size == first_slot + C::kSlots * size ? first_slot : slot + size;
  }

  /// Asks for the next half, if there is one; a group of copies either way.
  CP_DEVICE void ask(const ForwardParams& params, ptx::SharedAddress first_slot) {
    if (num_left > 0) {
      const int panels = num_left % 2 == 0 ? params.form.k_panels : params.form.v_panels;
      const std::uint32_t offset = ptx::thread() * 16;
      CP_UNROLL_BY(1)
      for (int panel = 0; panel < panels; ++panel) {
        CP_UNROLL
        for (std::uint32_t at = 0; at < kPanelBytes; at += 16 * kThreads) {
          ptx::copy_async16(to + static_cast<std::uint32_t>(panel) * kPanelBytes + at + offset,
                            source + offset + at, true);
        }
        source += kPanelBytes;
      }
      --num_left;
      to = after(params, to, first_slot);
    }
    ptx::commit_copies();
  }

  /// The half at `here` is there for all threads, and the slot of the one before is free: it is
  /// filled again.
  CP_DEVICE void arrive(const ForwardParams& params, ptx::SharedAddress first_slot) {
    constexpr int kNewest = C::kSlots - 2;
    ptx::wait_copies<C::kFault == Fault::wait_for_too_few ? kNewest + 1 : kNewest>();
    if (C::kFault == Fault::no_barrier_before_refill) ask(params, first_slot);
    if (C::kFault != Fault::no_barrier_after_wait) __syncthreads();
    if (C::kFault != Fault::no_barrier_before_refill) ask(params, first_slot);
  }

  CP_DEVICE void leave(const ForwardParams& params, ptx::SharedAddress first_slot) {
    here = after(params, here, first_slot);
  }
};

}  // namespace cpattn::cuda::sm80
