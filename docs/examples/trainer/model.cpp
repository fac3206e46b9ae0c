#include "model.h"

#include <cpattn/shard_tools.h>

#include <array>
#include <cmath>
#include <string>

namespace trainer {
namespace {

cpattn::AnyTensor heads_of(Matrix& x, std::int64_t heads) {
  return cpattn::contiguous_tensor(static_cast<void*>(x.data.data()), cpattn::DType::f32,
                                   {x.rows, heads, x.width / heads});
}
cpattn::AnyConstTensor heads_of(const Matrix& x, std::int64_t heads) {
  return cpattn::contiguous_tensor(static_cast<const void*>(x.data.data()), cpattn::DType::f32,
                                   {x.rows, heads, x.width / heads});
}
template <class M>
auto lse_of(M& x) {
  return cpattn::contiguous_view(x.data.data(), std::array<std::int64_t, 2>{x.rows, x.width});
}

}  // namespace

struct Model::Block {
  RmsNorm attention_norm;
  Linear q, k, v, o;
  RmsNorm mlp_norm;
  Linear gate, up, down;

  Block(const ModelShape& s, const std::string& name)
      : attention_norm(name + ".attention_norm", s.width),
        q(name + ".q", s.width, s.num_heads * s.head_dim),
        k(name + ".k", s.width, s.num_kv_heads * s.head_dim),
        v(name + ".v", s.width, s.num_kv_heads * s.head_dim),
        o(name + ".o", s.num_heads * s.head_dim, s.width),
        mlp_norm(name + ".mlp_norm", s.width),
        gate(name + ".gate", s.width, s.mlp_width),
        up(name + ".up", s.width, s.mlp_width),
        down(name + ".down", s.mlp_width, s.width) {}
};

/// What the backward of a block needs of its forward.
struct Model::Activations {
  Matrix x, normed, q, k, v, out, lse;
  Matrix middle, mlp_normed, gate, up, hidden;
};

LocalBatch make_local(const cpattn::ContextParallelAttention& attention, const ModelShape& shape,
                      const Batch& batch) {
  const auto num_tokens = static_cast<std::int64_t>(batch.tokens.size());
  cpattn::Problem problem;
  problem.shape = {.num_heads = shape.num_heads,
                   .num_kv_heads = shape.num_kv_heads,
                   .head_dim = shape.head_dim,
                   .value_dim = shape.head_dim,
                   .softmax_scale = 1.0 / std::sqrt(static_cast<double>(shape.head_dim))};
  problem.batch =
      cpattn::batch_from_cu_seqlens(batch.cu_seqlens, batch.cu_seqlens, num_tokens, num_tokens);
  auto planned = attention.plan(problem);
  const cpattn::Plan& plan = planned->plan();
  const std::vector<cpattn::OwnedChunk>& own = plan.shard().q;
  const int size = plan.world_size();
  TokenSums sums(planned->group(), cpattn::leaf_rows(problem.batch, plan.config(), size, own),
                 cpattn::num_leaves(problem.batch, plan.config(), size),
                 plan.config().timeout_seconds);
  const std::span<const std::int64_t> tokens(batch.tokens);
  return {std::move(planned), cpattn::shard_values(tokens, own), cpattn::positions(own),
          cpattn::next_token_targets(tokens, problem.batch, own), std::move(sums)};
}

Model::Model(const ModelShape& shape)
    : shape_(shape),
      embedding_("embedding", shape.vocabulary, shape.width),
      last_norm_("last_norm", shape.width),
      head_("head", shape.width, shape.vocabulary) {
  for (std::int64_t i = 0; i < shape.num_layers; ++i) {
    blocks_.push_back(std::make_shared<Block>(shape, "block" + std::to_string(i)));
  }
}

Matrix Model::forward_block(const Block& block, LocalBatch& batch, const Matrix& x,
                            Activations& saved) const {
  saved.x = x;
  saved.normed = block.attention_norm.forward(x);
  saved.q = block.q.forward(saved.normed);
  saved.k = block.k.forward(saved.normed);
  saved.v = block.v.forward(saved.normed);
  rotate(saved.q, shape_.head_dim, batch.positions, 1);
  rotate(saved.k, shape_.head_dim, batch.positions, 1);
  saved.out = Matrix(x.rows, shape_.num_heads * shape_.head_dim);
  saved.lse = Matrix(x.rows, shape_.num_heads);
  const Activations& in = saved;
  batch.attention->forward({heads_of(in.q, shape_.num_heads), heads_of(in.k, shape_.num_kv_heads),
                            heads_of(in.v, shape_.num_kv_heads),
                            heads_of(saved.out, shape_.num_heads), lse_of(saved.lse)});
  saved.middle = block.o.forward(saved.out);
  add(saved.middle, x);

  saved.mlp_normed = block.mlp_norm.forward(saved.middle);
  saved.gate = block.gate.forward(saved.mlp_normed);
  saved.up = block.up.forward(saved.mlp_normed);
  saved.hidden = swiglu(saved.gate, saved.up);
  Matrix y = block.down.forward(saved.hidden);
  add(y, saved.middle);
  return y;
}

Matrix Model::backward_block(Block& block, LocalBatch& batch, const Activations& saved,
                             const Matrix& dy) const {
  TokenSums& sums = batch.sums;
  const Matrix dhidden = block.down.backward(saved.hidden, dy, sums);
  Matrix dgate, dup;
  swiglu_backward(saved.gate, saved.up, dhidden, dgate, dup);
  Matrix dnormed = block.gate.backward(saved.mlp_normed, dgate, sums);
  add(dnormed, block.up.backward(saved.mlp_normed, dup, sums));
  Matrix dmiddle = block.mlp_norm.backward(saved.middle, dnormed, sums);
  add(dmiddle, dy);

  const Matrix dout = block.o.backward(saved.out, dmiddle, sums);
  Matrix dq(saved.q.rows, saved.q.width), dk(saved.k.rows, saved.k.width);
  Matrix dv(saved.v.rows, saved.v.width);
  batch.attention->backward({heads_of(saved.q, shape_.num_heads),
                             heads_of(saved.k, shape_.num_kv_heads),
                             heads_of(saved.v, shape_.num_kv_heads),
                             heads_of(saved.out, shape_.num_heads),
                             lse_of(saved.lse),
                             heads_of(dout, shape_.num_heads),
                             {},
                             heads_of(dq, shape_.num_heads),
                             heads_of(dk, shape_.num_kv_heads),
                             heads_of(dv, shape_.num_kv_heads)});
  rotate(dq, shape_.head_dim, batch.positions, -1);
  rotate(dk, shape_.head_dim, batch.positions, -1);
  Matrix dx_normed = block.q.backward(saved.normed, dq, sums);
  add(dx_normed, block.k.backward(saved.normed, dk, sums));
  add(dx_normed, block.v.backward(saved.normed, dv, sums));
  Matrix dx = block.attention_norm.backward(saved.x, dx_normed, sums);
  add(dx, dmiddle);
  return dx;
}

float Model::train(LocalBatch& batch, int step, float learning_rate) {
  std::vector<Activations> saved(blocks_.size());
  Matrix x = embedding_.forward(batch.tokens);
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    x = forward_block(*blocks_[i], batch, x, saved[i]);
  }
  const Matrix normed = last_norm_.forward(x);
  const Loss loss = cross_entropy(head_.forward(normed), batch.targets, batch.sums);

  Matrix dx = last_norm_.backward(x, head_.backward(normed, loss.dlogits, batch.sums), batch.sums);
  for (std::size_t i = blocks_.size(); i-- > 0;) {
    dx = backward_block(*blocks_[i], batch, saved[i], dx);
  }
  embedding_.backward(batch.tokens, dx, batch.sums);
  for_each_parameter([&](Parameter& parameter) { parameter.update(step, learning_rate); });
  return loss.value;
}

void Model::for_each_parameter(const std::function<void(Parameter&)>& visit) {
  visit(embedding_.table);
  for (const auto& block : blocks_) {
    for (RmsNorm* norm : {&block->attention_norm, &block->mlp_norm}) visit(norm->gain);
    for (Linear* linear :
         {&block->q, &block->k, &block->v, &block->o, &block->gate, &block->up, &block->down}) {
      visit(linear->weight);
    }
  }
  visit(last_norm_.gain);
  visit(head_.weight);
}

}  // namespace trainer
