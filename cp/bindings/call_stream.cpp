#include "cp/bindings/call_stream.h"

#include "src/base/error.h"

namespace cpattn::python {
namespace {

constexpr std::int64_t kLegacyDefault = 1;

Stream stream_numbered(std::int64_t number) {
  return {number == kLegacyDefault ? nullptr : reinterpret_cast<void*>(number)};
}

}  // namespace

CallStream::CallStream(Group& group, const py::object& given) {
  const std::string shown = py::repr(given);
  if (group.gpu() == nullptr) {
    require(given.is_none(), "stream: ", shown, ", expected None where shards are in host memory");
    return;
  }
  device_ = &group.gpu()->device();
  require(given.is_none() || PyLong_Check(given.ptr()) != 0, "stream: ", shown,
          ", expected the handle of a CUDA stream: an integer");
  number_ = given.is_none() ? 0 : given.cast<std::int64_t>();
  if (number_ == 0) number_ = kLegacyDefault;
  work_ = is_default() ? group.own_stream() : stream_numbered(number_);
  const std::string problem = device_->problem_with(work_);
  require(problem.empty(), problem);
}

bool CallStream::is_default() const { return number_ == kLegacyDefault; }

void CallStream::wait_for(std::int64_t producer, std::string_view name) const {
  if (producer == number_) return;
  require(!device_->is_capturing(work_), name, ": written in stream ", producer,
          ", expected stream ", number_, ", which is in capture");
  device_->order(stream_numbered(producer), work_);
}

void CallStream::begin() const {
  if (is_on_gpu() && is_default()) device_->order({}, work_);
}

void CallStream::end() const {
  if (is_on_gpu() && is_default()) device_->order(work_, {});
}

}  // namespace cpattn::python
