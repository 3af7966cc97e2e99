// Whole decoder as one stage, with an internal microbatch.
#pragma once

#include "engine/model/stage.h"

namespace tandem {

class Transformer : public Stage {
 public:
  Transformer(Communicator& tp, const ModelConfig& config, const TransformerOptions& options)
      : Stage(tp, config, options, {}), microbatch_(make_microbatch()) {}

  using Stage::backward, Stage::enqueue_forward, Stage::forward, Stage::set_documents;
  void set_documents(std::span<const int32_t> starts) { set_documents(starts, microbatch_); }
  double forward(std::span<const int32_t> tokens, std::span<const int32_t> targets) {
    return forward(tokens, targets, microbatch_);
  }
  void enqueue_forward(std::span<const int32_t> tokens, std::span<const int32_t> targets) {
    enqueue_forward(tokens, targets, microbatch_);
  }
  void backward(float scale, const FlatRangeCallback& ready = {}) {
    backward(microbatch_, scale, ready);
  }

 private:
  Microbatch microbatch_;
};

}  // namespace tandem
