#include "tests/kernels/cuda/conformance.h"

#include <fstream>
#include <sstream>

#include "tests/kernels/cuda/host_test.h"

namespace cpattn::cuda {
namespace {

class Conformance : public HostTest {};

// After a change that is meant to change it: CP_CONFORMANCE in docs/gpu_testing.md writes it anew.
TEST_F(Conformance, TheHostGivesTheGoldenWords) {
  std::ifstream file("tests/goldens/cuda_conformance.txt");
  std::stringstream golden;
  golden << file.rdbuf();
  in_all_modes([&] {
    EXPECT_EQ(report_portable(&executor_) + report_sm90(&executor_, false), golden.str());
  });
}

}  // namespace
}  // namespace cpattn::cuda
