// Device and Stream: where shards live and in which order things happen to them, as plain words.
//
// The CPU has one stream, which does everything at once; a CUDA stream is queued work, and a call
// that takes one returns before the work is done.
#pragma once

#include <array>
#include <cstdint>

#include "src/base/enum_names.h"

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

}  // namespace cpattn
