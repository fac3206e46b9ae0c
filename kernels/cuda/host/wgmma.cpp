#include "kernels/cuda/host/wgmma.h"

#include "kernels/cuda/host/block.h"
#include "kernels/cuda/host/sanitizers.h"
#include "kernels/cuda/host/warp.h"

namespace cpattn::cuda_host {
namespace {

constexpr unsigned kM = 64, kK = 16, kMaxN = 256;

/// A matrix descriptor taken apart.
struct Operand {
  SharedAddress start;
  std::uint32_t leading_bytes;
  std::uint32_t stride_bytes;
  Swizzle swizzle;
  bool is_transposed;
};

Operand decode(std::uint64_t descriptor, bool is_transposed) {
  const auto field = [&](int shift) {
    return static_cast<std::uint32_t>(descriptor >> shift & 0x3fffu) << 4;
  };
  Operand operand{field(0), field(16), field(32), Swizzle::none, is_transposed};
  switch (descriptor >> 62) {
    case 1:
      operand.swizzle = Swizzle::bytes128;
      break;
    case 2:
      operand.swizzle = Swizzle::bytes64;
      break;
    case 3:
      operand.swizzle = Swizzle::bytes32;
      break;
    default:
      fail("wgmma: a descriptor without swizzle is not executed here");
  }
  if ((descriptor >> 49 & 7u) != 0) fail("wgmma: a base offset is not executed here");
  return operand;
}

/// Address of element (outer, k), outer being m or n. Rows are as wide as the swizzle; eight of
/// them are a pattern.
/// [outer][k]: rows of k; patterns `stride` apart along outer. One row holds all of k.
/// [k][outer]: rows of outer; `leading` apart along outer, patterns `stride` apart along k.
SharedAddress address_of(const Operand& it, unsigned outer, unsigned k) {
  const unsigned width = width_bytes(it.swizzle), per_row = width / 2;
  const SharedAddress plain =
      it.is_transposed ? it.start + outer / per_row * it.leading_bytes + k / 8 * it.stride_bytes +
                             k % 8 * width + outer % per_row * 2
                       : it.start + outer / 8 * it.stride_bytes + outer % 8 * width + k * 2;
  return swizzled(plain, it.swizzle);
}

/// visit(outer, k, address) for all 16-bit elements.
template <class Visit>
void for_each_element(const Operand& operand, unsigned num_outer, const Visit& visit) {
  for (unsigned outer = 0; outer < num_outer; ++outer) {
    for (unsigned k = 0; k < kK; ++k) visit(outer, k, address_of(operand, outer, k));
  }
}

float number(DType dtype, std::uint32_t bits) {
  const auto half = static_cast<std::uint16_t>(bits);
  return dtype == DType::bf16 ? to_float(bf16{half}) : to_float(f16{half});
}

float load(DType dtype, SharedAddress at) {
  std::uint16_t bits;
  __builtin_memcpy(&bits, shared_place(at, 2, 2), 2);
  return number(dtype, bits);
}

unsigned row_of(unsigned thread, unsigned element) {
  return thread / 32 * 16 + thread % 32 / 4 + 8 * (element / 2 % 2);
}
unsigned column_of(unsigned thread, unsigned element) {
  return element / 4 * 8 + thread % 4 * 2 + element % 2;
}

/// `at(t)` is the product as thread t of the warpgroup gives it.
template <class At>
void compute(const At& at) {
  const Product& any = at(0);
  static thread_local float a[kM][kK], b[kK][kMaxN], d[kM][kMaxN];
  if (any.is_a_in_registers) {
    for (unsigned t = 0; t < kWarpgroupThreads; ++t) {
      for (unsigned i = 0; i < 8; ++i) {
        const unsigned pair = i / 2, half = i % 2;
        a[row_of(t, 2 * (pair % 2))][t % 4 * 2 + half + 8 * (pair / 2)] =
            number(any.dtype, at(t).a[pair] >> 16 * half);
      }
    }
  } else {
    for_each_element(
        decode(any.a_descriptor, any.is_a_transposed), kM,
        [&](unsigned m, unsigned k, SharedAddress place) { a[m][k] = load(any.dtype, place); });
  }
  for_each_element(
      decode(any.b_descriptor, any.is_b_transposed), any.n,
      [&](unsigned n, unsigned k, SharedAddress place) { b[k][n] = load(any.dtype, place); });
  for (unsigned t = 0; t < kWarpgroupThreads; ++t) {
    for (unsigned e = 0; e < any.n / 2; ++e) {
      d[row_of(t, e)][column_of(t, e)] = any.accumulates ? at(t).d[e] : 0.0f;
    }
  }
  for (unsigned m = 0; m < kM; ++m) {
    for (unsigned k = 0; k < kK; ++k) {
      for (unsigned n = 0; n < any.n; ++n) d[m][n] += a[m][k] * b[k][n];
    }
  }
  for (unsigned t = 0; t < kWarpgroupThreads; ++t) {
    for (unsigned e = 0; e < any.n / 2; ++e) at(t).d[e] = d[row_of(t, e)][column_of(t, e)];
  }
}

struct WaitOperand {
  const DeviceThread* thread;
  unsigned num_newest;
};

bool is_same_instruction(const Product& x, const Product& y) {
  return x.dtype == y.dtype && x.n == y.n && x.is_a_in_registers == y.is_a_in_registers &&
         x.is_a_transposed == y.is_a_transposed && x.is_b_transposed == y.is_b_transposed &&
         x.accumulates == y.accumulates && x.a_descriptor == y.a_descriptor &&
         x.b_descriptor == y.b_descriptor && x.group == y.group;
}

const Product& given(void* const* operand, unsigned thread) {
  return *static_cast<const Product*>(operand[thread]);
}

void perform_start(void* const* operand) {
  for (unsigned t = 1; t < kWarpgroupThreads; ++t) {
    if (!is_same_instruction(given(operand, t), given(operand, 0))) {
      fail("wgmma: threads of the warpgroup disagree on descriptors or flags");
    }
  }
  if (current_thread->block->options().landing == Landing::early) {
    compute([&](unsigned t) -> const Product& { return given(operand, t); });
  }
}

/// The products that a wait for all groups but the newest num_newest is about come first.
std::size_t num_awaited(const DeviceThread& thread, unsigned num_newest) {
  std::size_t count = 0;
  while (count < thread.products.size() &&
         thread.products[count].group + num_newest < thread.product_group) {
    ++count;
  }
  return count;
}

void perform_wait(void* const* operand) {
  const Block& block = *current_thread->block;
  if (block.options().landing == Landing::early) return;
  const auto thread = [&](unsigned t) -> const DeviceThread& {
    return *static_cast<const WaitOperand*>(operand[t])->thread;
  };
  const std::size_t count =
      num_awaited(thread(0), static_cast<const WaitOperand*>(operand[0])->num_newest);
  for (std::size_t i = 0; i < count; ++i) {
    compute([&](unsigned t) -> const Product& { return thread(t).products[i]; });
  }
}

void perform_nothing(void* const*) {}

constexpr WarpgroupOperation kStart{"wgmma.mma_async", perform_start};
constexpr WarpgroupOperation kWait{"wgmma.wait_group", perform_wait};
constexpr WarpgroupOperation kSetRegisters{"setmaxnreg", perform_nothing};

/// To the thread sanitizer the first thread of the warpgroup reads the operands for all.
void announce(const Product& product) {
  const auto read = [](unsigned, unsigned, SharedAddress at) {
    announce_read(shared_place(at, 2, 2), 2);
  };
  if (!product.is_a_in_registers) {
    for_each_element(decode(product.a_descriptor, product.is_a_transposed), kM, read);
  }
  for_each_element(decode(product.b_descriptor, product.is_b_transposed), product.n, read);
}

}  // namespace

void fence_products() { current_thread->block->self().is_fenced = true; }

void start_product(const Product& product) {
  DeviceThread& me = current_thread->block->self();
  if (!me.is_fenced) fail("wgmma: no fence (wgmma.fence) before the first product of a group");
  if (is_checked_for_races() && me.number % kWarpgroupThreads == 0) announce(product);
  Product mine = product;
  mine.group = me.product_group;
  meet_warpgroup(kStart, &mine);
  // Each thread keeps its own list: what one fiber allocates, no other frees. Products that are
  // done already join it as well, so that a missing wait is found.
  me.products.push_back(mine);
}

void commit_products() {
  DeviceThread& me = current_thread->block->self();
  ++me.product_group;
  me.is_fenced = false;
}

void wait_products(unsigned num_newest) {
  DeviceThread& me = current_thread->block->self();
  WaitOperand operand{&me, num_newest};
  meet_warpgroup(kWait, &operand);
  me.products.erase(me.products.begin(),
                    me.products.begin() + static_cast<std::ptrdiff_t>(num_awaited(me, num_newest)));
}

void set_max_registers(unsigned count) {
  if (count < 24 || count > 256 || count % 8 != 0) {
    fail("setmaxnreg: ", count, "; expected a multiple of 8 from 24 to 256");
  }
  meet_warpgroup(kSetRegisters, nullptr);
}

void check_products_done(const DeviceThread& thread) {
  if (!thread.products.empty()) {
    fail("the thread exits with ", thread.products.size(), " products (wgmma) it never waited for");
  }
}

}  // namespace cpattn::cuda_host
