// CallStream: the order in which a GPU does one call's work, as Python says it.
//
// A caller names a stream by its handle. The legacy default stream, where torch's work goes unless
// it is told otherwise, must not be given to kernels and transports; so for that the work is put
// into a stream of the group's own, between what the default stream was given before and what it is
// given after.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "cp/bindings/group.h"
#include "src/device/device.h"

namespace cpattn::python {

namespace py = pybind11;

class CallStream {
 public:
  /// `given`: an integer, the handle of a stream (0, 1 or None: the legacy default stream); None
  /// where shards are in host memory. InvalidArgument for anything else.
  CallStream(Group& group, const py::object& given);

  /// Where the work goes.
  Stream get() const { return work_; }
  /// The caller's stream as DLPack and the CUDA array interface number it: 1 is the legacy default.
  std::int64_t number() const { return number_; }
  bool is_on_gpu() const { return device_ != nullptr; }

  /// What comes next comes after what `producer` (numbered as number()) was given so far.
  /// InvalidArgument in a capture, which it would not be part of.
  void wait_for(std::int64_t producer, std::string_view name) const;

  /// Around the work: it comes after what the caller's stream was given, and before what it will
  /// be.
  void begin() const;
  void end() const;

 private:
  bool is_default() const;

  Device* device_ = nullptr;
  std::int64_t number_ = 0;
  Stream work_;
};

}  // namespace cpattn::python
