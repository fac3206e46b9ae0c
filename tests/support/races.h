// What the sanitizers' builds of a test find that its plain build does not, and the count of races.
#pragma once

namespace cpattn {

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kFindsRaces = true;
#else
inline constexpr bool kFindsRaces = false;
#endif
#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kFindsBadAddresses = true;
#else
inline constexpr bool kFindsBadAddresses = false;
#endif

/// Races that the thread sanitizer has reported so far; 0 without it. A program with races.cpp in
/// it does not fail by itself when there are any: its tests judge.
int num_races();

/// From its making on: how many, and how many of them a test asked for.
class RaceCount {
 public:
  /// Races found while `body` ran, which are then not held against the test.
  template <class Body>
  int races_of(const Body& body) {
    const int before = num_races();
    body();
    const int found = num_races() - before;
    expected_ += found;
    return found;
  }
  int num_unexpected() const { return num_races() - first_ - expected_; }

 private:
  int first_ = num_races();
  int expected_ = 0;
};

}  // namespace cpattn
