#include "kernels/reference/deal.h"

#include <exception>
#include <thread>
#include <vector>

namespace cpattn::reference {

void deal(std::size_t count, int num_threads, const std::function<void(std::size_t i)>& work) {
  const auto stride = static_cast<std::size_t>(num_threads);
  std::vector<std::exception_ptr> failures(stride);
  const auto run = [&](std::size_t first) {
    try {
      for (std::size_t i = first; i < count; i += stride) work(i);
    } catch (...) {
      failures[first] = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> threads;
    for (std::size_t t = 1; t < stride; ++t) threads.emplace_back(run, t);
    run(0);
  }
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

}  // namespace cpattn::reference
