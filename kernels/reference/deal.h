// Deals numbered pieces of work to threads.
#pragma once

#include <cstddef>
#include <functional>

namespace cpattn::reference {

/// Calls work(i) once for every i in [0, count), on num_threads std::threads (the caller's among
/// them); thread t takes t, t + num_threads, ...: under a causal mask that shares rows evenly. What
/// a call throws is thrown again after all threads ended.
void deal(std::size_t count, int num_threads, const std::function<void(std::size_t i)>& work);

}  // namespace cpattn::reference
