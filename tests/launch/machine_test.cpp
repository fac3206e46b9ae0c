#include "launch/machine.h"

#include <gtest/gtest.h>

namespace cpattn {
namespace {

TEST(Machine, ThisMachineHasWhatAnyMachineHas) {
  const MachineFacts facts = examine_machine();

  EXPECT_GE(facts.usable_cores, 1);
  EXPECT_GE(facts.online_cores, facts.usable_cores);
  EXPECT_FALSE(facts.kernels.empty());
  EXPECT_GT(facts.memory_total, facts.memory_available);
  EXPECT_GT(facts.memory_available, 0u);
}

}  // namespace
}  // namespace cpattn
