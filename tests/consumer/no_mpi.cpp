// Every public header in one program, without MPI on the include path: one rank alone, and two as
// threads.
#include <cpattn.h>
#include <cpattn/context_parallel.h>
#include <cpattn/errors.h>
#include <cpattn/loopback.h>
#include <cpattn/ordered_sum.h>
#include <cpattn/self.h>
#include <cpattn/shard_tools.h>
#include <cpattn/te_names.h>

#include <cstdio>
#include <cstring>

namespace {

/// The bits of the sum of 0.1, 0.2, ... over 100 rows, added up chunk by chunk.
float sum_of_rows(cpattn::Communicator& comm) {
  const cpattn::SequenceBatch batch = cpattn::batch_of_one(100, 100);
  cpattn::CpConfig config;
  config.chunk_tokens = 8;
  const cpattn::Sharding sharding = cpattn::make_sharding(batch, config, comm.size());
  const auto& rows = sharding.shards[static_cast<std::size_t>(comm.rank())].q;
  const auto places = cpattn::positions(rows);
  cpattn::OrderedSum<float> sum(cpattn::num_leaves(batch, config, comm.size()), 1);
  for (const cpattn::LeafRows& leaf : cpattn::leaf_rows(batch, config, comm.size(), rows)) {
    float partial = 0.0f;
    for (std::int64_t row = leaf.begin; row < leaf.begin + leaf.num_rows; ++row)
      partial += 0.1f * static_cast<float>(places[static_cast<std::size_t>(row)] + 1);
    sum.add(leaf.leaf, {&partial, 1});
  }
  float result = 0.0f;
  sum.all_reduce(comm, {&result, 1}, cpattn::deadline_after(cpattn::Seconds(30)));
  return result;
}

}  // namespace

int main() {
  const auto alone = std::make_shared<cpattn::SelfCommunicator>();
  const cpattn::ContextParallelAttention attention(alone, {});
  const auto told = attention.explain({.shape = {}, .batch = cpattn::batch_of_one(64, 64)});
  if (!told.is_supported) return 1;
  const float expected = sum_of_rows(*alone);
  bool is_equal = true;
  cpattn::LoopbackWorld(2).run([&](cpattn::Communicator& comm) {
    const float found = sum_of_rows(comm);
    if (std::memcmp(&found, &expected, sizeof found) != 0) is_equal = false;
  });
  if (!is_equal) return 2;
  if (cpattn::te::thd_get_partitioned_indices({0, 8}, 8, 2, 0).size() != 4) return 3;
  try {
    cpattn::LoopbackWorld(0);
    return 4;
  } catch (const cpattn::InvalidArgument&) {  // an exception crosses the library's border whole
  }
  std::printf("cpattn %s: %s\n", cpattn_version(), told.to_json().c_str());
  return 0;
}
