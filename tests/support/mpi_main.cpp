// main() of tests that run under mpirun: all ranks run the same tests, rank 0 prints everything and
// the others print their failures only; any rank's failure fails the job.
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <sstream>

#include "src/comm/mpi_comm.h"

namespace {

class FailurePrinter : public testing::EmptyTestEventListener {
 public:
  explicit FailurePrinter(int rank) : rank_(rank) {}

 private:
  void OnTestStart(const testing::TestInfo& test) override {
    test_name_ = std::string(test.test_suite_name()) + "." + test.name();
  }
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::ostringstream text;  // one write, so that ranks do not mix within a report
    text << "[rank " << rank_ << "] " << test_name_ << ": "
         << (result.file_name() != nullptr ? result.file_name() : "?") << ":"
         << result.line_number() << "\n"
         << result.message() << "\n";
    std::cerr << text.str() << std::flush;
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
  if (rank != 0) {
    auto& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailurePrinter(rank));
  }

  int has_failed = RUN_ALL_TESTS();
  // A program that ran no test proves nothing.
  has_failed =
      std::max(has_failed, testing::UnitTest::GetInstance()->test_to_run_count() == 0 ? 1 : 0);
  int any_failed = 0;
  MPI_Allreduce(&has_failed, &any_failed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  if (any_failed != 0) {
    if (rank == 0 && has_failed == 0) std::cerr << "rank 0 passed, another rank failed\n";
    MPI_Abort(MPI_COMM_WORLD, 1);  // messages of a failed test may keep MPI_Finalize waiting
  }
  return 0;
}
