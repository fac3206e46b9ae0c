// Loopback worlds as test parameters.
#pragma once

#include <string>
#include <vector>

#include "src/comm/loopback_comm.h"
#include "tests/src/comm_world.h"

namespace cpattn {

inline CommWorld loopback_world(int size, std::uint64_t shuffle_seed) {
  const auto runner = [=](bool must_receive_all) {
    return [=](const RankBody& body) {
      LoopbackWorld world(size,
                          {.shuffle_seed = shuffle_seed, .must_receive_all = must_receive_all});
      world.run(body);
    };
  };
  return {.name = "loopback" + std::to_string(size) + (shuffle_seed != 0 ? "_shuffled" : ""),
          .size = size,
          .run = runner(true),
          .run_broken = runner(false)};
}

/// Each size in order of posting and shuffled.
inline std::vector<CommWorld> loopback_worlds(const std::vector<int>& sizes) {
  constexpr std::uint64_t kSeed = 20240607;
  std::vector<CommWorld> worlds;
  for (const int size : sizes) {
    worlds.push_back(loopback_world(size, 0));
    worlds.push_back(loopback_world(size, kSeed));
  }
  return worlds;
}

}  // namespace cpattn
