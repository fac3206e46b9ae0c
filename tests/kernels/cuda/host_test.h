// What tests of kernels on the host share: the ways to run a case, none of which may race.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <exception>
#include <string>

#include "kernels/cuda/host/executor.h"
#include "kernels/cuda/launch.h"
#include "tests/support/races.h"

namespace cpattn::cuda {

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
  void TearDown() override { EXPECT_EQ(races_.num_unexpected(), 0); }

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
    return races_.races_of(body);
  }

  cuda_host::Executor& executor_ = shared_executor();

 private:
  RaceCount races_;
};

}  // namespace cpattn::cuda
