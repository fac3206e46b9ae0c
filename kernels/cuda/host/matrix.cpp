#include "kernels/cuda/host/matrix.h"

#include "kernels/cuda/host/block.h"

namespace cpattn::cuda_host {
namespace {

struct MatrixOperand {
  const Bytes16* row;
  SharedAddress address;
  unsigned count;
  std::uint32_t* registers;
};

std::uint32_t element(const Lanes& lanes, unsigned matrix, unsigned row, unsigned column) {
  const Bytes16& bytes = *lanes.of<MatrixOperand>(8 * matrix + row).row;
  return bytes.word[column / 2] >> 16 * (column % 2) & 0xffffu;
}

/// Eight rows of 16 bytes come in one pass if no two different ones share their four banks.
void count_conflicts(const Lanes& lanes, unsigned matrix, Counters& counters) {
  unsigned most = 1;
  for (unsigned r = 0; r < 8; ++r) {
    const SharedAddress mine = lanes.of<MatrixOperand>(8 * matrix + r).address;
    unsigned sharers = 1;
    for (unsigned other = 0; other < r; ++other) {
      const SharedAddress it = lanes.of<MatrixOperand>(8 * matrix + other).address;
      if (it != mine && it / 16 % 8 == mine / 16 % 8) ++sharers;
    }
    most = sharers > most ? sharers : most;
  }
  ++counters.ldmatrix_phases;
  counters.ldmatrix_conflicts += most - 1;
}

template <bool IsTransposed>
void perform_distribution(const Lanes& lanes) {
  const unsigned count = lanes.of<MatrixOperand>(0).count;
  for (unsigned matrix = 0; matrix < count; ++matrix) {
    count_conflicts(lanes, matrix, current_thread->block->counters());
    for (unsigned lane = 0; lane < kWarpLanes; ++lane) {
      const unsigned major = lane / 4, minor = 2 * (lane % 4);
      const std::uint32_t low = IsTransposed ? element(lanes, matrix, minor, major)
                                             : element(lanes, matrix, major, minor);
      const std::uint32_t high = IsTransposed ? element(lanes, matrix, minor + 1, major)
                                              : element(lanes, matrix, major, minor + 1);
      lanes.of<MatrixOperand>(lane).registers[matrix] = low | high << 16;
    }
  }
}

constexpr WarpOperation kLoads[3][2] = {
    {{"ldmatrix.x1", perform_distribution<false>, true},
     {"ldmatrix.x1.trans", perform_distribution<true>, true}},
    {{"ldmatrix.x2", perform_distribution<false>, true},
     {"ldmatrix.x2.trans", perform_distribution<true>, true}},
    {{"ldmatrix.x4", perform_distribution<false>, true},
     {"ldmatrix.x4.trans", perform_distribution<true>, true}},
};

struct ProductOperand {
  float* d;
  const std::uint32_t* a;
  const std::uint32_t* b;
};

template <class T>
void perform_product(const Lanes& lanes) {
  float a[16][16], b[16][8], d[16][8];
  for (unsigned lane = 0; lane < kWarpLanes; ++lane) {
    const auto& it = lanes.of<ProductOperand>(lane);
    const unsigned g = lane / 4, t = lane % 4;
    for (unsigned half = 0; half < 2; ++half) {
      const auto number = [&](std::uint32_t pair) {
        return to_float(T{static_cast<std::uint16_t>(pair >> 16 * half)});
      };
      for (unsigned i = 0; i < 4; ++i) {
        a[g + 8 * (i % 2)][2 * t + half + 8 * (i / 2)] = number(it.a[i]);
        d[g + 8 * (i / 2)][2 * t + i % 2] = it.d[i];
      }
      for (unsigned i = 0; i < 2; ++i) b[2 * t + half + 8 * i][g] = number(it.b[i]);
    }
  }
  for (unsigned i = 0; i < 16; ++i) {
    for (unsigned k = 0; k < 16; ++k) {
      for (unsigned j = 0; j < 8; ++j) d[i][j] += a[i][k] * b[k][j];
    }
  }
  for (unsigned lane = 0; lane < kWarpLanes; ++lane) {
    float* out = lanes.of<ProductOperand>(lane).d;
    for (unsigned i = 0; i < 4; ++i) out[i] = d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
  }
}

constexpr WarpOperation kProductBf16{"mma.m16n8k16.bf16", perform_product<bf16>, true};
constexpr WarpOperation kProductF16{"mma.m16n8k16.f16", perform_product<f16>, true};

}  // namespace

void distribute_matrices(const Bytes16& row, SharedAddress address, unsigned count,
                         bool is_transposed, std::uint32_t* registers) {
  MatrixOperand operand{&row, address, count, registers};
  meet_warp(kLoads[count / 2][is_transposed ? 1 : 0], kAllLanes, &operand);
}

void multiply_16x8x16(float* d, const std::uint32_t* a, const std::uint32_t* b, bf16) {
  ProductOperand operand{d, a, b};
  meet_warp(kProductBf16, kAllLanes, &operand);
}

void multiply_16x8x16(float* d, const std::uint32_t* a, const std::uint32_t* b, f16) {
  ProductOperand operand{d, a, b};
  meet_warp(kProductF16, kAllLanes, &operand);
}

}  // namespace cpattn::cuda_host
