// How a program that has opened the doubles as a shared object sets the machine: by C names. And
// how whoever starts it does: CPATTN_FAKE_MACHINE="num_devices=1 compute_capability=80".
#include <cstdlib>
#include <sstream>
#include <string>
#include <string_view>

#include "src/base/error.h"
#include "tests/support/cuda/fake_cuda.h"

namespace cpattn::fake_cuda {
namespace {

bool set_field(Machine& machine, std::string_view field, long value) {
  const auto number = static_cast<int>(value);
  if (field == "num_devices") {
    machine.num_devices = number;
  } else if (field == "compute_capability") {
    constexpr int kMajor = 10;
    machine.compute_major = number / kMajor;
    machine.compute_minor = number % kMajor;
  } else if (field == "driver_version") {
    machine.driver_version = number;
  } else if (field == "has_default_stream") {
    machine.has_default_stream = value != 0;
  } else {
    return false;
  }
  return true;
}

/// When the doubles are loaded. What is no field or no number ends the program: a test that sets it
/// must not go on with another machine.
[[maybe_unused]] const bool is_set_by_environment = [] {
  const char* text = std::getenv("CPATTN_FAKE_MACHINE");
  std::istringstream words(text == nullptr ? "" : text);
  for (std::string word; words >> word;) {
    const std::size_t equals = word.find('=');
    const std::string field = word.substr(0, equals);
    const long value = equals == std::string::npos ? -1 : std::atol(word.c_str() + equals + 1);
    if (value < 0 || cpattn_fake_machine(field.c_str(), value) != 0) std::abort();
  }
  return text != nullptr;
}();

}  // namespace

int cpattn_fake_machine(const char* field, long value) {
  Machine changed = machine();
  if (std::string_view(field) == "delay_seed") {
    constexpr unsigned kLimitMicroseconds = 2000;
    set_delays(static_cast<std::uint64_t>(value), value == 0 ? 0 : kLimitMicroseconds);
    return 0;
  }
  if (!set_field(changed, field, value)) return 1;
  set_machine(changed);
  return 0;
}

void cpattn_fake_reset() { reset(); }

}  // namespace cpattn::fake_cuda
