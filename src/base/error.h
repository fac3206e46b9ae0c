// Exception types, one per cause, and the two checks that throw them. Nothing here prints or
// aborts.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace cpattn {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The caller passed something wrong: a field, its value, what was expected. Nothing was exchanged
/// yet.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// A part that was not compiled in, or that this machine does not have. Says what would provide it.
class Unsupported : public Error {
 public:
  using Error::Error;
};

/// A peer or the network failed, or a deadline passed: the communicator must not be used again.
class CommError : public Error {
 public:
  using Error::Error;
};

/// A call of CUDA failed: the device or its driver, not the caller and not a peer.
class DeviceError : public Error {
 public:
  using Error::Error;
};

/// A bug of ours.
class InternalError : public Error {
 public:
  using Error::Error;
};

namespace detail {
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}
}  // namespace detail

/// Checks the caller; always on. The parts are only put together when the check fails.
template <class Exception = InvalidArgument, class... Parts>
void require(bool is_met, const Parts&... parts) {
  if (!is_met) [[unlikely]]
    throw Exception(detail::concat(parts...));
}

/// Checks ourselves; always on, so keep it out of inner loops.
template <class... Parts>
void invariant(bool is_met, const Parts&... parts) {
  if (!is_met) [[unlikely]]
    throw InternalError(detail::concat("internal error: ", parts...));
}

}  // namespace cpattn
