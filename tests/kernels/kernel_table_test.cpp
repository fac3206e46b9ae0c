#include "kernels/kernel_table.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "src/base/error.h"

namespace cpattn {
namespace {

constexpr KernelProblem kProblem{.shape = {4, 2, 40, 24, 1.0}, .max_chunk_rows = 100};

TEST(KernelTable, SomethingAlwaysRunsAndTheBestIsTheDefault) {
  const auto tables = available_kernels();

  ASSERT_FALSE(tables.empty());
  EXPECT_EQ(&default_kernels(), tables.back());
  for (const KernelTable* table : tables) EXPECT_EQ(&find_kernels(table->isa), table);
}

TEST(KernelTable, NamesAreDistinctAndNumericsAreStated) {
  std::set<std::string_view> names;
  for (const KernelTable* table : available_kernels()) {
    EXPECT_TRUE(names.insert(table->name).second) << table->name;
    for (const auto& dtype : EnumNames<DType>::kValues)
      EXPECT_FALSE(table->numerics(dtype.value).empty()) << table->name;
  }
}

TEST(KernelTable, AMissingInstructionSetIsNamed) {
  std::set<Isa> present;
  for (const KernelTable* table : available_kernels()) present.insert(table->isa);
  int missing = 0;
  for (const auto& isa : EnumNames<Isa>::kValues) {
    if (present.contains(isa.value)) continue;
    ++missing;
    try {
      find_kernels(isa.value);
      ADD_FAILURE() << isa.name << " was found";
    } catch (const Unsupported& error) {
      EXPECT_NE(std::string(error.what()).find(isa.name), std::string::npos) << error.what();
    }
  }
  EXPECT_GT(missing, 0);  // no machine is both x86 and Arm
}

TEST(KernelTable, PackedSizesAreAlignedAndGrowWithTheKeys) {
  for (const KernelTable* table : available_kernels())
    for (const auto& dtype : EnumNames<DType>::kValues) {
      KernelProblem problem = kProblem;
      problem.dtype = dtype.value;
      const std::size_t element = size_of(dtype.value);
      for (const std::int64_t keys : {0, 1, 2, 7, 64, 513}) {
        const std::size_t bytes = table->packed_kv_bytes(problem, keys);
        EXPECT_EQ(bytes % 64, 0u);
        EXPECT_GE(bytes, static_cast<std::size_t>(2 * keys * (40 + 24)) * element);
        // Linear: nothing grows with the square of the keys, and padding ends at 64 keys.
        EXPECT_LE(bytes, static_cast<std::size_t>(2 * (keys + 64) * (64 + 64)) * element);
      }
    }
}

TEST(KernelTable, SizesBeyond32BitsAreExact) {
  KernelProblem problem = kProblem;
  problem.shape = {16, 16, 64, 64, 1.0};
  problem.max_chunk_rows = 1 << 21;
  constexpr std::int64_t kKeys = 2'097'153;
  for (const KernelTable* table : available_kernels()) {
    const std::size_t numbers = static_cast<std::size_t>(kKeys) * 16 * (64 + 64);
    EXPECT_GE(table->packed_kv_bytes(problem, kKeys), numbers * 4);
    EXPECT_LE(table->packed_kv_bytes(problem, kKeys), (numbers + 64 * 16 * (64 + 64)) * 4);
    EXPECT_GE(table->carried_slot_bytes(problem), (std::size_t{1} << 21) * 16 * 66 * 4);
  }
}

}  // namespace
}  // namespace cpattn
