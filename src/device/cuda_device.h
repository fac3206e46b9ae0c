// CudaDevice: one GPU of this process.
//
// Memory comes from cudaMalloc, or from the caller's allocator, and is given back once everything
// that the device was given is done: whoever owns a Buffer need not know which streams have used
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "src/device/device.h"

namespace cpattn {

/// The oldest architecture with what the kernels are made of: cp.async, and mma.sync of bf16.
inline constexpr int kLeastCapability = 80;

/// What this machine has of CUDA.
struct CudaFacts {
  int driver_version = 0;   ///< 13000 is 13.0; 0: no driver
  int runtime_version = 0;  ///< what this library runs with
  int num_devices = 0;
  std::string problem;  ///< why no device can be used: no driver, one too old, no GPU; "" when some
};

/// Never throws for what a machine lacks.
CudaFacts cuda_facts();

/// Whether `device` reads and writes the memory of `peer` directly. Errors: DeviceError.
bool can_access_peer(int device, int peer);

/// A caller's own memory. allocate(bytes, stream): memory for work in that stream, aligned to 256
/// bytes; null when there is none. free(memory) is called when no work uses it any more. Where
/// ranks of one process exchange it by NCCL, their devices must see it: cudaMalloc's they do; of a
/// pool, after cudaMemPoolSetAccess.
struct DeviceAllocator {
  std::function<void*(std::size_t bytes, Stream stream)> allocate;
  std::function<void(void* memory)> free;
};

class CudaDevice final : public Device {
 public:
  /// The `ordinal`-th of cuda_facts().num_devices.
  /// Errors  Unsupported, with one text, where there is no device that can be used, or this one is
  ///         older than sm_80; InvalidArgument for an ordinal that the machine does not have.
  explicit CudaDevice(int ordinal, DeviceAllocator allocator = {});

  DeviceKind kind() const override { return DeviceKind::cuda; }
  std::string description() const override;
  Buffer allocate(std::size_t size_bytes) override;
  void upload(std::byte* to, std::span<const std::byte> from) override;
  void download(std::span<std::byte> to, const std::byte* from) override;
  void copy(std::byte* to, std::span<const std::byte> from, Stream stream) override;
  void order(Stream before, Stream after) override;
  const std::string& uuid() const override { return uuid_; }
  int enter() override;
  void leave(int before) noexcept override;
  std::string problem_with(const void* data) const override;
  std::string problem_with(Stream stream) const override;
  bool is_capturing(Stream stream) const override;

  /// Host memory that copies to and from the device without blocking; zeros.
  /// Errors: InvalidArgument when it cannot be had.
  Buffer allocate_pinned(std::size_t size_bytes) const;

  int ordinal() const { return ordinal_; }
  int compute_capability() const { return compute_capability_; }  ///< 90 is sm_90
  int num_multiprocessors() const { return num_multiprocessors_; }
  /// Thread blocks of a kernel that run at once on the whole device. Errors: DeviceError.
  int resident_blocks(const void* kernel, int block_threads, std::size_t shared_bytes) const;

 private:
  struct Memory;

  int ordinal_;
  std::string name_;  // "cuda:0"
  std::string model_;
  std::string uuid_;
  int compute_capability_ = 0;
  int num_multiprocessors_ = 0;
  std::shared_ptr<Memory> memory_;  // shared with the buffers
};

}  // namespace cpattn
