// Every way to split a problem that a schedule must get right.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cp/config.h"

namespace cpattn::testing {

/// Calls visit(config, world_size) for all combinations of these with both masks, both schedules
/// and three orders of arrival, with a trace; stops at the first failure.
template <class Visitor>
void for_each_way(const std::vector<ShardingKind>& shardings,
                  const std::vector<std::int64_t>& chunk_sizes, const std::vector<int>& world_sizes,
                  Visitor&& visit) {
  for (const ShardingKind sharding : shardings)
    for (const MaskKind mask : {MaskKind::full, MaskKind::causal})
      for (const ScheduleKind schedule : {ScheduleKind::canonical, ScheduleKind::arrival})
        for (const std::int64_t chunk_tokens : chunk_sizes)
          for (const std::int64_t shuffle : {0, 1, 2})
            for (const int world_size : world_sizes) {
              CpConfig config;
              config.sharding = sharding;
              config.mask = mask;
              config.schedule = schedule;
              config.chunk_tokens = chunk_tokens;
              config.shuffle_arrival = shuffle;
              SCOPED_TRACE(std::string(name_of(sharding)) + " " + std::string(name_of(mask)) + " " +
                           std::string(name_of(schedule)) + ", chunks of " +
                           std::to_string(chunk_tokens) + ", shuffle " + std::to_string(shuffle) +
                           ", P = " + std::to_string(world_size));
              visit(config, world_size);
              if (::testing::Test::HasFailure()) return;
            }
}

}  // namespace cpattn::testing
