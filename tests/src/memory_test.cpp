#include "src/device/memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

#include "src/base/error.h"
#include "src/device/cuda_driver.h"
#include "src/device/device.h"

namespace cpattn {
namespace {

std::uintptr_t address_of(const Buffer& buffer) {
  return reinterpret_cast<std::uintptr_t>(buffer.data());
}

TEST(Memory, BuffersAreZeroAndAligned) {
  for (const std::size_t size : {1, 63, 64, 65, 4096, 100001}) {
    const Buffer buffer(size);
    EXPECT_EQ(buffer.size_bytes(), size);
    EXPECT_EQ(buffer.bytes().size(), size);
    EXPECT_EQ(address_of(buffer) % 64, 0u) << size;
    EXPECT_TRUE(std::all_of(buffer.bytes().begin(), buffer.bytes().end(),
                            [](std::byte value) { return value == std::byte{0}; }));
  }
}

TEST(Memory, BigBuffersAreAlignedToHugePages) {
  const Buffer buffer((std::size_t{4} << 20) + 1);
  EXPECT_EQ(address_of(buffer) % (std::size_t{2} << 20), 0u);
  EXPECT_EQ(buffer.bytes().back(), std::byte{0});
}

TEST(Memory, EmptyBuffersOwnNothing) {
  EXPECT_EQ(Buffer().data(), nullptr);
  EXPECT_EQ(Buffer(0).data(), nullptr);
  EXPECT_TRUE(Buffer(0).bytes().empty());
}

TEST(Memory, MovingKeepsTheBytesWhereTheyAre) {
  Buffer first(64);
  first.as<float>()[3] = 1.5f;
  const float* place = first.as<float>();

  const Buffer second = std::move(first);

  EXPECT_EQ(second.as<float>(), place);
  EXPECT_EQ(second.as<float>()[3], 1.5f);
}

// Device memory is known to a process that has the driver (tests/cp/c_api_cuda_test.c); to others,
// all memory is the host's.
TEST(Memory, WithoutADriverAllMemoryIsTheHosts) {
  const Buffer buffer(64);
  EXPECT_EQ(gpu_of_address(buffer.data()), -1);
  EXPECT_EQ(CpuDevice().problem_with(buffer.data()), "");
}

TEST(Memory, RefusesSizesThatDoNotExist) {
  EXPECT_THROW(Buffer(std::numeric_limits<std::size_t>::max()), InvalidArgument);
}

}  // namespace
}  // namespace cpattn
