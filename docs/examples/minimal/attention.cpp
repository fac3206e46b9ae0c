// Attention over one sequence of 4096 tokens, split over all ranks of MPI_COMM_WORLD.
#include <cpattn/context_parallel.h>
#include <cpattn/mpi.h>
#include <cpattn/shard_tools.h>

#include <cstdio>

int main(int argc, char** argv) {
  cpattn::MpiSession mpi(&argc, &argv);  // or MPI_Init_thread and MPI_Finalize of your own
  const auto group = std::make_shared<cpattn::MpiCommunicator>(MPI_COMM_WORLD);
  const cpattn::ContextParallelAttention attention(group, {.mask = cpattn::MaskKind::causal});

  // Once per problem: 8 query heads share 2 kv heads of 64 channels.
  const std::int64_t tokens = 4096, heads = 8, kv_heads = 2, dim = 64;
  const auto plan = attention.plan({.shape = {.num_heads = heads,
                                              .num_kv_heads = kv_heads,
                                              .head_dim = dim,
                                              .value_dim = dim,
                                              .softmax_scale = 0.125},
                                    .batch = cpattn::batch_of_one(tokens, tokens)});

  // This rank's rows, all 0.01 here; row i is row global_rows(...)[i] of the sequence.
  const std::int64_t rows = plan->plan().shard().q_rows;
  std::vector<float> q(rows * heads * dim, 0.01f), k(rows * kv_heads * dim, 0.01f), v = k;
  std::vector<float> out(q.size()), lse(rows * heads), dout = q, dq = q, dk = k, dv = k;
  const auto wide = [&](std::vector<float>& data) {  // [rows, heads, dim]
    return cpattn::contiguous_tensor(data.data(), cpattn::DType::f32, {rows, heads, dim});
  };
  const auto narrow = [&](std::vector<float>& data) {  // [rows, kv_heads, dim]
    return cpattn::contiguous_tensor(data.data(), cpattn::DType::f32, {rows, kv_heads, dim});
  };

  // Per layer, all ranks together.
  plan->forward({.q = wide(q),
                 .k = narrow(k),
                 .v = narrow(v),
                 .out = wide(out),
                 .lse = {lse.data(), {rows, heads}, {heads, 1}}});
  plan->backward({.q = wide(q),
                  .k = narrow(k),
                  .v = narrow(v),
                  .out = wide(out),
                  .lse = {lse.data(), {rows, heads}, {heads, 1}},
                  .dout = wide(dout),
                  .dlse = {},  // nothing comes back through lse
                  .dq = wide(dq),
                  .dk = narrow(dk),
                  .dv = narrow(dv)});
  std::printf("rank %d of %d: %lld rows, out %.6f\n", group->rank(), group->size(),
              static_cast<long long>(rows), out.empty() ? 0.01 : out[0]);
}
