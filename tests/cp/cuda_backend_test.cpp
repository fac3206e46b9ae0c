#include "cp/cuda_backend.h"

#include <gtest/gtest.h>

#include "src/base/error.h"
#include "tests/src/comm_world.h"

namespace cpattn {
namespace {

TEST(CudaBackend, WhatIsNotThereIsUnsupportedAndNamed) {
  const std::string path = "./no_such_backend.so";

  const std::string text = text_thrown_by<Unsupported>([&] { CudaBackend::open(path); });

  EXPECT_NE(text.find("CUDA backend ./no_such_backend.so: "), std::string::npos) << text;
  EXPECT_NE(text.find("No such file"), std::string::npos) << text;
}

// A shared object without the symbol: any library.
TEST(CudaBackend, AnotherLibraryIsNotABackend) {
  const std::string text = text_thrown_by<Unsupported>([] { CudaBackend::open("libm.so.6"); });

  EXPECT_NE(text.find("cpattn_cuda_backend"), std::string::npos) << text;
}

}  // namespace
}  // namespace cpattn
