#include "cp/zigzag.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <tuple>

#include "src/base/error.h"

namespace cpattn {
namespace {

constexpr std::int64_t kShorter = 1;
constexpr std::int64_t kLonger = 2;

/// The best known way to reach a state: so many pairs cut off, so many chunks in front and behind.
struct Cut {
  std::int64_t peak = std::numeric_limits<std::int64_t>::max();  ///< work of the busiest pair
  std::int64_t unevenness = 0;
  RunPair last;  ///< the pair cut off last

  bool is_reached() const { return peak != std::numeric_limits<std::int64_t>::max(); }
  bool is_better_than(const Cut& other) const {
    return std::tie(peak, unevenness) < std::tie(other.peak, other.unevenness);
  }
};

/// Fills level after level with all states: level p has p pairs cut off.
class CutSearch {
 public:
  CutSearch(const std::vector<std::int64_t>& work_before, int parts)
      : work_before_(work_before),
        parts_(parts),
        num_chunks_(static_cast<std::int64_t>(work_before.size()) - 1),
        base_(num_chunks_ / (2 * parts)),
        shortest_(std::max<std::int64_t>(0, base_ - kShorter)),
        longest_(base_ + kLonger) {
    for (std::int64_t level = 0; level <= parts_; ++level) {
      levels_.emplace_back(static_cast<std::size_t>(width(level) * width(level)));
    }
    at(0, 0, 0).peak = 0;
    for (std::int64_t level = 0; level < parts_; ++level) fill_next(level);
  }

  std::vector<RunPair> best() {
    const std::int64_t least = parts_ * shortest_, most = parts_ * longest_;
    std::int64_t front = std::max(least, num_chunks_ - most);
    for (std::int64_t f = front; f <= std::min(most, num_chunks_ - least); ++f) {
      if (at(parts_, f, num_chunks_ - f).is_better_than(at(parts_, front, num_chunks_ - front))) {
        front = f;
      }
    }
    std::int64_t back = num_chunks_ - front;
    invariant(at(parts_, front, back).is_reached(), num_chunks_, " chunks cannot be cut into ",
              parts_, " pairs");
    std::vector<RunPair> pairs(static_cast<std::size_t>(parts_));
    for (std::int64_t level = parts_; level > 0; --level) {
      const RunPair pair = at(level, front, back).last;
      pairs[static_cast<std::size_t>(level) - 1] = pair;
      front -= pair.front;
      back -= pair.back;
    }
    return pairs;
  }

 private:
  std::int64_t width(std::int64_t level) const { return level * (longest_ - shortest_) + 1; }
  Cut& at(std::int64_t level, std::int64_t front, std::int64_t back) {
    const std::int64_t least = level * shortest_;
    return levels_[static_cast<std::size_t>(level)]
                  [static_cast<std::size_t>((front - least) * width(level) + back - least)];
  }

  void fill_next(std::int64_t level) {
    const std::int64_t least = level * shortest_, most = level * longest_;
    for (std::int64_t front = least; front <= most; ++front) {
      for (std::int64_t back = least; back <= most; ++back) {
        if (at(level, front, back).is_reached()) extend(level, front, back);
      }
    }
  }

  /// All ways to cut one more pair off, as far as the other pairs can take the rest.
  void extend(std::int64_t level, std::int64_t front, std::int64_t back) {
    const Cut from = at(level, front, back);
    const std::int64_t pairs_left = parts_ - level - 1;
    for (std::int64_t a = shortest_; a <= longest_; ++a) {
      for (std::int64_t b = shortest_; b <= longest_; ++b) {
        const std::int64_t rest = num_chunks_ - front - back - a - b;
        if (rest < 2 * pairs_left * shortest_ || rest > 2 * pairs_left * longest_) continue;
        const std::int64_t work =
            work_of(front, front + a) + work_of(num_chunks_ - back - b, num_chunks_ - back);
        const Cut next{std::max(from.peak, work),
                       from.unevenness + std::abs(a - base_) + std::abs(b - base_),
                       {a, b}};
        Cut& known = at(level + 1, front + a, back + b);
        if (next.is_better_than(known)) known = next;
      }
    }
  }

  std::int64_t work_of(std::int64_t begin, std::int64_t end) const {
    return work_before_[static_cast<std::size_t>(end)] -
           work_before_[static_cast<std::size_t>(begin)];
  }

  const std::vector<std::int64_t>& work_before_;
  std::int64_t parts_;
  std::int64_t num_chunks_;
  std::int64_t base_;
  std::int64_t shortest_;
  std::int64_t longest_;
  std::vector<std::vector<Cut>> levels_;
};

}  // namespace

std::vector<RunPair> zigzag_pairs(const std::vector<std::int64_t>& work_before, int parts) {
  require(!work_before.empty() && parts >= 1, "cannot cut ", work_before.size(),
          " chunk borders into ", parts, " pairs of runs");
  const auto num_chunks = static_cast<std::int64_t>(work_before.size()) - 1;
  if (num_chunks % (2 * parts) == 0) {
    const std::int64_t even = num_chunks / (2 * parts);
    return std::vector<RunPair>(static_cast<std::size_t>(parts), RunPair{even, even});
  }
  return CutSearch(work_before, parts).best();
}

}  // namespace cpattn
