// The C face of the sharding tools and of the ordered sum.
#include <algorithm>
#include <span>

#include "cp/bindings/c_convert.h"
#include "cp/bindings/c_handles.h"
#include "cp/shard_tools.h"

namespace cpattn::c {
namespace {

ShardSide side_of(cpattn_side side) {
  require(side == CPATTN_Q || side == CPATTN_KV, "side ", static_cast<int>(side),
          ": expected CPATTN_Q or CPATTN_KV");
  return side == CPATTN_Q ? ShardSide::q : ShardSide::kv;
}

const std::vector<OwnedChunk>& chunks_of(const PlannedAttention& plan, cpattn_side side) {
  const Shard& shard = plan.plan().shard();
  return side_of(side) == ShardSide::q ? shard.q : shard.kv;
}

void put(const std::vector<std::int64_t>& numbers, std::int64_t* to, std::size_t capacity,
         std::string_view name) {
  require(capacity >= numbers.size(), "capacity is ", capacity, ", expected at least ",
          numbers.size());
  require(to != nullptr || numbers.empty(), name, ": NULL");
  std::copy(numbers.begin(), numbers.end(), to);
}

/// A CommError's deadline for what the plan does not wait for itself.
Clock::time_point deadline_of(const PlannedAttention& plan) {
  return deadline_after(Seconds(plan.plan().config().timeout_seconds));
}

}  // namespace
}  // namespace cpattn::c

using namespace cpattn;  // NOLINT: this file is the border

cpattn_status cpattn_plan_num_rows(cpattn_plan* plan, cpattn_side side, int64_t* rows) {
  return c::guarded([&] {
    const auto object = c::object_of(plan);
    require(rows != nullptr, "num_rows: NULL");
    *rows = num_rows(c::chunks_of(*object, side));
  });
}

cpattn_status cpattn_plan_global_rows(cpattn_plan* plan, cpattn_side side, int64_t* rows,
                                      size_t capacity) {
  return c::guarded([&] {
    const auto object = c::object_of(plan);
    c::put(global_rows(c::chunks_of(*object, side)), rows, capacity, "rows");
  });
}

cpattn_status cpattn_plan_positions(cpattn_plan* plan, cpattn_side side, int64_t* places,
                                    size_t capacity) {
  return c::guarded([&] {
    const auto object = c::object_of(plan);
    c::put(positions(c::chunks_of(*object, side)), places, capacity, "positions");
  });
}

cpattn_status cpattn_plan_local_cu_seqlens(cpattn_plan* plan, cpattn_side side, int64_t* cu_seqlens,
                                           size_t capacity) {
  return c::guarded([&] {
    const auto object = c::object_of(plan);
    const auto documents =
        static_cast<std::int64_t>(object->plan().problem().batch.documents.size());
    c::put(local_cu_seqlens(documents, c::chunks_of(*object, side)), cu_seqlens, capacity,
           "cu_seqlens");
  });
}

cpattn_status cpattn_plan_next_token_targets(cpattn_plan* plan, const int64_t* tokens,
                                             size_t num_tokens, int64_t ignore, int64_t* targets,
                                             size_t capacity) {
  return c::guarded([&] {
    const auto object = c::object_of(plan);
    require(tokens != nullptr || num_tokens == 0, "tokens: NULL");
    c::put(next_token_targets({tokens, num_tokens}, object->plan().problem().batch,
                              object->plan().shard().q, ignore),
           targets, capacity, "targets");
  });
}

cpattn_status cpattn_plan_shard(cpattn_plan* plan, cpattn_side side, const cpattn_tensor* global,
                                const cpattn_tensor* local) {
  return c::guarded([&] {
    const auto object = c::object_of(plan);
    shard_rows(c::tensor_of(global, "global"), c::chunks_of(*object, side),
               c::tensor_of(local, "local"));
  });
}

cpattn_status cpattn_plan_unshard(cpattn_plan* plan, cpattn_side side, const cpattn_tensor* local,
                                  const cpattn_tensor* global) {
  return c::guarded([&] {
    const auto object = c::object_of(plan);
    unshard_rows(c::tensor_of(local, "local"), c::chunks_of(*object, side),
                 c::tensor_of(global, "global"));
  });
}

cpattn_status cpattn_plan_shard_on_device(cpattn_plan* plan, cpattn_side side,
                                          const cpattn_tensor* global, const cpattn_tensor* local,
                                          void* stream) {
  return c::guarded([&] {
    c::object_of(plan)->shard_rows(c::side_of(side), c::tensor_of(global, "global"),
                                   c::tensor_of(local, "local"), {stream});
  });
}

cpattn_status cpattn_plan_unshard_on_device(cpattn_plan* plan, cpattn_side side,
                                            const cpattn_tensor* local, const cpattn_tensor* global,
                                            void* stream) {
  return c::guarded([&] {
    c::object_of(plan)->unshard_rows(c::side_of(side), c::tensor_of(local, "local"),
                                     c::tensor_of(global, "global"), {stream});
  });
}

cpattn_status cpattn_plan_all_gather(cpattn_plan* plan, cpattn_side side,
                                     const cpattn_tensor* local, const cpattn_tensor* global) {
  return c::guarded([&] {
    const auto object = c::object_of(plan);
    struct Arguments {
      ShardSide side;
      AnyTensor local, global;
    };
    const Arguments given = c::made_or_refused(
        [&] {
          return Arguments{c::side_of(side), c::tensor_of(local, "local"),
                           c::tensor_of(global, "global")};
        },
        [&](const char* why) {
          refuse_all_gather_rows(object->group(), why, c::deadline_of(*object));
        });
    all_gather_rows(object->group(), object->plan().sharding(), given.side, given.local,
                    given.global, c::deadline_of(*object));
  });
}

cpattn_status cpattn_plan_leaves(cpattn_plan* plan, cpattn_leaf* leaves, size_t capacity,
                                 size_t* num_local, int64_t* num_all) {
  return c::guarded([&] {
    const auto object = c::object_of(plan);
    require(num_local != nullptr && num_all != nullptr, "num_local or num_leaves: NULL");
    require(leaves != nullptr || capacity == 0, "leaves: NULL, but capacity is ", capacity);
    const Plan& facts = object->plan();
    const auto own =
        leaf_rows(facts.problem().batch, facts.config(), facts.world_size(), facts.shard().q);
    *num_local = own.size();
    *num_all = num_leaves(facts.problem().batch, facts.config(), facts.world_size());
    if (capacity < own.size()) return;
    for (std::size_t i = 0; i < own.size(); ++i)
      leaves[i] = {own[i].leaf, own[i].begin, own[i].num_rows};
  });
}

cpattn_status cpattn_sum_create(cpattn_sum_type type, int64_t leaves, int64_t size,
                                cpattn_sum** sum) {
  return c::guarded([&] {
    require(sum != nullptr, "sum: NULL, expected the address of a handle");
    require(type == CPATTN_SUM_FLOAT || type == CPATTN_SUM_DOUBLE, "type ", static_cast<int>(type),
            ": expected CPATTN_SUM_FLOAT or CPATTN_SUM_DOUBLE");
    c::give(sum, type == CPATTN_SUM_FLOAT
                     ? std::make_shared<c::Sum>(OrderedSum<float>(leaves, size))
                     : std::make_shared<c::Sum>(OrderedSum<double>(leaves, size)));
  });
}

cpattn_status cpattn_sum_free(cpattn_sum** sum) {
  return c::guarded([&] { c::take_back(sum); });
}

namespace {

/// `values` as numbers of the sum's type.
template <class T>
std::span<const T> numbers(const OrderedSum<T>&, const void* values, std::size_t count) {
  return {static_cast<const T*>(values), values != nullptr ? count : 0};
}

}  // namespace

cpattn_status cpattn_sum_add(cpattn_sum* sum, int64_t leaf, const void* values, size_t num_values) {
  return c::guarded([&] {
    const auto object = c::object_of(sum);
    std::visit([&](auto& typed) { typed.add(leaf, numbers(typed, values, num_values)); }, *object);
  });
}

cpattn_status cpattn_sum_all_reduce(cpattn_sum* sum, cpattn_group* group, void* result,
                                    size_t num_values, double timeout_seconds) {
  return c::guarded([&] {
    const auto object = c::object_of(sum);
    const auto comm = c::object_of(group)->ranks;
    const bool is_timeout = c::is_timeout(timeout_seconds);
    const auto deadline =
        deadline_after(Seconds(is_timeout ? timeout_seconds : CpConfig().timeout_seconds));
    const std::size_t count = result != nullptr ? num_values : 0;
    std::visit(
        [&]<class T>(OrderedSum<T>& typed) {
          if (!is_timeout)
            typed.refuse(detail::concat("timeout_seconds is ", timeout_seconds,
                                        ", expected 0.001 to ", c::kLongestTimeout));
          typed.all_reduce(*comm, {static_cast<T*>(result), count}, deadline);
        },
        *object);
  });
}
