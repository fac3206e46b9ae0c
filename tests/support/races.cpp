#include "tests/support/races.h"

namespace {

int races = 0;

}  // namespace

// Hooks of the thread sanitizer's runtime; plain functions in the other builds.
extern "C" {

__attribute__((no_sanitize("thread"))) void __tsan_on_report(void*) {
  __atomic_add_fetch(&races, 1, __ATOMIC_RELAXED);
}

// Tests count reports and judge them. A race is reported once for each pair of stacks. Idle fibers
// count as threads to a process that forks, and hinder nothing.
__attribute__((no_sanitize("thread"))) const char* __tsan_default_options() {
  return "exitcode=0:suppress_equal_addresses=0:die_after_fork=0";
}
}

int cpattn::num_races() { return __atomic_load_n(&races, __ATOMIC_RELAXED); }
