// What tests of kernels on the host share: the ways to run a case, and the count of races.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <exception>
#include <string>

#include "kernels/cuda/host/executor.h"
#include "kernels/cuda/launch.h"

namespace cpattn::cuda {

/// Built a second and third time (CMakeLists.txt): what those builds find that this one does not.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kFindsRaces = true;
#else
inline constexpr bool kFindsRaces = false;
#endif
#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kFindsBadAddresses = true;
#else
inline constexpr bool kFindsBadAddresses = false;
#endif

/// Races that the thread sanitizer has reported so far; 0 without it.
int num_races();

/// How a kernel may be executed: it must be right in all of these.
inline constexpr std::array kModes{
    cuda_host::Options{}, cuda_host::Options{.landing = cuda_host::Landing::late},
    cuda_host::Options{.order = cuda_host::ThreadOrder::random, .seed = 1},
    cuda_host::Options{.order = cuda_host::ThreadOrder::random, .seed = 2},
    cuda_host::Options{
        .order = cuda_host::ThreadOrder::random, .seed = 3, .landing = cuda_host::Landing::late}};

/// For EXPECT_PRED2, which prints both.
inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// One for all tests: making the thread sanitizer's picture of a fiber takes milliseconds.
inline cuda_host::Executor& shared_executor() {
  static cuda_host::Executor executor;
  return executor;
}

inline std::string describe(const cuda_host::Options& options) {
  return detail::concat(
      options.order == cuda_host::ThreadOrder::random ? "random order, seed " : "ascending, seed ",
      options.seed, options.landing == cuda_host::Landing::late ? ", late" : ", early");
}

/// A test that fails on every race it did not ask for.
class HostTest : public ::testing::Test {
 protected:
  void SetUp() override {
    executor_.set_options({});
    executor_.reset_counters();
  }
  void TearDown() override { EXPECT_EQ(num_races() - first_races_ - expected_races_, 0); }

  /// Runs `body(executor)` once for each mode.
  template <class Body>
  void in_all_modes(const Body& body) {
    for (const cuda_host::Options& mode : kModes) {
      SCOPED_TRACE(describe(mode));
      executor_.set_options(mode);
      body();
    }
  }

  template <class... Params, class... Args>
  void run(void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t shared_bytes,
           Args&&... args) {
    launch(kernel, grid, block, shared_bytes, &executor_, std::forward<Args>(args)...);
  }

  /// What the run is refused or stopped with; empty when it is not.
  template <class... Params, class... Args>
  std::string problem(void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t shared_bytes,
                      Args&&... args) {
    try {
      run(kernel, grid, block, shared_bytes, std::forward<Args>(args)...);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  /// Races found while `body` ran, which are then not held against the test.
  template <class Body>
  int races_of(const Body& body) {
    const int before = num_races();
    body();
    const int found = num_races() - before;
    expected_races_ += found;
    return found;
  }

  cuda_host::Executor& executor_ = shared_executor();

 private:
  int first_races_ = num_races();
  int expected_races_ = 0;
};

}  // namespace cpattn::cuda
