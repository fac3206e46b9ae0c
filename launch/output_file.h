// Files that the program writes: whole, in the right place, and refused before the work if they
// cannot be.
#pragma once

#include <string>
#include <string_view>

namespace cpattn {

/// Writes a file so that readers see the old text or the new one, never a part. What is not a
/// regular file (a device, a pipe, a link, /dev/stdout) is written through and stays what it is.
/// Errors  InternalError naming the path and what the system said: the work was done by then.
void write_atomically(const std::string& path, std::string_view text);

/// Finds out before the work whether write_atomically() can write there; changes nothing there.
/// Errors  InvalidArgument naming the path and what the system says.
void require_writable(const std::string& path);

/// Takes the places of standard streams that are closed, so that no file or socket gets the number
/// of one and is written to by mistake. Such a stream still fails to be read or written.
void hold_standard_streams() noexcept;

}  // namespace cpattn
