// Words in device memory and back, on either side; and how they are printed.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "kernels/cuda/launch.h"

namespace cpattn::cuda {

/// Words that a kernel reads or writes. On the host device memory is host memory.
class Words {
 public:
  explicit Words(std::vector<std::uint32_t> words) : host_(std::move(words)) {
#if defined(__CUDACC__)
    check(cudaMalloc(&device_, host_.size() * 4), "cudaMalloc");
    check(cudaMemcpy(device_, host_.data(), host_.size() * 4, cudaMemcpyHostToDevice),
          "cudaMemcpy to the device");
#else
    device_ = host_.data();
#endif
  }
  explicit Words(std::size_t count) : Words(std::vector<std::uint32_t>(count, 0xdeadbeefu)) {}
  Words(const Words&) = delete;
  Words& operator=(const Words&) = delete;
#if defined(__CUDACC__)
  ~Words() { cudaFree(device_); }
#endif

  std::uint32_t* device() { return device_; }

  /// What the device holds when the stream is done.
  const std::vector<std::uint32_t>& fetch([[maybe_unused]] cudaStream_t stream) {
#if defined(__CUDACC__)
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    check(cudaMemcpy(host_.data(), device_, host_.size() * 4, cudaMemcpyDeviceToHost),
          "cudaMemcpy to the host");
#endif
    return host_;
  }

 private:
  std::vector<std::uint32_t> host_;
  std::uint32_t* device_ = nullptr;
};

inline std::string hex(std::uint64_t value, int digits) {
  char text[24];
  std::snprintf(text, sizeof(text), " %0*llx", digits, static_cast<unsigned long long>(value));
  return text;
}

/// FNV-1a over words, high bits folded down: results often have zeros in their low halves.
inline std::uint64_t digest_of(const std::uint32_t* words, std::size_t count) {
  std::uint64_t digest = 0xcbf29ce484222325ull;
  for (std::size_t i = 0; i < count; ++i) {
    digest = (digest ^ words[i]) * 0x100000001b3ull;
    digest ^= digest >> 32;
  }
  return digest;
}

}  // namespace cpattn::cuda
