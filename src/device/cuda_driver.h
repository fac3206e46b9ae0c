// What CUDA's driver says of an address, in a process that may have no CUDA at all.
//
// The library itself needs no driver, but a caller that has device memory has loaded one, and may
// by mistake give such an address to a group whose shards are in host memory.
#pragma once

namespace cpattn {

/// The GPU whose memory this is, which the host cannot read; -1: not that, or there is no driver.
/// Allocates nothing once it has been asked since the last library was loaded.
int gpu_of_address(const void* address) noexcept;

}  // namespace cpattn
