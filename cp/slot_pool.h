// SlotPool: hands out the smallest free number, so that a schedule uses few slots.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

namespace cpattn {

class SlotPool {
 public:
  int take() {
    if (free_.empty()) return size_++;
    std::pop_heap(free_.begin(), free_.end(), std::greater<>());
    const int slot = free_.back();
    free_.pop_back();
    return slot;
  }
  void give(int slot) {
    free_.push_back(slot);
    std::push_heap(free_.begin(), free_.end(), std::greater<>());
  }
  /// Slots that exist: the most that were ever taken at a time.
  int size() const { return size_; }

 private:
  std::vector<int> free_;
  int size_ = 0;
};

}  // namespace cpattn
