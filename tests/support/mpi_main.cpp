// main() of tests that run under mpirun: all ranks run the same tests, rank 0 prints everything and
// the others print their failures only. A test that failed on any rank ends the whole job with
// exit code 1 when that rank leaves it, because the others may wait for a rank that gave up.
#include <gtest/gtest.h>

#include <iostream>
#include <sstream>
#include <string>

#include "src/comm/mpi_comm.h"

namespace {

class RankListener : public testing::EmptyTestEventListener {
 public:
  explicit RankListener(int rank) : rank_(rank) {}

 private:
  void OnTestStart(const testing::TestInfo& test) override {
    test_name_ = std::string(test.test_suite_name()) + "." + test.name();
  }
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed() || rank_ == 0) return;  // rank 0 has the default printer
    std::ostringstream text;  // one write, so that ranks do not mix within a report
    text << "[rank " << rank_ << "] " << test_name_ << ": "
         << (result.file_name() != nullptr ? result.file_name() : "exception") << ":"
         << result.line_number() << "\n"
         << result.message() << "\n";
    std::cerr << text.str() << std::flush;
  }
  void OnTestEnd(const testing::TestInfo& test) override {
    if (!test.result()->Failed()) return;
    std::cout << std::flush;
    MPI_Abort(MPI_COMM_WORLD, 1);
  }

  int rank_;
  std::string test_name_;
};

}  // namespace

int main(int argc, char** argv) {
  cpattn::MpiSession session(&argc, &argv);
  testing::InitGoogleTest(&argc, argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  auto& listeners = testing::UnitTest::GetInstance()->listeners();
  if (rank != 0) delete listeners.Release(listeners.default_result_printer());
  listeners.Append(new RankListener(rank));

  int has_failed = RUN_ALL_TESTS();  // failures outside tests get here
  if (testing::UnitTest::GetInstance()->test_to_run_count() == 0) has_failed = 1;
  int any_failed = 0;
  MPI_Allreduce(&has_failed, &any_failed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  if (any_failed != 0) MPI_Abort(MPI_COMM_WORLD, 1);
  return 0;
}
