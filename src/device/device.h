// Device and Stream: where shards live, and in which order things happen to them.
//
// The CPU has one stream, which does everything at once; a CUDA stream is queued work, and a call
// that takes one returns before the work is done.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string>

#include "src/base/enum_names.h"
#include "src/device/memory.h"

namespace cpattn {

enum class DeviceKind { cpu, cuda };

template <>
struct EnumNames<DeviceKind> {
  static constexpr std::array kValues{NamedValue<DeviceKind>{DeviceKind::cpu, "cpu"},
                                      NamedValue<DeviceKind>{DeviceKind::cuda, "cuda"}};
};

/// Not owned. `handle` is a cudaStream_t; null on the CPU.
struct Stream {
  void* handle = nullptr;
};

/// One device of this process. Buffers that it made may outlive it.
///
/// Thread-safety  any thread, except while a stream is being captured by another one.
class Device {
 public:
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  virtual ~Device() = default;

  virtual DeviceKind kind() const = 0;
  /// "cpu", "cuda:0 NVIDIA H200, sm_90, 132 multiprocessors", ...
  virtual std::string description() const = 0;

  /// Zeros, aligned to 256 bytes on a GPU (64 on the CPU); ready for every stream when it returns.
  /// Errors: InvalidArgument when it cannot be had, with the bytes asked for.
  virtual Buffer allocate(std::size_t size_bytes) = 0;
  /// Done when they return.
  virtual void upload(std::byte* to, std::span<const std::byte> from) = 0;
  virtual void download(std::span<std::byte> to, const std::byte* from) = 0;
  /// Within the device's memory, in the order of `stream`; the ranges do not overlap.
  virtual void copy(std::byte* to, std::span<const std::byte> from, Stream stream) = 0;
  /// `after` waits for all that `before` was given so far. Either may be the legacy default stream;
  /// both are in one capture, or none is in any.
  virtual void order(Stream before, Stream after) = 0;

  /// 16 bytes that no other GPU has, anywhere (of a slice, where a GPU is cut into some); "" on the
  /// CPU.
  virtual const std::string& uuid() const = 0;

  /// Makes it the one that launches of this thread go to; what was before. See CurrentDevice.
  virtual int enter() { return 0; }
  virtual void leave(int before) noexcept { static_cast<void>(before); }

  /// Why kernels of this device must not be given this address of a tensor: "host memory, expected
  /// memory of cuda:0", "memory of cuda:0, expected host memory", "address 0x7f...4, expected a
  /// multiple of 16"; "" when they may.
  virtual std::string problem_with(const void* data) const = 0;

  /// Why work must not be given to this stream: destroyed, of another device, the legacy default
  /// stream; "" when it may. A stream in capture may.
  virtual std::string problem_with(Stream stream) const = 0;
  /// Work given to it is recorded, not done.
  virtual bool is_capturing(Stream stream) const = 0;
};

/// Launches of this thread go to `device` in this scope.
class CurrentDevice {
 public:
  explicit CurrentDevice(Device& device) : device_(device), before_(device.enter()) {}
  ~CurrentDevice() { device_.leave(before_); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  Device& device_;
  int before_;
};

class CpuDevice final : public Device {
 public:
  DeviceKind kind() const override { return DeviceKind::cpu; }
  std::string description() const override { return "cpu"; }
  Buffer allocate(std::size_t size_bytes) override { return Buffer(size_bytes); }
  void upload(std::byte* to, std::span<const std::byte> from) override;
  void download(std::span<std::byte> to, const std::byte* from) override;
  void copy(std::byte* to, std::span<const std::byte> from, Stream stream) override;
  void order(Stream, Stream) override {}
  const std::string& uuid() const override { return uuid_; }
  std::string problem_with(const void* data) const override;
  std::string problem_with(Stream stream) const override;
  bool is_capturing(Stream) const override { return false; }

 private:
  std::string uuid_;
};

}  // namespace cpattn
