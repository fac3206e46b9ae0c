#include "src/comm/self_comm.h"

#include "tests/src/communicator_contract.h"

namespace cpattn {
namespace {

CommWorld self_world() {
  const auto run = [](const RankBody& body) {
    SelfCommunicator comm;
    body(comm);
  };
  return {.name = "self", .size = 1, .run = run, .run_broken = run};
}

const auto kWorlds = testing::Values(self_world());
INSTANTIATE_TEST_SUITE_P(Self, CommunicatorContract, kWorlds, world_name);
INSTANTIATE_TEST_SUITE_P(Self, BC_079, kWorlds, world_name);

}  // namespace
}  // namespace cpattn
