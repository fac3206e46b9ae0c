// A small causal transformer: embedding, blocks of grouped-query attention and SwiGLU, output
// layer. Every rank holds all parameters and the activations of its own tokens.
#pragma once

#include <cpattn/context_parallel.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "batch.h"
#include "layers.h"

namespace trainer {

struct ModelShape {
  std::int64_t vocabulary = 256;
  std::int64_t width = 64;
  std::int64_t num_layers = 2;
  std::int64_t num_heads = 4;
  std::int64_t num_kv_heads = 2;
  std::int64_t head_dim = 16;
  std::int64_t mlp_width = 128;
};

/// One packed batch as this rank sees it: its plan, and its tokens, positions, targets and leaves.
struct LocalBatch {
  std::unique_ptr<cpattn::PlannedAttention> attention;
  std::vector<std::int64_t> tokens;
  std::vector<std::int64_t> positions;
  std::vector<std::int64_t> targets;
  TokenSums sums;
};

/// Collective over the group of `attention`: plans the batch and takes this rank's part of it.
LocalBatch make_local(const cpattn::ContextParallelAttention& attention, const ModelShape& shape,
                      const Batch& batch);

class Model {
 public:
  explicit Model(const ModelShape& shape);

  /// Forward, backward, one step of Adam (counted from 1); the loss before the step. Collective
  /// over the group of the batch's plan; all ranks end with the same parameters.
  float train(LocalBatch& batch, int step, float learning_rate);

  const ModelShape& shape() const { return shape_; }

 private:
  struct Block;
  struct Activations;
  Matrix forward_block(const Block& block, LocalBatch& batch, const Matrix& x,
                       Activations& saved) const;
  Matrix backward_block(Block& block, LocalBatch& batch, const Activations& saved,
                        const Matrix& dy) const;
  void for_each_parameter(const std::function<void(Parameter&)>& visit);

  ModelShape shape_;
  Embedding embedding_;
  std::vector<std::shared_ptr<Block>> blocks_;
  RmsNorm last_norm_;
  Linear head_;
};

}  // namespace trainer
